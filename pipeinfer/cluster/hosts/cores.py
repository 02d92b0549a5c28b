"""Where a rank runs: its cores, the memory left to it, and how the ranks of a host share the cores. Knows no model and
no MPI."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.cluster.hosts.free_memory import FreeMemory, free_memory
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed

CGROUPS = Path("/sys/fs/cgroup")
GPU_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip
"""Which GPUs a process sees, in the words of those who make them."""

PROCESSOR = ("model name", "CPU implementer", "CPU part", "cpu")
"""What /proc/cpuinfo calls a processor, on x86, ARM and POWER."""


Cores = frozenset[int]
"""Numbers of cores."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where a rank runs: the numbers of the cores that it may use, and as how many cores' time it may take (a container
    may be allowed less); 0 where nobody knows."""

    name: str
    cores: Cores
    n_cores: int
    memory: FreeMemory = field(default_factory=FreeMemory)
    """What this rank may still take of the host's memory."""
    clock: str = ""
    """Ranks of one name here read one clock; empty: nobody knows."""
    lacks: frozenset[str] = frozenset()
    """Paths of models that are not there: what it computes of them has to be sent."""
    processor: str = ""
    """What the host says it is; empty: it does not say."""
    gpus_given: str = ""
    """Ranks of a host of which this is the same see the same GPUs; others were given their own by the launcher."""
    gpus: tuple[tuple[str, int], ...] = ()
    """The devices that layers of this rank go to, and the bytes that are free on each; empty: none, or nobody knows."""
    nodes: tuple[tuple[int, Cores], ...] = ()
    """Of each NUMA node that has cores of it: the node's number and those."""
    is_bound: bool = False
    """Whether its nodes have cores that this rank may not use."""
    numa: str = ""
    """The NUMA nodes, by number, that the rank keeps to; empty: it was not asked to."""
    speed: LayerSpeed | None = None
    """Of this rank, at the target's layers; None: nobody has timed it."""
    untimed: str = ""
    """Why that could not be timed, where it should have been."""
    device_messages: bool = False
    """Whether MPI takes activations from the memory of what computes this rank's layers, and puts them there."""
    draft_s: tuple[float, float] | None = None
    """A row of the draft on this rank: by what computes the target's layers there, and by libllama on the CPU; None:
    nobody has timed it."""


def this_host(name: str) -> Host:
    cores = frozenset(os.sched_getaffinity(0))
    return Host(
        name, cores, max(1, int(min(len(cores), _quota()))), free_memory(), clock_name(), processor=processor_name(),
        gpus_given=gpus_given(os.environ),
    )  # fmt: skip


def gpus_given(environ: Mapping[str, str]) -> str:
    """What a launcher says of the GPUs that it gave to a rank. Slurm may number those of each rank from 0 on."""
    own = ("SLURM_LOCALID",) if "SLURM_GPUS_PER_TASK" in environ else ()
    return " ".join(f"{name}={environ[name]}" for name in (*GPU_VARIABLES, *own) if name in environ)


def clock_name() -> str:
    """Whose monotonic clock this process reads: this boot's, shifted by the time namespace; empty where not said."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of the first processor: all others would take a while where there are many."""
    try:
        with open(cpuinfo, "rb") as file:
            first = file.read(4096).decode(errors="replace").partition("\n\n")[0]
    except OSError:
        return ""
    fields = (line.partition(":") for line in first.splitlines())
    return " ".join(value.strip() for name, _, value in fields if name.strip() in PROCESSOR)


def other_clocks(hosts: Sequence[Host]) -> list[int]:
    """The ranks that may read another clock than rank 0 does."""
    first, *others = hosts
    return [rank for rank, host in enumerate(others, start=1) if not host.clock or host.clock != first.clock]


def sharers(hosts: Sequence[Host], computing: Set[int], rank: int) -> int:
    """How many ranks compute on a rank's host, that rank counted whether it does or not."""
    return len({rank, *(other for other in computing if hosts[other].name == hosts[rank].name)})


def share_cores(hosts: Sequence[Host], computing: Set[int]) -> tuple[int, ...]:
    """Threads of each rank: its cores shared by all ranks that compute on them, at least 1."""
    return tuple(max(1, host.n_cores // max(1, len(_rivals(hosts, computing, host)))) for host in hosts)


def spare_cores(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int], rank: int) -> int:
    """Cores of a rank that no thread computes on; negative where threads wait for cores."""
    return hosts[rank].n_cores - _threads_on(hosts, computing, threads, hosts[rank])


def crowded_hosts(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int]) -> list[str]:
    """A line for each host on which the ranks that compute have more threads than cores, so that they wait in turns."""
    lines: dict[str, str] = {}
    for host in hosts:
        rivals, n_threads = _rivals(hosts, computing, host), _threads_on(hosts, computing, threads, host)
        if n_threads > host.n_cores > 0 and host.name not in lines:
            lines[host.name] = (
                f"host {host.name} has {_count(host.n_cores, 'core')} for {_count(n_threads, 'thread')} of "
                f"{_count(len(rivals), 'rank')} that compute; fewer ranks there"
                f"{', or fewer threads (-t),' if n_threads > len(rivals) else ''} may be faster"
            )
    return list(lines.values())


def crowding(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int]) -> float:
    """Threads of ranks that compute on each core, where they are the most; 1 at least."""
    return max(1.0, *(_threads_on(hosts, computing, threads, host) / host.n_cores for host in hosts if host.n_cores))


def _threads_on(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int], host: Host) -> int:
    """That compute on some of a rank's cores."""
    return sum(threads[rank] for rank in _rivals(hosts, computing, host))


def _rivals(hosts: Sequence[Host], computing: Set[int], host: Host) -> list[int]:
    """The ranks that compute on some of a rank's cores. A launcher may have given each rank cores of its own."""
    return [rank for rank in sorted(computing) if hosts[rank].name == host.name and hosts[rank].cores & host.cores]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _quota(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that this process's control groups (version 2) allow it; infinite where they do not say."""
    try:
        path = next(line[4:] for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        return math.inf
    inner = root / path
    return min(_limit(folder / "cpu.max") for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _limit(file: Path) -> float:
    try:
        most, period = file.read_text().split()
        return int(most) / int(period)
    except (OSError, ValueError):  # "max": no limit
        return math.inf
