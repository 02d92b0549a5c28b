"""Ctrl-C and SIGTERM: rank 0 stops in order and keeps the text; the other ranks leave when rank 0 tells them to."""

from __future__ import annotations

import signal
from collections.abc import Callable

from pipeinfer.errors import StopRequested


class StopFlag:
    """Set by a signal or by another rank; `check` turns it into `StopRequested`, once."""

    def __init__(self) -> None:
        self.reason = ""
        self.exit_code = 0
        self._raised = False

    def set(self, reason: str, exit_code: int = 1) -> None:
        if not self.reason:
            self.reason, self.exit_code = reason, exit_code

    def note(self, reason: str, exit_code: int) -> None:
        """Set by the caller itself, who needs no exception to learn of it."""
        self.set(reason, exit_code)
        self._raised = True

    def check(self) -> None:
        if self.reason and not self._raised:
            self._raised = True
            raise StopRequested(self.reason)


def handle_signals(flag: StopFlag, rank: int, ask_head: Callable[[str], object]) -> None:
    """Rank 0: a first Ctrl-C or SIGTERM asks for an orderly stop. Others leave SIGINT to rank 0 and pass SIGTERM on."""

    def stop_head(number: int, frame: object) -> None:
        flag.set("interrupted" if number == signal.SIGINT else "terminated", 128 + number)

    def stop_other(number: int, frame: object) -> None:
        ask_head(f"rank {rank} was terminated")

    signal.signal(signal.SIGINT, stop_head if rank == 0 else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop_head if rank == 0 else stop_other)
