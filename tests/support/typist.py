"""A command on a terminal of its own, and who types there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.cluster.hosts.launch import rank_from_environment
from tests.support.jobs import command_of, descendants, environment

SIZE = struct.pack("HHHH", 30, 100, 0, 0)


class Typist:
    """Runs from creation on. Used as a context: nothing is left behind."""

    def __init__(self, words: Sequence[str]) -> None:
        self.master, self.terminal = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, SIZE)
        self.before = self.attributes

        def own() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            words,
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=environment() | {"TERM": "vt100"},
            preexec_fn=own,
        )
        self.seen = ""

    def __enter__(self) -> Typist:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()
        os.close(self.master)
        os.close(self.terminal)

    @property
    def attributes(self) -> object:
        """Of the terminal."""
        return termios.tcgetattr(self.terminal)

    def wait_for(self, words: str, limit_s: float = 30.0) -> str:
        """What was shown since the last time, up to these words."""
        end_s = time.monotonic() + limit_s
        while words not in self.seen:
            assert time.monotonic() < end_s, self.seen
            self.look()
        shown, _, self.seen = self.seen.partition(words)
        return shown

    def wait_for_more(self, n: int = 20, limit_s: float = 30.0) -> None:
        """Until so many characters are shown behind what was waited for last: more than the end of a line takes."""
        end_s = time.monotonic() + limit_s
        while len(self.seen) < n:
            assert time.monotonic() < end_s, self.seen
            self.look()

    def look(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 1 << 16).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self, limit_s: float = 20.0) -> int:
        """The exit code."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self.look()
        return self.process.returncode

    def rank(self, number: int) -> int:
        """Its process id."""
        for pid in descendants(self.process.pid):
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
            environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            words = command_of(pid).split(b"\0")
            if rank_from_environment(environ) == number and words[1:3] == [b"-m", b"pipeinfer"]:
                return pid
        raise AssertionError(f"no rank {number}")
