"""Ctrl-C, SIGTERM and SIGHUP in a job: rank 0 stops it, in order and with the text kept once there is one."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pipeinfer.cluster.watch.protocol import write_line
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.errors import StopRequested
from pipeinfer.job.process.signals import HEAD_FIRST_S, show_cursor

NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
ORDERLY_S = 1.2
"""How long an orderly stop may take before the job is ended where it stands."""


class Interrupts(Protocol):
    """Who decides what a signal ends, where that is not the job."""

    def interrupt(self, number: int) -> bool:
        """Whether a signal is seen to; else the job shall stop. Called in another thread."""
        ...

    def asked(self) -> bool:
        """The same when another rank was told to stop."""
        ...

    def due(self) -> bool:
        """Whether what is being done shall end; said once."""
        ...


class StopFlag:
    """Set by a signal or by another rank; `check` turns it into `StopRequested`, once.

    `orderly`: there is something to keep, so rank 0 stops in order; before, the job is ended where it stands.
    `interrupts`: in a conversation and a service.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.exit_code = 0
        self.orderly = False
        self.interrupts: Interrupts | None = None
        self._raised = self._waits = False

    def set(self, reason: str, exit_code: int = 1) -> None:
        if not self.reason:
            self.reason, self.exit_code = reason, exit_code

    def note(self, reason: str, exit_code: int) -> None:
        """Set by the caller itself, who needs no exception to learn of it."""
        self.set(reason, exit_code)
        self._raised = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile `check` lets be what is brought to an end already; what was asked for meanwhile it says later."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def check(self) -> None:
        if self._waits:
            return
        if self.reason and not self._raised:
            self._raised = True
            raise StopRequested(self.reason)
        if self.interrupts and self.interrupts.due():
            raise StopRequested("the answer was stopped")


@dataclass(frozen=True, slots=True)
class Stopper:
    """What a rank of a job does when it is asked to stop. `end` ends all ranks at once."""

    flag: StopFlag
    watch: Watch
    end: Callable[[int], object]

    def on_signal(self, number: int) -> None:
        """Once a rank has joined the others it leaves SIGINT, which all get, to rank 0, and passes others on.

        Not before rank 0 would have said its own: a launcher that ends hands SIGTERM to every rank, in any order.
        """
        name = NAMES[signal.Signals(number)]
        if self.watch.rank == 0:
            interrupts = self.flag.interrupts
            if not interrupts or not interrupts.interrupt(number):
                self._stop(name, 128 + number)
        elif not self.watch.joined:
            time.sleep(HEAD_FIRST_S)
            self.end(128 + number)
        elif number != signal.SIGINT:
            time.sleep(HEAD_FIRST_S)
            self.watch.ask_stop(f"rank {self.watch.rank} was {name}")

    def on_request(self, reason: str) -> None:
        """On rank 0, when another rank was asked to stop."""
        interrupts = self.flag.interrupts
        if not self.flag.reason and not (interrupts and interrupts.asked()):
            threading.Thread(target=self._stop, args=(reason, 1), daemon=True).start()

    def _stop(self, reason: str, code: int) -> None:
        self.flag.set(reason, code)
        self.watch.ask_stop(reason)  # so that the deaths that follow are no news
        if self.flag.orderly:
            time.sleep(ORDERLY_S)
            write_line(f"{reason}; ended where it stood, after {ORDERLY_S:g} s without an orderly end")
        show_cursor()
        self.end(code)
