"""Processes of this host: how they ended, which ranks run here, and the one that looks at other hosts. Knows /proc and
pidfds; standard library alone."""

import contextlib
import fcntl
import os
import resource
import select
import selectors
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pipeinfer.cluster.hosts.launch import place_from_environment
from pipeinfer.cluster.watch.protocol import write_line
from pipeinfer.launchers import LAUNCHERS, STARTERS, parent_of, process_stat, processes_above

INFO_LAYOUT = "QQ11IiQ"  # struct pidfd_info up to its exit code; the kernel takes any longer buffer
INFO_BYTES = struct.calcsize(INFO_LAYOUT)
GET_INFO = 3 << 30 | INFO_BYTES << 16 | 0xFF << 8 | 11  # PIDFD_GET_INFO, Linux 6.13
INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT, Linux 6.15
STATUS_S = 0.15
HIGHEST_FILE = 1024  # what select(2) can take, and the usual limit
N_SPARE_FILES = 8
MAX_HOSTS = 8  # hosts that an inquiry looks at
SCANCEL_TIMEOUT_S = 5.0
FATAL = "! "
KILLED = " of SIGKILL"
ORDERLY = (" of SIGINT", " of SIGTERM", " of SIGHUP")
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

    def how_it_ended(self, wait_s: float = STATUS_S) -> str:
        """` of SIGKILL`, ` with exit code 3`; empty if unknown or still running after `wait_s` seconds."""
        if self._fd < 0 or not select.select([self._fd], [], [], wait_s)[0]:
            return ""
        deadline = time.monotonic() + STATUS_S
        while (status := self._status()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return "" if status is None else _describe(status)

    def _status(self) -> int | None:
        """Its wait status: from /proc until its parent has reaped it, then from the pidfd."""
        fields = process_stat(self.pid)
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
    If the launcher's files were closed first, it could kill other ranks, whose deaths could be heard first."""
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
    """Rank -> process id of the job's ranks on this host, `pid` one of them. A rank may be a script that runs the
    program and waits for it; its process is that of the script."""
    parent, pids = _launcher_above(pid), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        if parent_of(int(folder.name)) == parent and (place := _place(int(folder.name))):
            pids[place[0]] = int(folder.name)
    return pids


def n_started(pid: int, n_here: int) -> int:
    """How many of `n_here` ranks the launcher has started on this host, `pid` one of them; all if nobody can say: a
    container may hide the others."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{_launcher_above(pid)}/comm").read_text(errors="replace").startswith(STARTERS):
            return len(ranks_beside(pid))
    return n_here


def _launcher_above(pid: int) -> int:
    """The process that started the rank `pid`: the first above it which is not that rank itself."""
    rank = _place(pid)
    while (pid := parent_of(pid)) > 1 and rank and _place(pid) == rank:
        pass
    return pid


def _place(pid: int) -> tuple[int, int, str] | None:
    """(rank, number of ranks, the launcher's variable) of a process, or None."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        place = place_from_environment(dict(entry.partition("=")[::2] for entry in entries))
        return place if place[1] > 1 else None
    return None


def launcher_of(pid: int) -> tuple[list[str], Path]:
    """The words of the mpirun above a process, and the folder where it runs; no words where it is on another host."""
    for above, name in processes_above(pid):
        if name.startswith(LAUNCHERS):
            with contextlib.suppress(OSError):
                words = os.fsdecode(Path(f"/proc/{above}/cmdline").read_bytes()).split("\0")
                return words, Path(os.readlink(f"/proc/{above}/cwd"))
    return [], Path()


def _describe(status: int) -> str:
    if os.WIFEXITED(status):
        return f" with exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f" of {signal.Signals(number).name}"
    except ValueError:
        return f" of signal {number}"


def slurm_steps(pid: int) -> list[str]:
    """The steps of a job whose rank `pid` srun has started, by their names for Slurm; none where another launcher has,
    maybe within a step of something else."""
    step = os.environ.get("SLURM_STEP_ID")
    jobs = {value for name, value in os.environ.items() if name.startswith("SLURM_JOB_ID")}  # each group is a job
    is_launched = any(name.startswith(LAUNCHERS) for _, name in processes_above(pid))
    return [f"{job}.{step}" for job in jobs] if step and not is_launched else []


def end_slurm_steps(steps: Sequence[str]) -> None:
    """Kill all tasks of these steps, and perhaps this process: srun leaves its tasks running when one of them has died.
    Raises nothing."""
    if steps:
        command = ["scancel", "--signal=KILL", *steps]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SCANCEL_TIMEOUT_S)


class Inquiry:
    """Runs `command`, which prints lines about the hosts of missing ranks; empty: there is none. Its arguments are the
    number of ranks, rank 0's host and those hosts. A line `! HOST: …` says why no rank can start on a host."""

    def __init__(self, command: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._command, self._selector = command, selector
        self._process: subprocess.Popen[bytes] | None = None
        self.lines: list[str] = []

    def start(self, size: int, here: str, hosts: Sequence[str]) -> None:
        """The selector has this object as data from now on, for `hear`."""
        if self._command and hosts:
            none, words = subprocess.DEVNULL, [*self._command, str(size), here, *hosts[:MAX_HOSTS]]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(words, bufsize=0, stdin=none, stdout=subprocess.PIPE, stderr=none)
                assert self._process.stdout
                self._selector.register(self._process.stdout, selectors.EVENT_READ, self)

    def hear(self) -> tuple[str, str]:
        """Pass a line on. Returns the host where no rank can start, and why; both are empty for other lines."""
        assert self._process and self._process.stdout
        line = self._process.stdout.readline().decode("utf-8", "replace").strip()
        if line.startswith(FATAL):
            host, _, why = line.removeprefix(FATAL).partition(": ")
            return host, why
        if line:
            write_line(line)
            self.lines.append(line)
        else:
            self.end()
        return "", ""

    def end(self) -> None:
        if self._process and self._process.stdout:
            self._selector.unregister(self._process.stdout)
            self._process.kill()
            self._process = None
