"""The memory that ranks will need and that hosts have free, and an error with both when it is too little.

Knows bytes, no model and no MPI.
"""

import contextlib
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text

RUNTIME_BYTES = 75_000_000
"""Memory of Python, MPI and libllama on a rank without a model (measured: 68 to 82 MB)."""

UNLIMITED = sys.maxsize
V1_UNLIMITED = 1 << 60  # such a "limit" of a version 1 group is none


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's memory, in bytes.

    weights   in memory
    mapped    weights mapped from a file, which the system may drop and read again
    kv        keys and values of all contexts
    buffers   for evaluation and messages, and the vocabularies
    loading   weights that are in memory twice during loading, before contexts are made
    """

    weights: int = 0
    mapped: int = 0
    kv: int = 0
    buffers: int = 0
    loading: int = 0
    runtime: int = RUNTIME_BYTES

    def __add__(self, other: "Memory") -> "Memory":
        """Both in one process."""
        return Memory(
            self.weights + other.weights, self.mapped + other.mapped, self.kv + other.kv, self.buffers + other.buffers,
            max(self.loading, other.loading), max(self.runtime, other.runtime),
        )  # fmt: skip

    @property
    def total(self) -> int:
        """What the process holds once it has touched all pages."""
        return self.weights + self.mapped + self.kv + self.buffers + self.runtime

    @property
    def needed(self) -> int:
        """What must be in memory at one time, without mapped weights."""
        return self.weights + max(self.kv + self.buffers, self.loading) + self.runtime


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that a process may still take: of its host's memory (swap included), and by its own limit."""

    host: int = UNLIMITED
    own: int = UNLIMITED


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> FreeMemory:
    """This process's free memory; unlimited if the system does not say."""
    known = _fields(proc / "meminfo")
    host = 1024 * (known["MemAvailable"] + known.get("SwapFree", 0)) if "MemAvailable" in known else UNLIMITED
    return FreeMemory(min([host, *_group_memories(proc, groups)]), _own_limit(proc))


def check_fits(names: Sequence[str], free: Sequence[FreeMemory], memories: Sequence[Memory], way_out: str) -> None:
    """Raises UserError when a host lacks memory for its ranks, or a rank's own limit does. One entry a rank."""
    for rank, (name, limit, memory) in enumerate(zip(names, free, memories, strict=True)):
        if memory.needed > limit.own:
            raise UserError(
                f"rank {rank} on {name} needs {_shares(memory)}; its limit (ulimit -v) leaves {size_text(limit.own)}; "
                f"raise it, or {way_out}"
            )
    for name in dict.fromkeys(names):
        here = [rank for rank, other in enumerate(names) if other == name]
        needed = sum(memories[rank].needed for rank in here)
        left = min(free[rank].host for rank in here)
        if needed > left:
            each = "; ".join(f"rank {rank}: {_shares(memories[rank])}" for rank in here)
            raise UserError(
                f"{name} has {size_text(left)} of memory left, and what shall run there needs {size_text(needed)} "
                f"({each}); {way_out}"
            )


def spare_memory(names: Sequence[str], free: Sequence[FreeMemory], memories: Sequence[Memory]) -> list[int | None]:
    """Bytes left to each rank once all ranks of its host hold what they need, by the host's memory or the rank's limit,
    whichever is less; negative if too few; None if no limit is known. One entry a rank."""
    needed: dict[str, int] = {}
    left: dict[str, int] = {}
    for name, limits, memory in zip(names, free, memories, strict=True):
        needed[name] = needed.get(name, 0) + memory.needed
        left[name] = min(left.get(name, UNLIMITED), limits.host)
    found: list[int | None] = []
    for name, limits, memory in zip(names, free, memories, strict=True):
        spare = [limit - taken for limit, taken in ((left[name], needed[name]), (limits.own, memory.needed))
                 if limit < UNLIMITED]  # fmt: skip
        found.append(min(spare, default=None))
    return found


def paging_lines(names: Sequence[str], free: Sequence[FreeMemory], memories: Sequence[Memory]) -> list[str]:
    """A warning for each host that has memory for what ranks need, but not for their mapped weights too."""
    lines = []
    for name, spare in dict(zip(names, spare_memory(names, free, memories), strict=True)).items():
        mapped = sum(memory.mapped for other, memory in zip(names, memories, strict=True) if other == name)
        if spare is not None and 0 <= spare < mapped:
            lines.append(
                f"{name} has {size_text(spare)} of memory for {size_text(mapped)} of weights that are mapped from the "
                "model's file: they will be read again and again, which is slow; take more hosts, or a smaller "
                "quantisation"
            )
    return lines


def _shares(memory: Memory) -> str:
    parts = {
        "weights": memory.weights, "KV": memory.kv, "buffers": memory.buffers, "runtime": memory.runtime,
        "weights while loading": memory.loading if memory.loading > memory.kv + memory.buffers else 0,
    }  # fmt: skip
    return f"{size_text(memory.needed)}, " + ", ".join(
        f"{name} {size_text(size)}" for name, size in parts.items() if size
    )


# -- the system's values


def _fields(path: Path) -> dict[str, int]:
    """Parses lines such as `MemAvailable:  123 kB` or `inactive_file 123`; empty if there is no file."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _own_limit(proc: Path) -> int:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED
    return max(0, limit - 1024 * _fields(proc / "self" / "status").get("VmSize", 0))


def _group_memories(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in each control group of this process and each above it; the page cache counts as free."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            names = ("memory.max", "memory.current") if not controllers else (
                "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
            top = groups / controllers
            folder = top / path.lstrip("/")
            # in a container the top may be its own group
            for each in [folder, *folder.parents]:
                yield from _group_memory(each, *names)
                if each == top:
                    break


def _group_memory(folder: Path, limit_name: str, use_name: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no limit here: the file is missing, or says "max"
        limit = int((folder / limit_name).read_text())
        if limit < V1_UNLIMITED:
            used, kinds = int((folder / use_name).read_text()), _fields(folder / "memory.stat")
            cached = kinds.get("active_file", 0) + kinds.get("inactive_file", 0)
            yield max(0, limit - used + cached)
