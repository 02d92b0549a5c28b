"""The memory that ranks need, of their hosts and on GPUs, and an error with the numbers when that is more than is free;
what this process uses of memory and files, and the energy that its host uses, by RAPL. Knows bytes, no model and no
device."""

import contextlib
import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeinfer.cluster.hosts.host import PROC, UNLIMITED, Host, proc_numbers
from pipeinfer.errors import UserError
from pipeinfer.text import size_text

RUNTIME_BYTES = 71_000_000  # of Python, MPI and libllama on a rank without a model (measured: 65 to 78 MB)
MPI_BYTES = 4_000_000  # of MPI's buffers for other ranks (measured)


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory, in bytes.

    weights   in memory
    mapped    weights mapped from a file, which the system may drop and read again
    kv        keys and values of all contexts
    buffers   for evaluation and messages, and the vocabularies
    loading   weights that are in memory twice during loading, before contexts are made"""

    weights: int = 0
    mapped: int = 0
    kv: int = 0
    buffers: int = 0
    loading: int = 0
    runtime: int = RUNTIME_BYTES

    def __add__(self, other: "Memory") -> "Memory":
        """Both in one process."""
        return Memory(
            self.weights + other.weights,
            self.mapped + other.mapped,
            self.kv + other.kv,
            self.buffers + other.buffers,
            max(self.loading, other.loading),
            max(self.runtime, other.runtime),
        )

    @property
    def total(self) -> int:
        """What the process holds once it has touched all pages."""
        return self.weights + self.mapped + self.kv + self.buffers + self.runtime

    @property
    def needed(self) -> int:
        """What must be in memory at one time, without mapped weights."""
        return self.weights + max(self.kv + self.buffers, self.loading) + self.runtime

    def __str__(self) -> str:
        """`3.1 GB, weights 2.0 GB, KV 1.0 GB`: what is needed."""
        parts = {"weights": self.weights, "KV": self.kv, "buffers": self.buffers, "runtime": self.runtime}
        parts["weights while loading"] = self.loading if self.loading > self.kv + self.buffers else 0
        sizes = [f"{name} {size_text(size)}" for name, size in parts.items() if size]
        return ", ".join([size_text(self.needed), *sizes])


class Pool(NamedTuple):
    """Memory that some ranks share. `free`: bytes."""

    ranks: Sequence[int]
    free: int

    def bytes_left(self, needed: Sequence[int]) -> int:
        """Bytes left once all its ranks have what they need, one entry a rank; negative if too few."""
        return self.free - sum(needed[rank] for rank in self.ranks)


def _host_pools(hosts: Sequence[Host]) -> Iterator[Pool]:
    names = [host.name for host in hosts]
    for name in dict.fromkeys(names):
        ranks = [rank for rank, other in enumerate(names) if other == name]
        yield Pool(ranks, min(hosts[rank].memory.host for rank in ranks))


def _gpu_pools(hosts: Sequence[Host]) -> Iterator[Pool]:
    """The devices of ranks whose free memory is known."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for rank, host in enumerate(hosts):
        names = tuple(name for name, _ in host.gpus)
        groups.setdefault((host.name, host.gpus_given, names), []).append(rank)
    for ranks in groups.values():
        if free := min(sum(n_bytes for _, n_bytes in hosts[rank].gpus) for rank in ranks):
            yield Pool(ranks, free)


def _spare(pools: Iterable[Pool], needed: Sequence[int]) -> list[int | None]:
    """Bytes left to each rank in the scarcest of its pools; None of a rank without one."""
    spare: list[int | None] = [None] * len(needed)
    for pool in pools:
        n_bytes = pool.bytes_left(needed)
        for rank in pool.ranks:
            before = spare[rank]
            spare[rank] = n_bytes if before is None else min(n_bytes, before)
    return spare


def spare_memory(hosts: Sequence[Host], memories: Sequence[Memory]) -> list[int | None]:
    """Bytes left to each rank once all ranks of its host hold what they need, by the host's memory or the rank's limit,
    whichever is less; negative if too few; None if no limit is known. One entry a rank."""
    limits = (Pool([rank], host.memory.process) for rank, host in enumerate(hosts))
    limited = (pool for pool in (*_host_pools(hosts), *limits) if pool.free < UNLIMITED)
    return _spare(limited, [memory.needed for memory in memories])


def spare_on_gpus(hosts: Sequence[Host], needed: Sequence[int]) -> list[int | None]:
    """Bytes left on each rank's devices once all ranks that share them have theirs; negative if too few; None if it
    needs none, or the free memory is unknown. One entry a rank."""
    return [spare if n else None for spare, n in zip(_spare(_gpu_pools(hosts), needed), needed, strict=True)]


def left_on_gpus(
    hosts: Sequence[Host], ranks: Sequence[int], taken: Sequence[int]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """A name for the devices of each of `ranks`, the same for all that share them, and the bytes that other ranks leave
    there. The name is empty if the free memory is unknown. `hosts`, `taken`: one entry a rank."""
    names, by_name = dict.fromkeys(ranks, ""), {}
    for pool in _gpu_pools(hosts):
        name = f"GPUs of rank {pool.ranks[0]}"
        names |= {rank: name for rank in pool.ranks if rank in names}
        by_name[name] = pool.bytes_left([0 if rank in names else n for rank, n in enumerate(taken)])
    return tuple(names.values()), by_name


def check_fits(hosts: Sequence[Host], memories: Sequence[Memory], way_out: str) -> None:
    """Raises UserError when a host or a process has too little memory for what ranks need. One entry a rank."""
    for rank, (host, memory) in enumerate(zip(hosts, memories, strict=True)):
        if memory.needed > host.memory.process:
            limit = f"its limit (ulimit -v) leaves {size_text(host.memory.process)}; raise it"
            raise UserError(f"rank {rank} on {host.name} needs {memory}; {limit}, or {way_out}")
    for ranks, free in _host_pools(hosts):
        needed = sum(memories[rank].needed for rank in ranks)
        if needed > free:
            each = "; ".join(f"rank {rank}: {memories[rank]}" for rank in ranks)
            lacks = f"has {size_text(free)} of memory left, and what shall run there needs {size_text(needed)}"
            raise UserError(f"{hosts[ranks[0]].name} {lacks} ({each}); {way_out}")


def check_gpus(hosts: Sequence[Host], needed: Sequence[int], way_out: str) -> None:
    """Raises UserError when ranks' layers do not fit into their GPUs' memory. One entry a rank."""
    short = [pool for pool in _gpu_pools(hosts) if pool.bytes_left(needed) < 0]
    for rank, pool in sorted((min(filter(needed.__getitem__, pool.ranks)), pool) for pool in short):
        names = ", ".join(name for name, _ in hosts[rank].gpus)
        others = pool.free - pool.bytes_left(needed) - needed[rank]
        beside = f" and ranks beside it {size_text(others)}" if others else ""
        raise UserError(
            f"rank {rank} on {hosts[rank].name} puts {size_text(needed[rank])} on {names}{beside}, where "
            f"{size_text(pool.free)} are free; give it fewer layers there (-ngl, a value a rank), or {way_out}"
        )


def paging_lines(hosts: Sequence[Host], memories: Sequence[Memory]) -> list[str]:
    """A warning for each host that has memory for what ranks need, but not for their mapped weights too."""
    lines, spare = [], spare_memory(hosts, memories)
    for ranks, _ in _host_pools(hosts):
        mapped, room = sum(memories[rank].mapped for rank in ranks), spare[ranks[-1]]
        if room is not None and 0 <= room < mapped:
            lines.append(
                f"{hosts[ranks[0]].name} has {size_text(room)} of memory for {size_text(mapped)} of weights that are "
                "mapped from the model's file: they will be read again and again, which is slow; take more hosts, or a "
                "smaller quantisation"
            )
    return lines


ZONES = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the counters of packages, and those of memory where they have one, in the folder `zones`."""

    def __init__(self, zones: Path = ZONES) -> None:
        self._ranges = {
            zone: _read(zone / "max_energy_range_uj")
            for zone in sorted(zones.glob("intel-rapl:*"))
            if zone.name.count(":") == 1 or _is_memory(zone)
        }
        self._before = self._counts()

    def take_joules(self) -> float:
        """Since the last call; NaN where there is no counter, or one cannot be read."""
        before, self._before = self._before, self._counts()
        if not before:
            return math.nan
        counts = zip(self._before, before, self._ranges.values(), strict=True)
        return 1e-6 * sum(now - then + (most if now < then else 0) for now, then, most in counts)

    def _counts(self) -> list[float]:
        return [_read(zone / "energy_uj") for zone in self._ranges]


def _is_memory(zone: Path) -> bool:
    try:
        return (zone / "name").read_text().strip() == "dram"
    except OSError:
        return False


def _read(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return math.nan


def resident_bytes() -> int:
    """Memory of this process, with pages of mapped model files once they were read (as pmap does); 0 if unknown."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most memory of this process since its start or the last `forget_peak`."""
    # macOS counts in bytes, Linux in kilobytes; the peak in Linux' /proc can be reset
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> None:
    """Reset the peak, where the system can: earlier models do not count to the next one's memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def count_open_files() -> int:
    """File descriptors that this process has open; 0 where there is no /proc."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def _status_bytes(name: str) -> int:
    return 1024 * proc_numbers(PROC / "self" / "status").get(name, 0)
