"""A rank's host: its cores and free memory, and how the ranks of a host share the cores. Knows no model and no MPI."""

import math
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.cluster.hosts.free_memory import FreeMemory, free_memory
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.sizes import count_text

CGROUPS = Path("/sys/fs/cgroup")
GPU_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
)  # fmt: skip
"""Variables of GPU vendors that say which GPUs a process sees."""

PROCESSOR = ("model name", "CPU implementer", "CPU part", "cpu")
"""Names of the processor in /proc/cpuinfo, on x86, ARM and POWER."""

Cores = frozenset[int]
"""Core numbers."""


@dataclass(frozen=True, slots=True)
class Host:
    """A rank's host. `cores`: those that the rank may use; `n_cores`: how many cores' time it may take, which can be
    less in a container; 0 if unknown."""

    name: str
    cores: Cores
    n_cores: int
    memory: FreeMemory = field(default_factory=FreeMemory)
    """Memory that this rank may still take."""
    clock: str = ""
    """Ranks with the same name read the same clock; empty: unknown."""
    lacks: frozenset[str] = frozenset()
    """Paths of models that the host lacks: the rank's layers of them have to be sent."""
    processor: str = ""
    """The processor's name; empty: unknown."""
    gpus_given: str = ""
    """Ranks of a host with the same text see the same GPUs; else the launcher gave each its own."""
    offloads: bool = False
    """Whether this rank's libllama can put layers on GPUs."""
    gpu_names: tuple[str, ...] = ()
    """Of the GPUs that it sees, where some rank's layers go to GPUs."""
    gpus: tuple[tuple[str, int], ...] = ()
    """The devices of this rank's layers, and the bytes free on each; empty: none, or unknown."""
    repacked: tuple[tuple[int, int, str], ...] = ()
    """Types of weights that libggml repacks, the rows of each that may be computed at once with exact numerics, and a
    digest of results; see pipeinfer.models.llama.repacking."""
    grouped: tuple[tuple[int, str], ...] = ()
    """Types of which a row has the same bits in all whole groups of rows, and a digest of results."""
    speed: LayerSpeed | None = None
    """This rank's speed at the target's layers; None: not timed."""
    untimed: str = ""
    """Why timing that failed."""
    device_messages: bool = False
    """Whether MPI sends from, and receives into, the memory of the device that computes this rank's layers."""


def this_host(name: str) -> Host:
    cores = frozenset(os.sched_getaffinity(0))
    return Host(
        name, cores, max(1, int(min(len(cores), _quota()))), free_memory(), clock_name(), processor=processor_name(),
        gpus_given=gpus_given(os.environ),
    )  # fmt: skip


def gpus_given(environ: Mapping[str, str]) -> str:
    """The launcher's variables about this rank's GPUs. Slurm may number each rank's GPUs from 0."""
    own = ("SLURM_LOCALID",) if "SLURM_GPUS_PER_TASK" in environ else ()
    return " ".join(f"{name}={environ[name]}" for name in (*GPU_VARIABLES, *own) if name in environ)


def clock_name() -> str:
    """Identifies this process's monotonic clock: the boot and the time namespace; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first processor's name: reading all of them would take long on large hosts."""
    try:
        with open(cpuinfo, "rb") as file:
            first = file.read(4096).decode(errors="replace").partition("\n\n")[0]
    except OSError:
        return ""
    fields = (line.partition(":") for line in first.splitlines())
    return " ".join(value.strip() for name, _, value in fields if name.strip() in PROCESSOR)


def other_clocks(hosts: Sequence[Host]) -> list[int]:
    """The ranks whose clock may differ from rank 0's."""
    first, *others = hosts
    return [rank for rank, host in enumerate(others, start=1) if not host.clock or host.clock != first.clock]


def ranks_there(hosts: Sequence[Host], rank: int) -> list[int]:
    """All ranks of a rank's host."""
    return [other for other, each in enumerate(hosts) if each.name == hosts[rank].name]


def sharers(hosts: Sequence[Host], computing: Set[int], rank: int) -> int:
    """How many ranks compute on a rank's host; that rank is counted in any case."""
    return len({rank, *(other for other in computing if hosts[other].name == hosts[rank].name)})


def share_cores(hosts: Sequence[Host], computing: Set[int]) -> tuple[int, ...]:
    """Threads of each rank: its cores divided by the ranks that compute on them, at least 1."""
    return tuple(max(1, host.n_cores // max(1, len(_rivals(hosts, computing, host)))) for host in hosts)


def spare_cores(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int], rank: int) -> int:
    """Cores of a rank without a computing thread; negative if threads wait for cores."""
    return hosts[rank].n_cores - _threads_on(hosts, computing, threads, hosts[rank])


def crowded_hosts(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int]) -> list[str]:
    """A warning for each host whose computing ranks have more threads than cores."""
    lines: dict[str, str] = {}
    for host in hosts:
        rivals, n_threads = _rivals(hosts, computing, host), _threads_on(hosts, computing, threads, host)
        if n_threads > host.n_cores > 0 and host.name not in lines:
            ways = ["fewer ranks there"] * (len(rivals) > 1) + ["fewer threads (-t)"] * (n_threads > len(rivals))
            lines[host.name] = (
                f"host {host.name} has {count_text(host.n_cores, 'core')} for {count_text(n_threads, 'thread')} of "
                f"{count_text(len(rivals), 'rank')} that compute; {' or '.join(ways)} may be faster"
            )
    return list(lines.values())


def crowding(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int]) -> float:
    """Computing threads a core on the most crowded host, at least 1."""
    return max(1.0, *(_threads_on(hosts, computing, threads, host) / host.n_cores for host in hosts if host.n_cores))


def _threads_on(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int], host: Host) -> int:
    """Threads that compute on some of a rank's cores."""
    return sum(threads[rank] for rank in _rivals(hosts, computing, host))


def _rivals(hosts: Sequence[Host], computing: Set[int], host: Host) -> list[int]:
    """The ranks that compute on some of a rank's cores. A launcher may bind each rank to its own cores."""
    return [rank for rank in sorted(computing) if hosts[rank].name == host.name and hosts[rank].cores & host.cores]


def _quota(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' time that this process's control groups (version 2) allow it; infinite if they set no limit."""
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
