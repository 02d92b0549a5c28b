"""Other processes of this host, by /proc: how one stands, those above this one, the launcher among them, and its
terminal. Knows no command line of a launcher; standard library alone."""

import contextlib
import os
import stat
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prun", "orterun")
"""How the names of what a user starts begin (`mpiexec.hydra`). Open MPI's pass standard streams on."""

STARTERS = ("hydra", "prte", "orte", "srun", *LAUNCHERS)  # what may stand between those and a rank, too
TERMINALS = ("/dev/pts/", "/dev/tty")


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, by a signal or a debugger."""
    return process_stat(pid)[:1] in (["T"], ["t"])


def parent_of(pid: int) -> int:
    """0 of a process that has ended."""
    fields = process_stat(pid)
    return int(fields[1]) if fields and fields[0] not in "ZX" else 0


def processes_above(pid: int) -> Iterator[tuple[int, str]]:
    """The id and the name of a process's parent, of its parent, and so on, on this host."""
    with contextlib.suppress(OSError):
        while pid := parent_of(pid):
            yield pid, Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()


def launcher_at_terminal(number: int = 0) -> int:
    """The launcher on this host that started this process, and whose file descriptor `number` is a terminal, by default
    that where a user types; 0: there is none."""
    launcher = 0
    with contextlib.suppress(OSError):
        for pid, _ in takewhile(lambda each: each[1].startswith(STARTERS), processes_above(os.getpid())):
            launcher = pid if is_terminal(pid, number) else 0
    return launcher


def forwarding_launcher() -> int:
    """The process on this host to which Open MPI forwards this job's standard streams; 0: there is none."""
    return next((pid for pid, name in processes_above(os.getpid()) if name.startswith(LAUNCHERS)), 0)


def is_terminal(pid: int, number: int) -> bool:
    """Whether a file descriptor of a process is a terminal. Raises OSError."""
    return os.readlink(f"/proc/{pid}/fd/{number}").startswith(TERMINALS)


def terminal_width(number: int) -> int:
    """Columns of the terminal that shows what is written to a file descriptor of this process, 1 or 2: its own, or the
    launcher's, which prints what comes from its pipe; 0: it is none, or unknown."""
    with contextlib.suppress(OSError, ValueError):
        if os.isatty(number):
            return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(number).columns
        if stat.S_ISFIFO(os.fstat(number).st_mode) and (launcher := launcher_at_terminal(number)):
            terminal = os.open(f"/proc/{launcher}/fd/{number}", os.O_RDONLY | os.O_NOCTTY)
            try:
                return os.get_terminal_size(terminal).columns
            finally:
                os.close(terminal)
    return 0
