"""A rank's host: its cores, memory and devices, how fast a rank is there, and how its ranks share its cores. Measures
the speed of memory and arithmetic alone; knows no MPI and loads no model: what `Host` has of models and devices is
found out elsewhere."""

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.text import count_text

NOW, BEFORE = "timed now", "timed before"  # sources of times
N_BYTES = 1 << 25  # each thread's block: larger than the caches near a core
N_SIDE = 384  # size of the multiplied matrices
TIMED_S = 0.15

OF_READING, OF_MULTIPLYING = 0.77, 0.5
"""The shares that inference reaches: STREAM reaches 75 to 80% of a memory's peak and inference about 60%; quantised
kernels reach half of what float matrices do."""


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """s_per_byte  of a layer's weights
    output_s    of the output matrix; None: the same as layers of so many bytes
    source      where the times are from"""

    s_per_byte: float
    output_s: float | None = None
    source: str = ""

    def seconds(self, layer_bytes: Sequence[int], output_bytes: int) -> list[float]:
        """Seconds of each layer; the last one includes the output matrix."""
        *layers, last = (self.s_per_byte * n_bytes for n_bytes in layer_bytes)
        return [*layers, last + (self.s_per_byte * output_bytes if self.output_s is None else self.output_s)]

    def layer_s(self, layer_bytes: Sequence[int]) -> float:
        """Seconds of a layer of the model's mean size."""
        return self.s_per_byte * sum(layer_bytes) / len(layer_bytes)


def distinct_speeds(speeds: Sequence[LayerSpeed | None]) -> list[LayerSpeed]:
    """The speeds, if all are known and they differ; else none, and sizes alone decide."""
    timed = [speed for speed in speeds if speed]
    return timed if len(timed) == len(speeds) and len(set(timed)) > 1 else []


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
    return Speed(OF_READING * n_threads * N_BYTES / read_s, OF_MULTIPLYING * n_threads * 2 * N_SIDE**3 / multiply_s)


def _best_s(threads: ThreadPoolExecutor, work: Callable[[FloatArray], object], parts: Sequence[FloatArray]) -> float:
    """Seconds of the fastest of several rounds in which every thread does its part."""
    best_s, start_s = float("inf"), time.perf_counter()
    while time.perf_counter() - start_s < TIMED_S or best_s == float("inf"):
        round_s = time.perf_counter()
        list(threads.map(work, parts))
        best_s = min(best_s, time.perf_counter() - round_s)
    return best_s


PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = sys.maxsize
V1_UNLIMITED = 1 << 60  # limits of version 1 control groups from here on are none

GPU_VARIABLES: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
GPU_VARIABLES += ("GGML_VK_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
"""Variables of GPU vendors that say which GPUs a process sees."""

PROCESSOR = ("model name", "CPU implementer", "CPU part", "cpu")
"""Names of the processor in /proc/cpuinfo, on x86, ARM and POWER."""

Cores = frozenset[int]  # core numbers


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that a process may still take: of its host's memory (swap included), and by its limit (ulimit -v)."""

    host: int = UNLIMITED
    process: int = UNLIMITED


@dataclass(frozen=True, slots=True)
class Host:
    """A rank's host. The first fields are known when the ranks meet; models and devices are looked at afterwards.

    cores            those that the rank may use
    n_cores          how many cores' time it may take, which can be less in a container; 0 if unknown
    memory           that this rank may still take
    clock            ranks with the same name read the same clock; empty: unknown
    processor        the processor's name; empty: unknown
    gpus_given       ranks of a host with the same text see the same GPUs; else the launcher gave each its own

    lacks            paths of models that the host lacks: the rank's layers of them have to be sent
    offloads         whether this rank's libllama can put layers on GPUs
    gpu_names        of the GPUs that it sees, where some rank's layers go to GPUs
    gpus             the devices of this rank's layers, and the bytes free on each; empty: none, or unknown
    device_messages  whether MPI sends from, and receives into, the memory of the device that computes these layers
    repacked         types of weights that libggml repacks, the rows of each that may be computed at once with exact
                     numerics, and a digest of results; see pipeinfer.models.llama.repacking
    grouped          types of which a row has the same bits in all whole groups of so many rows, and a digest of results
    exact_rows       where libllama has layers of the target on GPUs, of each device of this rank, and of the CPU if
                     it has some: rows at once with the bits of single ones, and a digest of these; see
                     pipeinfer.models.llama.device_proof
    speed            this rank's at the target's layers; None: not timed
    untimed          why timing that failed"""

    name: str
    cores: Cores
    n_cores: int
    memory: FreeMemory = field(default_factory=FreeMemory)
    clock: str = ""
    processor: str = ""
    gpus_given: str = ""

    lacks: frozenset[str] = frozenset()
    offloads: bool = False
    gpu_names: tuple[str, ...] = ()
    gpus: tuple[tuple[str, int], ...] = ()
    device_messages: bool = False
    repacked: tuple[tuple[int, int, str], ...] = ()
    grouped: tuple[tuple[int, int, str], ...] = ()
    exact_rows: tuple[tuple[int, str], ...] = ()
    speed: LayerSpeed | None = None
    untimed: str = ""


def this_host(name: str) -> Host:
    cores = frozenset(os.sched_getaffinity(0))
    n_cores = max(1, int(min(len(cores), _quota())))
    return Host(name, cores, n_cores, free_memory(), clock_name(), processor_name(), gpus_given(os.environ))


def gpus_given(environ: Mapping[str, str]) -> str:
    """The launcher's variables about this rank's GPUs. Slurm may number each rank's GPUs from 0."""
    of_slurm = ("SLURM_LOCALID",) if "SLURM_GPUS_PER_TASK" in environ else ()
    return " ".join(f"{name}={environ[name]}" for name in (*GPU_VARIABLES, *of_slurm) if name in environ)


def clock_name() -> str:
    """Identifies this process's monotonic clock: the boot and the time namespace; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return ""


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The first processor's name, as reading all of them would take long on large hosts; empty if unknown."""
    with contextlib.suppress(OSError), open(cpuinfo, "rb") as file:
        first = file.read(4096).decode(errors="replace").partition("\n\n")[0]
        fields = (line.partition(":") for line in first.splitlines())
        return " ".join(value.strip() for name, _, value in fields if name.strip() in PROCESSOR)
    return ""


def free_memory(proc: Path = PROC, root: Path = CGROUPS) -> FreeMemory:
    """This process's free memory; unlimited if the system does not say."""
    sizes = proc_numbers(proc / "meminfo")
    host = 1024 * (sizes["MemAvailable"] + sizes.get("SwapFree", 0)) if "MemAvailable" in sizes else UNLIMITED
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = 1024 * proc_numbers(proc / "self" / "status").get("VmSize", 0)
    process = UNLIMITED if limit == resource.RLIM_INFINITY else max(0, limit - used)
    return FreeMemory(min([host, *(_memory_left(*group) for group in _control_groups(proc, root))]), process)


def other_clocks(hosts: Sequence[Host]) -> list[int]:
    """Ranks whose clock may differ from rank 0's."""
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


def threads_of_ranks(threads: tuple[int, ...], computing: Set[int], hosts: Sequence[Host]) -> tuple[int, ...]:
    """Threads of each rank: those of the option, else, also for 0, a share of its host's cores. Raises UserError for a
    wrong number of values."""
    if len(threads) not in (0, 1, len(hosts)):
        wrong = f"has {len(threads)} values, and the number of ranks is {len(hosts)}"
        raise UserError(f"--threads {','.join(map(str, threads))} {wrong}; give one, or one for each rank")
    by_rank = (threads or (0,)) * len(hosts)
    return tuple(n_threads or share for n_threads, share in zip(by_rank, share_cores(hosts, computing), strict=False))


def threads_there(hosts: Sequence[Host], threads: Sequence[int], rank: int) -> list[int]:
    """Threads of all ranks of a rank's host."""
    return [threads[other] for other in ranks_there(hosts, rank)]


def turns_on_cores(hosts: Sequence[Host], threads: Sequence[int], ranks: Collection[int]) -> dict[int, int]:
    """Each of these ranks -> its turn to compute: all of a host at once, or in turns where it lacks cores for the
    threads of all its ranks."""
    everyone, turns = frozenset(range(len(hosts))), {}
    for rank in sorted(ranks):
        before = sum(other < rank and other in ranks for other in ranks_there(hosts, rank))
        turns[rank] = before if spare_cores(hosts, everyone, threads, rank) < 0 else 0
    return turns


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
    loads = [_threads_on(hosts, computing, threads, host) / host.n_cores for host in hosts if host.n_cores]
    return max([1.0, *loads])


def _threads_on(hosts: Sequence[Host], computing: Set[int], threads: Sequence[int], host: Host) -> int:
    """Threads that compute on some of a rank's cores."""
    return sum(threads[rank] for rank in _rivals(hosts, computing, host))


def _rivals(hosts: Sequence[Host], computing: Set[int], host: Host) -> list[int]:
    """The ranks that compute on some of a rank's cores. A launcher may bind each rank to its own cores."""
    return [rank for rank in sorted(computing) if hosts[rank].name == host.name and hosts[rank].cores & host.cores]


# -- the system's values


def proc_numbers(path: Path) -> dict[str, int]:
    """Parses lines such as `MemAvailable:  123 kB` or `inactive_file 123`; empty if there is no file."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _control_groups(proc: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """(controllers, folder) of each control group of this process and each above it; version 2 names no controllers."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / controllers
            inner = top / path.lstrip("/")
            # in a container the top may be its own group
            yield from ((controllers, each) for each in (inner, *inner.parents) if each.is_relative_to(top))


def _memory_left(controllers: str, folder: Path) -> int:
    """Bytes left in a control group, whose page cache counts as free; UNLIMITED if it sets no limit."""
    kind = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    with contextlib.suppress(KeyError, OSError, ValueError):  # no limit here: the file is missing, or has "max"
        limit, used = (int((folder / name).read_text()) for name in kind[controllers])
        cached = proc_numbers(folder / "memory.stat")
        if limit < V1_UNLIMITED:
            return max(0, limit - used + cached.get("active_file", 0) + cached.get("inactive_file", 0))
    return UNLIMITED


def _quota(proc: Path = PROC, root: Path = CGROUPS) -> float:
    """Cores' time that this process's control groups (version 2) allow it; infinite if they set no limit."""
    least = math.inf
    for controllers, group in _control_groups(proc, root):
        if not controllers:
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most, period = (group / "cpu.max").read_text().split()
                least = min(least, int(most) / int(period))
    return least
