"""How fast a job's hosts read memory and multiply, timed on all ranks at once with their threads, or known from before.
Knows no plan."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, ranks_there, share_cores
from pipeinfer.core.interfaces import FloatArray
from pipeinfer.disk_cache import user_cache
from pipeinfer.virtual.nodes import Node, estimated_machine

if TYPE_CHECKING:
    from pipeinfer.cluster.transport import Link

T = TypeVar("T")
SOURCE = "source"
"""A field that is not kept: whether times are from before is known by reading them."""


def known(
    link: "Link", key: str, kind: type[T], find: Callable[[], tuple[T | None, str]], ranks: Collection[int]
) -> tuple[list[tuple[T | None, str]], bool]:
    """Of every rank its value and why it has none, and whether the values were kept. If one of `ranks` has nothing kept
    under its `key`, all ranks time anew and keep the result. Collective.

    `key`: empty on ranks that have nothing to find. `kind`: a dataclass of seconds or speeds. `find`: collective.
    """
    kept = user_cache()
    found = link.all_gather((_read(kind, kept.get(key)) if key else None, ""))
    if all(found[rank][0] for rank in ranks):
        return found, True
    own, error = find()
    if own:
        kept.put(key, {name: getattr(own, name) for name in _names(kind)})
    return link.all_gather((own, error)), False


def _names(kind: Any) -> dict[str, Any]:
    """Fields that are kept -> their defaults."""
    return {field.name: field.default for field in fields(kind) if field.name != SOURCE}


def _read(kind: type[T], value: Any) -> T | None:
    """The value, if JSON has a positive number for each field, or null where that is the default."""
    names = _names(kind)
    if not isinstance(value, dict) or value.keys() != names.keys():
        return None
    given = [number for name, number in value.items() if number is not None or names[name] is not None]
    are_numbers = all(isinstance(number, float) and 0 < number < math.inf for number in given)
    return kind(**value) if are_numbers else None


N_BYTES = 1 << 25
"""Each thread's block: larger than the caches near a core."""

N_SIDE = 384
"""Size of the multiplied matrices."""

TIMED_S = 0.15
OF_READING, OF_MULTIPLYING = 0.77, 0.5
"""The shares that inference reaches: STREAM reaches 75 to 80% of a memory's peak and inference about 60%; quantised
kernels reach half of what float matrices do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Estimated speeds of inference."""

    bytes_per_s: float
    flop_per_s: float


def measure_speed(n_threads: int) -> Speed:
    """Takes about 0.3 s. The ranks of a host must measure at the same time: the sum of their speeds is the host's."""
    blocks = [np.ones(N_BYTES // 4, np.float32) for _ in range(n_threads)]
    squares = [np.ones((N_SIDE, N_SIDE), np.float32) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as threads:
        read_s = _best_s(threads, lambda block: block.dot(block), blocks)
        multiply_s = _best_s(threads, lambda square: square @ square, squares)
    return Speed(
        OF_READING * n_threads * N_BYTES / read_s,
        OF_MULTIPLYING * n_threads * 2 * N_SIDE**3 / multiply_s,
    )


def _best_s(threads: ThreadPoolExecutor, work: Callable[[FloatArray], object], parts: Sequence[FloatArray]) -> float:
    """Seconds of the fastest of several rounds in which every thread does its part."""
    best_s, start_s = float("inf"), time.perf_counter()
    while time.perf_counter() - start_s < TIMED_S or best_s == float("inf"):
        round_s = time.perf_counter()
        list(threads.map(work, parts))
        best_s = min(best_s, time.perf_counter() - round_s)
    return best_s


MEASURED = "measured"


def own_speed(hosts: Sequence[Host], rank: int) -> Speed:
    """What a rank reaches while the others of its host measure too."""
    return measure_speed(share_cores(hosts, frozenset(range(len(hosts))))[rank])


def known_speeds(link: "Link", hosts: Sequence[Host]) -> list[Speed]:
    """Of every rank, as it was found the last time, else now. Collective."""
    host, n_there = hosts[link.rank], len(ranks_there(hosts, link.rank))
    key = f"speed: {host.name}, {host.processor}, {host.n_cores} cores, {n_there} ranks there, pipeinfer {__version__}"

    def mean() -> tuple[Speed | None, str]:  # ranks of a host keep one value; on busy cores theirs differ a hundredfold
        speeds = link.all_gather(own_speed(hosts, link.rank))
        here = [speeds[rank] for rank in ranks_there(hosts, link.rank)]
        return Speed(fmean(speed.bytes_per_s for speed in here), fmean(speed.flop_per_s for speed in here)), ""

    found, _ = known(link, key, Speed, mean, range(link.size))
    return [speed for speed, _ in found if speed]


def with_speeds(speeds: Sequence[Speed], hosts: Sequence[Host], gpus: Sequence[Sequence[str]] = ()) -> list[Node]:
    """A node a rank; a host is as fast as its ranks were together. `gpus`: that each rank sees."""
    nodes = []
    for rank, host in enumerate(hosts):
        here = [speed for speed, other in zip(speeds, hosts, strict=True) if other.name == host.name]
        read, compute = sum(speed.bytes_per_s for speed in here), sum(speed.flop_per_s for speed in here)
        machine = estimated_machine(host.name, host.n_cores, read, compute, host.memory.host)
        nodes.append(Node(host, machine, MEASURED, ", ".join(gpus[rank]) if gpus else ""))
    return nodes
