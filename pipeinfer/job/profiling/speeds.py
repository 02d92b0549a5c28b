"""How fast hosts are, and the target's layers on ranks that are not alike, for the split, before there is a plan; and
times that are kept for the next start. A `Schedule` says which ranks are timed, at which layers, and when. Collective
functions, which take a link, branch only on values that all ranks have in common: arguments that are the same
everywhere, and what the link returned. What a rank does alone is in `_RankTimer`, which knows no link."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, mean
from typing import TYPE_CHECKING, Any, TypeVar

from pipeinfer import __version__
from pipeinfer.cluster.assignment import Sizes
from pipeinfer.cluster.hosts.host import (
    BEFORE,
    NOW,
    Host,
    LayerSpeed,
    Speed,
    measure_speed,
    ranks_there,
    share_cores,
    threads_of_ranks,
    threads_there,
    turns_on_cores,
)
from pipeinfer.cluster.hosts.resources import forget_peak
from pipeinfer.cluster.timed_runs import time_layers
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.job.loading.stages import load_layers, timing_key
from pipeinfer.job.options.options import JobPlacement
from pipeinfer.job.options.sections import Numerics
from pipeinfer.job.placement.devices import DevicePlan, RankDevices, plan_devices
from pipeinfer.job.placement.job_plan import sizes_of
from pipeinfer.job.placement.numerics import NumericsPlan, unnamed_numerics
from pipeinfer.models.gguf.model_info import ModelHeaders, ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import open_blank, slice_bytes
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.virtual.nodes import Node, estimated_machine

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link
    from pipeinfer.job.launch import Crew

MEASURED = "measured"
TIMED_BYTES = 128 << 20  # of weights that are timed: more than CPU caches hold, so that they come from memory
ALIKE = 1.1  # times of ranks of a kind may differ by this factor, which is noise

LayerSpan = tuple[int, int]  # layers [first, last)

RankKind = tuple[object, ...]  # processor, cores, threads, device: what tells speeds of ranks apart before timing


@dataclass(frozen=True, slots=True)
class Schedule:
    """`ranks`: those that are timed. `turns`: of each; ranks of a host are timed at once, or in turns where it lacks
    cores, else the system's scheduler would be timed. Of all ranks: devices, threads while all compute, and kinds:
    ranks of one kind should be equally fast. `target_ranks`: those of the target if rank 0 drafts."""

    ranks: list[int]
    turns: dict[int, int]
    devices: Sequence[RankDevices]
    threads: tuple[int, ...]
    kinds: list[RankKind]
    target_ranks: Sequence[int]


def make_schedule(
    placement: JobPlacement, hosts: Sequence[Host], target_ranks: list[int], chooses_draft_rank: bool
) -> Schedule | None:
    """The ranks that get layers of the target, or may get some as the planner chooses the draft's rank, if they are not
    alike. Raises UserError for wrong options."""
    everyone = range(len(hosts))
    devices = plan_devices(placement, hosts)
    threads = threads_of_ranks(placement.threads, frozenset(everyone), hosts)
    ranks = list(everyone) if chooses_draft_rank else target_ranks
    turns = turns_on_cores(hosts, threads, ranks)
    there = [tuple(sorted(threads_there(hosts, threads, rank))) for rank in everyone]
    kinds: list[RankKind] = []
    for rank, host in enumerate(hosts):
        device = devices[rank].target
        work = str(device.backend), device.n_gpu_layers, device.name, device.places
        kinds.append((host.processor, host.n_cores, threads[rank], *work, there[rank]))
    differ = len({(hosts[rank].name, kinds[rank]) for rank in ranks}) > 1
    return Schedule(ranks, turns, devices, threads, kinds, target_ranks) if differ else None


def average_alike(speeds: Sequence[LayerSpeed | None], kinds: Sequence[RankKind]) -> list[LayerSpeed | None]:
    """Average ranks of one kind whose times differ only by noise. None where all are of one kind: sizes decide."""
    means, groups = list(speeds), _by_kind(speeds, kinds)
    for of_kind in groups:
        if _are_alike(of_kind):
            s_per_byte = mean(speed.s_per_byte for speed in of_kind.values())
            for rank, speed in of_kind.items():
                means[rank] = None if len(groups) == 1 else replace(speed, s_per_byte=s_per_byte)
    return means


def is_doubtful(speeds: Sequence[LayerSpeed | None], kinds: Sequence[RankKind]) -> bool:
    """Whether ranks of a kind differ: one of them is slower, or was disturbed."""
    return not all(map(_are_alike, _by_kind(speeds, kinds)))


def _by_kind(speeds: Sequence[LayerSpeed | None], kinds: Sequence[RankKind]) -> list[dict[int, LayerSpeed]]:
    timed = {rank: speed for rank, speed in enumerate(speeds) if speed}
    return [
        {rank: timed[rank] for rank in timed if kinds[rank] == kind}
        for kind in dict.fromkeys(kinds[rank] for rank in timed)
    ]


def _are_alike(speeds: Mapping[int, LayerSpeed]) -> bool:
    times = [speed.s_per_byte for speed in speeds.values()]
    return max(times) <= ALIKE * min(times)


def timed_span(sizes: Sizes, n_stages: int, is_last: bool) -> LayerSpan | None:
    """Layers to time for one of `n_stages`: an equal share, TIMED_BYTES at most, from the middle, or from the end
    with the output matrix; None if there are none."""
    n_layers = len(sizes.layer_bytes)
    most = min(n_layers // n_stages, TIMED_BYTES * n_layers // max(1, sum(sizes.layer_bytes)))
    counts = [*range(max(1, most), 0, -1), *range(max(1, most) + 1, n_layers)]
    for count in counts:
        middle = (n_layers - count + 1) // 2
        starts = [n_layers - count] if is_last else sorted(range(1, n_layers - count), key=lambda at: abs(at - middle))
        for first in starts:
            if first > 0 and (first, first + count) not in sizes.faults:
                return first, first + count
    return None if is_last else timed_span(sizes, n_stages, is_last=True)


T = TypeVar("T")

N_CELLS = 256
N_ROUNDS = 3  # times that ranks of a kind that differ are timed at most; the best is kept, as a host may be busy
SOURCE = "source"  # a field that is not kept: it says whether times were


def with_layer_times(
    crew: "Crew", hosts: Sequence[Host], schedule: Schedule, target: Path, options: Numerics
) -> Sequence[Host]:
    """The hosts with the speed of those that get layers. Collective."""
    ranks, kinds, link = schedule.ranks, schedule.kinds, crew.link
    info = _on_rank_0(link, lambda: read_model_info(target))
    fingerprint, sizes = link.broadcast((info.fingerprint, sizes_of(info)) if info else ("", None))
    if not sizes:
        return hosts
    spans = {rank: timed_span(sizes, len(ranks), rank == ranks[-1]) for rank in ranks}
    if not all(spans.values()):
        return hosts
    span, describe = spans.get(link.rank), crew.watch.describe
    timer = _RankTimer(options, hosts, sizes, fingerprint, schedule, link.rank, span, describe)

    measure = partial(_time_ranks, link, timer, info, schedule.turns, kinds)
    times, are_cached = recall(link, timer.key, LayerSpeed, measure, ranks)
    speeds = average_alike([speed for speed, _ in times], kinds)
    source = BEFORE if are_cached else NOW
    return [
        replace(host, speed=speed and replace(speed, source=source), untimed=error)
        for host, speed, (_, error) in zip(hosts, speeds, times, strict=True)
    ]


def _on_rank_0(link: "Link", read: Callable[[], T]) -> T | None:
    """What `read` returns there; None elsewhere, and for a UserError, which planning repeats."""
    try:
        return read() if link.rank == 0 else None
    except UserError:
        return None


def _time_ranks(
    link: "Link", timer: "_RankTimer", info: ModelInfo | None, turns: Mapping[int, int], kinds: Sequence[RankKind]
) -> list[tuple[LayerSpeed | None, str]]:
    """Of every rank its speed, and why it could not load its layers; then no rank has a speed. `info`: the target's, on
    rank 0; `turns`: see `Schedule`; all ranks are timed again while those of a kind differ. Collective."""
    headers = link.broadcast(_on_rank_0(link, lambda: info.read_headers() if info else None))
    if not headers:
        return [(None, "")] * link.size
    with timer.loaded(headers) as (model, error):
        errors = link.all_gather(error)
        best: list[LayerSpeed | None] = [None] * link.size
        for _ in range(0 if any(errors) else N_ROUNDS):
            for turn in range(1 + max(turns.values())):
                speeds = link.all_gather(timer.time(model) if turns.get(link.rank) == turn else None)
                best = [
                    min(filter(None, pair), key=lambda speed: speed.s_per_byte, default=None)
                    for pair in zip(best, speeds, strict=True)
                ]
            if not is_doubtful(best, kinds):
                break
    return list(zip(best, errors, strict=True))


@dataclass(frozen=True)
class _RankTimer:
    """One rank's part of the timing. `span`: the layers that it times, if any. `describe` tells the watch of it."""

    options: Numerics
    hosts: Sequence[Host]
    sizes: Sizes
    fingerprint: str
    schedule: Schedule
    rank: int
    span: LayerSpan | None
    describe: Callable[[str], object]

    @property
    def device(self) -> DevicePlan:
        return self.schedule.devices[self.rank].target

    @property
    def key(self) -> str:
        """The name under which this rank's speed is kept; empty: it times nothing."""
        if not self.span:
            return ""
        first, last = self.span
        what = f"layers: {self.fingerprint} {first}-{last - 1}, {self.options.kernels}, {self.hosts[self.rank].name}"
        return timing_key(what, self.device, self.hosts, self.schedule.threads, self.rank)

    @contextmanager
    def loaded(self, headers: ModelHeaders) -> Iterator[tuple[LoadedModel | None, str]]:
        """The layers without weights, or why they cannot be loaded; they are freed at the end."""
        model, error = None, ""
        if self.span:
            self.describe(f"timing layers {self.span[0]}-{self.span[1] - 1}")
            try:
                model = self._load_blank(headers, self.span)
            except UserError as caught:
                error = str(caught)
        yield model, error
        if model:
            model.close()
            forget_peak()  # the job's own models come later
        self.describe("")

    def time(self, model: LoadedModel | None) -> LayerSpeed | None:
        if not model or not self.span:
            return None
        output_bytes = self.sizes.output_bytes if model.is_last else 0
        layer_bytes = self.sizes.layer_bytes[slice(*self.span)]
        return time_layers(model, layer_bytes, output_bytes, time.monotonic, stops=not self.device.is_torch)

    def _load_blank(self, headers: ModelHeaders, span: LayerSpan) -> LoadedModel:
        """Raises UserError where the layers cannot be loaded, or fill the host."""
        device = self.device
        info = read_model_info(headers)
        n_bytes, memory = slice_bytes(info, *span), self.hosts[self.rank].memory
        # all ranks of this host load as much
        room = min(memory.process, memory.host // len(ranks_there(self.hosts, self.rank)))
        if n_bytes > room:
            raise UserError(f"{n_bytes / 1e6:.0f} MB of layers are more than the {room / 1e6:.0f} MB that it has")
        ranks = self.schedule.target_ranks
        hosts, target = [self.hosts[rank] for rank in ranks], [self.schedule.devices[rank].target for rank in ranks]
        numerics = unnamed_numerics(self.options, hosts, info, target)  # a row is timed, and no group of rows
        threads = self.schedule.threads[self.rank]
        params = timing_params(numerics, device, n_cells=N_CELLS, n_batch=1, n_outputs_max=1, n_threads=threads)
        return load_layers(lambda: open_blank(info, *span), params, device)


def timing_params(numerics: NumericsPlan, device: DevicePlan, **sizes: Any) -> LlamaParams:
    """Of layers of the target that are timed. `sizes`: further fields."""
    kernels = {name: getattr(numerics, name) for name in ("exact", "cache", "repack", "repacked", "at_once")}
    where = {name: getattr(device, name) for name in ("n_gpu_layers", "devices", "places")}
    return LlamaParams(n_seq_max=2, **where, **kernels, **sizes)


# -- times that are kept


def recall(
    link: "Link", key: str, kind: type[T], measure: Callable[[], list[tuple[T | None, str]]], ranks: Collection[int]
) -> tuple[list[tuple[T | None, str]], bool]:
    """Of every rank its value and why it has none, and whether the values were kept. If one of `ranks` has nothing kept
    under its `key`, all ranks measure and keep the result. Collective. `key`: empty on ranks that measure nothing.
    `kind`: a dataclass of seconds or speeds. `measure`: collective; returns the same on all ranks."""
    cache = user_cache()
    cached = link.all_gather(_read(kind, cache.get(key)) if key else None)
    if all(cached[rank] for rank in ranks):
        return [(value, "") for value in cached], True
    results = measure()
    if value := results[link.rank][0]:
        cache.put(key, {name: getattr(value, name) for name in _names(kind)})
    return results, False


def _names(kind: Any) -> dict[str, Any]:
    """Fields that are kept -> their defaults."""
    return {field.name: field.default for field in fields(kind) if field.name != SOURCE}


def _read(kind: type[T], value: Any) -> T | None:
    """The value, if JSON has a positive number for each field, or null where that is the default."""
    names = _names(kind)
    if not isinstance(value, dict) or value.keys() != names.keys():
        return None
    numbers = [number for name, number in value.items() if number is not None or names[name] is not None]
    are_numbers = all(isinstance(number, float) and 0 < number < math.inf for number in numbers)
    return kind(**value) if are_numbers else None


# -- hosts


def rank_speed(hosts: Sequence[Host], rank: int) -> Speed:
    """What this rank reaches while the others of its host measure too."""
    return measure_speed(share_cores(hosts, frozenset(range(len(hosts))))[rank])


def host_speeds(link: "Link", hosts: Sequence[Host]) -> list[Speed]:
    """The speed of every rank, measured now or kept from the last time. Collective."""
    host, n_there = hosts[link.rank], len(ranks_there(hosts, link.rank))
    key = f"speed: {host.name}, {host.processor}, {host.n_cores} cores, {n_there} ranks there, pipeinfer {__version__}"

    def measure() -> list[tuple[Speed | None, str]]:
        """Ranks of a host keep its mean: on busy cores theirs differ a hundredfold."""
        speeds = link.all_gather(rank_speed(hosts, link.rank))
        of_hosts = [[speeds[rank] for rank in ranks_there(hosts, each)] for each in range(link.size)]
        reads = [fmean(speed.bytes_per_s for speed in there) for there in of_hosts]
        computes = [fmean(speed.flop_per_s for speed in there) for there in of_hosts]
        return [(Speed(*both), "") for both in zip(reads, computes, strict=True)]

    speeds, _ = recall(link, key, Speed, measure, range(link.size))
    return [speed for speed, _ in speeds if speed]


def with_speeds(speeds: Sequence[Speed], hosts: Sequence[Host], gpus: Sequence[Sequence[str]] = ()) -> list[Node]:
    """A node a rank; a host is as fast as its ranks were together. `gpus`: that each rank sees."""
    nodes = []
    for rank, host in enumerate(hosts):
        there = [speeds[other] for other in ranks_there(hosts, rank)]
        read, compute = sum(speed.bytes_per_s for speed in there), sum(speed.flop_per_s for speed in there)
        machine = estimated_machine(host.name, host.n_cores, read, compute, host.memory.host)
        nodes.append(Node(host, machine, MEASURED, ", ".join(gpus[rank]) if gpus else ""))
    return nodes
