"""How a job is ended from outside. On Ctrl-C, SIGTERM and SIGHUP rank 0 stops it, in order and with the text kept once
there is one; on a bus error the file is named that became shorter under a computing thread.

A service ends in two steps: the first signal lets open requests come to their ends, a later one stops them.

The kernel answers a read beyond the end of a mapped file with SIGBUS, in the thread that computes. A handler of
Python's would never run, as that thread cannot go on; one that the C library calls does. Linux only: elsewhere such a
death is reported by the watch alone.
"""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeinfer.cluster.hosts.launch import show_cursor
from pipeinfer.cluster.watch.protocol import ENDING, write_line
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.errors import StopRequested
from pipeinfer.job.process.signals import HEAD_FIRST_S
from pipeinfer.models.gguf.contents import CHANGED_WHILE_COMPUTING

NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
ORDERLY_S = 1.2  # how long an orderly stop may take before the job is ended where it stands
ONE_PRESS_S = 0.5  # signals within this time are one: a launcher may forward what the terminal has sent


class Interrupts(Protocol):
    """Decides what a signal ends, if that is not the job."""

    def interrupt(self, number: int) -> bool:
        """Whether the signal is handled here; else the job stops. Called in another thread."""
        ...

    def stop_requested(self) -> bool:
        """The same for a stop that another rank asks for."""
        ...

    def due(self) -> bool:
        """Whether the current work must end; True once for each interrupt."""
        ...


class StopFlag:
    """Set by a signal or by another rank; `check` turns it into `StopRequested`, once. `orderly`: there is something to
    keep, so rank 0 stops in order; before, the job is ended where it stands. `interrupts`: in a chat and a service."""

    def __init__(self) -> None:
        self.reason = ""
        self.exit_code = 0
        self.orderly = False
        self.interrupts: Interrupts | None = None
        self._raised = self._is_held = False

    def set(self, reason: str, exit_code: int = 1) -> None:
        if not self.reason:
            self.reason, self.exit_code = reason, exit_code

    def note(self, reason: str, exit_code: int) -> None:
        """As `set`, for a caller that ends by itself: `check` does not raise."""
        self.set(reason, exit_code)
        self._raised = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block `check` does not raise; a stop requested meanwhile is raised afterwards."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def check(self) -> None:
        if self._is_held:
            return
        if self.reason and not self._raised:
            self._raised = True
            raise StopRequested(self.reason)
        if self.interrupts and self.interrupts.due():
            raise StopRequested("the answer was stopped")


@dataclass(frozen=True, slots=True)
class Stopper:
    """What a rank of a job does on a request to stop. `end` ends all ranks at once."""

    flag: StopFlag
    watch: Watch
    end: Callable[[int], object]

    def on_signal(self, number: int) -> None:
        """Rank 0 stops the job. A rank that has not joined yet ends. Another leaves SIGINT, which all get, to rank 0,
        and asks it to stop for other signals, a moment later: a launcher that ends sends SIGTERM in any order."""
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
        """On rank 0, when another rank asks for a stop."""
        interrupts = self.flag.interrupts
        if not self.flag.reason and not (interrupts and interrupts.stop_requested()):
            if not self.flag.orderly:
                write_line(f"{reason}{ENDING}")
            threading.Thread(target=self._stop, args=(reason, 1), daemon=True).start()

    def _stop(self, reason: str, code: int) -> None:
        self.flag.set(reason, code)
        self.watch.ask_stop(reason)  # so that the deaths that follow are not reported
        if self.flag.orderly:
            time.sleep(ORDERLY_S)
            write_line(f"{reason}; ended where it stood, after {ORDERLY_S:g} s without an orderly end")
        show_cursor()
        self.end(code)


class Drain:
    """The `Interrupts` of a service; signals come in other threads. `limit_s`: for open requests after the first."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self.clock = limit_s, clock
        self.exit_code = 0
        self._since_s = math.inf

    @property
    def began(self) -> bool:
        return self._since_s < math.inf

    @property
    def left_s(self) -> float:
        """Time left for open requests; 0 before a drain."""
        return max(0.0, self._since_s + self.limit_s - self.clock()) if self.began else 0.0

    @property
    def is_over(self) -> bool:
        """Whether no time is left for open requests."""
        return self.clock() >= self._since_s + self.limit_s

    def interrupt(self, number: int) -> bool:
        now_s = self.clock()
        if self.began:
            return now_s < self._since_s + ONE_PRESS_S
        self.exit_code = 128 + number if number == signal.SIGINT else 0
        self._since_s = now_s
        return True

    def stop_requested(self) -> bool:
        return self.began or self.interrupt(signal.SIGTERM)

    def due(self) -> bool:
        return False


SA_SIGINFO = 4
N_MASK_BYTES = 128
ADDRESS_AT = 16  # offset in a siginfo_t, on 64-bit Linux, of the address that could not be read


class _Action(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * N_MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@contextlib.contextmanager
def report_bus_errors(fault: Callable[[str], object]) -> Iterator[None]:
    """Within the block a bus error ends in `fault(line)`, which does not return."""

    @_Handler
    def on_bus_error(number: int, info: int, context: int) -> None:
        try:
            address = ctypes.c_size_t.from_address(info + ADDRESS_AT).value
            fault(describe(file_at(address, Path("/proc/self/maps").read_text(errors="replace").splitlines())))
        finally:
            os._exit(1)

    if sys.platform != "linux" or sys.maxsize < 2**32:
        yield
        return
    sigaction, before = ctypes.CDLL(None).sigaction, _Action()
    action = _Action(ctypes.cast(on_bus_error, ctypes.c_void_p), b"", SA_SIGINFO, None)
    sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        sigaction(int(signal.SIGBUS), ctypes.byref(before), None)


def describe(path: str) -> str:
    """The line about a file that cannot be read at a place that is mapped."""
    if path.startswith("/") and not path.startswith(("/memfd:", "/dev/shm/")):
        return f"{path} {CHANGED_WHILE_COMPUTING}"
    return f"out of memory for {path or 'a mapped file'}; use more ranks, or a host with more free memory"


def file_at(address: int, maps: Iterable[str]) -> str:
    """The file that is mapped at an address, given the lines of /proc/PID/maps; "" if none is."""
    for line in maps:
        span, _, _, _, _, *path = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return path[0] if path else ""
    return ""
