"""Jobs whose ranks share a limited memory: a control group below this process's own, in either version of them.

`python -m tests.support.memory_group run …` is the `pipeinfer` command that takes all memory for free, whatever
the group has.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs import COMMAND, environment, launcher

GROUPS = Path("/sys/fs/cgroup")
UNCHECKED = [sys.executable, "-m", "tests.support.memory_group"]


@dataclass(frozen=True)
class MemoryGroup:
    """A folder of the kernel's; `v2`: of the unified hierarchy."""

    folder: Path
    v2: bool

    def limit(self, n_bytes: int) -> None:
        """Without swap beside it, where the kernel counts that."""
        if self.v2:
            written = [("memory.swap.max", 0), ("memory.max", n_bytes)]
        else:  # the second is never below the first
            both, alone = "memory.memsw.limit_in_bytes", "memory.limit_in_bytes"
            written = [(both, n_bytes), (alone, n_bytes), (both, n_bytes)]
        for name, size in written:
            with contextlib.suppress(OSError):
                (self.folder / name).write_text(str(size))
        assert (self.folder / written[1][0]).read_text().strip() == str(n_bytes)

    def n_killed(self) -> int:
        """Processes that the kernel ended because there was no more."""
        events = self.folder / ("memory.events" if self.v2 else "memory.oom_control")
        return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])

    def finish(
        self, n_ranks: int, arguments: Sequence[str], command: Sequence[str] = COMMAND, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a job in it, to the end."""
        enter = f'echo $$ > "{self.folder}/cgroup.procs"; exec "$@"'
        return subprocess.run(
            ["sh", "-c", enter, "sh", *launcher(n_ranks), *command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=timeout_s,
        )


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Raises OSError where this process may not make one."""
    v2 = (GROUPS / "cgroup.controllers").exists()
    wanted = "" if v2 else "memory"
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if controllers == wanted), None)
    if own is None:
        raise OSError("the kernel counts no memory by groups")
    top = GROUPS / wanted
    above = top / own.lstrip("/")
    group = MemoryGroup((above if above.exists() else top) / f"pipeinfer-test-{os.getpid()}", v2)
    group.folder.mkdir()
    try:
        if not (group.folder / ("memory.max" if v2 else "memory.limit_in_bytes")).exists():
            raise OSError("its parent hands on no memory limits")
        yield group
    finally:
        for _ in range(50):  # the last process of a killed job may still be leaving
            with contextlib.suppress(OSError):
                group.folder.rmdir()
                break
            time.sleep(0.1)


def missing() -> str:
    """Why there can be no such group here; empty where there can."""
    try:
        with memory_group():
            return ""
    except OSError as error:
        return f"no group with a memory limit can be made: {error}"


def main() -> None:
    from pipeinfer.cli import main as pipeinfer
    from pipeinfer.cluster.hosts import host
    from pipeinfer.cluster.hosts.host import FreeMemory

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(host, "free_memory", FreeMemory)
    pipeinfer()


if __name__ == "__main__":
    main()
