"""The command that finds out what is wrong with the hosts of missing ranks, run by the sentinel. Knows no host itself.
Standard library alone."""

import contextlib
import selectors
import subprocess
from collections.abc import Sequence

from pipeinfer.cluster.watch.protocol import write_line

MAX_HOSTS = 8  # hosts that are looked at


class Inquiry:
    """`command`: prints a line about each host of its arguments, which are the number of ranks, rank 0's host and those
    of missing ranks; empty: there is none."""

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

    def hear(self) -> None:
        """Pass a line on."""
        assert self._process and self._process.stdout
        if line := self._process.stdout.readline().decode("utf-8", "replace").strip():
            write_line(line)
            self.lines.append(line)
        else:
            self.end()

    def end(self) -> None:
        if self._process and self._process.stdout:
            self._selector.unregister(self._process.stdout)
            self._process.kill()
            self._process = None
