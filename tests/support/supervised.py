"""Start a supervised job, strike its processes, and see what is left of it."""

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeinfer.cluster.hosts.launch import rank_from_environment, size_from_environment
from tests.support.jobs import COMMAND, command_of, environment, launcher, until

MARK = "SUPERVISED_MARK"


class Supervised:
    """Runs from creation on. `words`: of the job's command."""

    def __init__(self, n_ranks: int, words: Sequence[str], options: Sequence[str] = (), **others: Any) -> None:
        self.mark, self._struck = uuid.uuid4().hex, set[int]()  # ranks of jobs that were struck
        command = [*COMMAND, "supervise", *options, *launcher(n_ranks), str(COMMAND_FILE), *words]
        self.process = subprocess.Popen(
            command,
            stdin=others.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment() | {MARK: self.mark},
            start_new_session=True,
            **others,
        )

    def processes(self) -> dict[int, dict[str, str]]:
        """All that belong to it, with their environments."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pairs = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if environ.get(MARK) == self.mark:
                    found[int(folder.name)] = environ
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> process id."""
        return {
            rank_from_environment(environ): pid
            for pid, environ in self.processes().items()
            if size_from_environment(environ) > 1 and b"\0-m\0pipeinfer\0" in command_of(pid)
        }

    def http(self) -> int:
        """The process that speaks with clients; 0 while there is none."""
        return next((pid for pid in self.processes() if b"server.process" in command_of(pid)), 0)

    def strike(self, rank: int, number: int = signal.SIGKILL, timeout_s: float = 60) -> None:
        """Once the rank is there, of a job that was not struck before: two ranks that die at a time are one loss."""
        until(lambda: self.ranks().get(rank, 0) not in {0} | self._struck or self.process.poll() is not None, timeout_s)
        ranks = self.ranks()
        self._struck |= {*ranks.values()}
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(ranks[rank], number)

    def finish(self, timeout_s: float = 120) -> tuple[int, str, str]:
        """(exit code, output, errors); nothing is left behind."""
        try:
            out, errors = self.process.communicate(timeout=timeout_s)
            until(lambda: not self.processes(), 10)
        finally:
            self.end()
        return self.process.returncode, out.decode(), errors.decode("utf-8", "replace")

    def read(self, n: int) -> str:
        """So many bytes of ASCII."""
        found = b""
        while len(found) < n and (data := os.read(self.process.stdout.fileno(), n - len(found))):  # type: ignore[union-attr]
            found += data
        return found.decode()

    def wait_for(self, words: bytes) -> bytes:
        """Standard error up to there; nothing of it is left for `finish`."""
        found = b""
        while words not in found and (data := os.read(self.process.stderr.fileno(), 1 << 16)):  # type: ignore[union-attr]
            found += data
        assert words in found, found
        return found

    def end(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


COMMAND_FILE = Path(COMMAND[0]).with_name("pipeinfer")


def held(folder: Path) -> list[str]:
    """Words with which a job does not end before `let_go`: rank 0 waits for a reader of its trace."""
    os.mkfifo(folder / "trace")
    return ["--trace", str(folder / "trace")]


def let_go(folder: Path) -> None:
    threading.Thread(target=(folder / "trace").read_bytes, daemon=True).start()
