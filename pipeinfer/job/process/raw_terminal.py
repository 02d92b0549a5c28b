"""A terminal whose keys come as they are typed, Ctrl-C too, to a process that may have no terminal. Knows no lines."""

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path

from pipeinfer.child import python_command
from pipeinfer.job.process.terminal_guard import SUSPEND

LAUNCHERS = ("mpiexec", "mpirun", "prte", "orte", "hydra", "srun")
TERMINALS = ("/dev/pts/", "/dev/tty")
STARTS_S, ENDS_S = 5.0, 2.0
GUARD = "from pipeinfer.job.process.terminal_guard import guard; guard(int(sys.argv[1]), int(sys.argv[2]))"


class RawTerminal:
    """From creation on until `close`, or until this process ends in any way."""

    def __init__(self, terminal: int, reader: int) -> None:
        """`reader`: the process that reads the terminal and hands on what comes. Raises OSError."""
        self._guard = subprocess.Popen(
            python_command(GUARD, terminal, reader), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, pass_fds=[terminal], start_new_session=True, cwd="/",
        )  # fmt: skip
        keys = b""
        if self._guard.stdout and select.select([self._guard.stdout], [], [], STARTS_S)[0]:
            keys = os.read(self._guard.stdout.fileno(), 2)
        self._interrupt, self._suspend = (keys[:1], keys[1:]) if len(keys) == 2 else (b"", b"")

    def act(self, keys: bytes) -> bytes:
        """Do what Ctrl-C and Ctrl-Z mean; the other keys."""
        for key, does in ((self._interrupt, self._to_this_process), (self._suspend, self._to_the_reader)):
            if key.strip(b"\0") and key in keys:
                does()
                keys = keys.replace(key, b"")
        return keys

    def close(self) -> None:
        """Returns when the terminal is as before."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._guard.stdin:
                self._guard.stdin.close()
            self._guard.wait(ENDS_S)

    def _to_this_process(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def _to_the_reader(self) -> None:
        with contextlib.suppress(OSError):
            if self._guard.stdin:
                os.write(self._guard.stdin.fileno(), SUSPEND)


def launcher_at_terminal() -> int:
    """The launcher that started this process and hands on what a user types; 0 where there is none on this host."""
    pid, found = os.getppid(), 0
    with contextlib.suppress(OSError, ValueError):
        while Path(f"/proc/{pid}/comm").read_text().startswith(LAUNCHERS):
            found = pid if is_terminal(pid, 0) else 0
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def is_terminal(pid: int, number: int) -> bool:
    """Whether a descriptor of a process is one. Raises OSError."""
    return os.readlink(f"/proc/{pid}/fd/{number}").startswith(TERMINALS)
