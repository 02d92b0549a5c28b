"""How a process of this host ended, and which ranks run here. Knows /proc and pidfds; standard library alone."""

import contextlib
import fcntl
import os
import resource
import select
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pipeinfer.cluster.hosts.launch import rank_from_environment, size_from_environment

INFO_LAYOUT = "QQ11IiQ"  # struct pidfd_info up to its exit code; the kernel takes any longer buffer
INFO_BYTES = struct.calcsize(INFO_LAYOUT)
GET_INFO = 3 << 30 | INFO_BYTES << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO, Linux 6.13
INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT, Linux 6.15
LOOK_S = 0.15
HIGHEST_FILE = 1024  # what select(2) can take, and the usual limit
N_SPARE_FILES = 8
KILLED = " of SIGKILL"
ORDERLY = (" of SIGINT", " of SIGTERM", " of SIGHUP")
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prun", "orterun")
KILLS_S = 0.1
"""Time between a rank's closed files, which the launcher sees, and its reported end: its memory is freed in between."""


class Process:
    """A process of this host that is not a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        with contextlib.suppress(OSError, AttributeError):  # macOS has no pidfds
            self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """The pidfd, which becomes readable when the process ends; -1 if there is none."""
        return self._fd

    def wait(self) -> bool:
        """Wait until it has ended. False at once if that is not possible."""
        return self._fd >= 0 and bool(select.select([self._fd], [], []))

    def how_it_ended(self, wait_s: float = LOOK_S) -> str:
        """` of SIGKILL`, ` with exit code 3`; empty if unknown or still running after `wait_s` seconds."""
        if self._fd < 0 or not select.select([self._fd], [], [], wait_s)[0]:
            return ""
        deadline = time.monotonic() + LOOK_S
        while (status := self._status()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return "" if status is None else _describe(status)

    def _status(self) -> int | None:
        """Its wait status: from /proc until its parent has reaped it, then from the pidfd."""
        fields = _stat(self.pid)
        if fields and fields[0] in "ZX" and self.pid:
            return int(fields[49])
        with contextlib.suppress(OSError):
            info = bytearray(struct.pack(INFO_LAYOUT, INFO_EXIT, *[0] * 14))
            fcntl.ioctl(self._fd, GET_INFO, info)
            mask, *_, exit_code, _ = struct.unpack(INFO_LAYOUT, info)
            if mask & INFO_EXIT:
                return int(exit_code)
        return None


def first_to_close(link: Connection) -> Connection:
    """The same connection under a number above those of all other files, which Linux closes first when a process dies.

    If the launcher's files were closed first, it could kill other ranks, whose deaths could be heard before this one.
    """
    highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], HIGHEST_FILE)
    with contextlib.suppress(OSError, ValueError):
        moved = fcntl.fcntl(link.fileno(), fcntl.F_DUPFD_CLOEXEC, highest - N_SPARE_FILES)
        link.close()
        return Connection(moved)
    return link


def is_death(how: str) -> bool:
    """Whether a signal ended the process that is no request to stop."""
    return how.startswith(" of ") and how not in ORDERLY


def first_to_die(processes: dict[int, Process], rank: int, how: str) -> tuple[int, str]:
    """The rank that died first, and how. A launcher kills the others; one of those may be reported before it."""
    if how == KILLED:
        time.sleep(KILLS_S)
        for other, process in processes.items():
            other_how = process.how_it_ended(wait_s=0.0)
            if is_death(other_how) and other_how != KILLED:
                return other, other_how
    return rank, how


def ranks_beside(pid: int) -> dict[int, int]:
    """Rank -> process id of the job's ranks on this host: processes with the same parent as `pid`, one of them."""
    parent, pids = _parent(pid), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        if _parent(int(folder.name)) != parent:
            continue
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
            environ = dict(entry.partition("=")[::2] for entry in entries)
            if size_from_environment(environ) > 1:
                pids[rank_from_environment(environ)] = int(folder.name)
    return pids


def launcher_of(pid: int) -> tuple[list[str], Path]:
    """The words of the mpirun above a process, and the folder where it runs; no words where it is on another host."""
    while (pid := _parent(pid)) > 1:
        with contextlib.suppress(OSError):
            words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
            if os.path.basename(words[0]) in LAUNCHERS:
                return words, Path(os.readlink(f"/proc/{pid}/cwd"))
    return [], Path()


def _parent(pid: int) -> int:
    """0 of a process that has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields and fields[0] not in "ZX" else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _describe(status: int) -> str:
    if os.WIFEXITED(status):
        return f" with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f" of {signal.Signals(number).name}"
    except ValueError:
        return f" of signal {number}"
