"""How a rank waits, and how large messages move while it computes. Knows no MPI and no run."""

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SET_TIMER_SLACK, SLACK_NS = 29, 1000  # prctl's, of Linux

LARGE_BYTES = 128 << 10
"""Size of a run from which the thread of `Progress` works: others of that size may be on their way."""

N_LOOKS, PAUSE_S = 16, 1e-3  # a link of 1 Gbit/s delivers 8 pieces in a pause; the thread costs 2% of a core


def sleep_on_time() -> None:
    """Make sleeps of this thread, and of those it starts, precise. By default Linux extends them by up to 50 us, which
    is longer than a short sleep here, at every hop of every token."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)


@dataclass(slots=True)
class Idle:
    """Waits without taking cores from the computing ranks: poll for a moment, then sleep for a share of the time waited
    so far, so that sleeping adds no more than that share. Waits of a pipeline are alike: near the length of the last
    one it sleeps less. After a short wait it polls for longer."""

    spin_s: float = 50e-6
    spin_when_busy_s: float = 500e-6
    share: float = 0.04
    shortest_s: float = 20e-6
    longest_s: float = 1e-3
    _last_s: float = 0.0

    def pause_s(self, waited_s: float, last_s: float) -> float:
        """How long to sleep after `waited_s` of a wait, when the one before took `last_s`; 0: poll at once."""
        if waited_s < (self.spin_when_busy_s if last_s < self.spin_when_busy_s else self.spin_s):
            return 0.0
        return max(min(self.share * waited_s, abs(waited_s - last_s) / 2, self.longest_s), self.shortest_s)

    def until(self, ready: Callable[[], T | None]) -> T:
        """Poll `ready` until it returns something other than None; an exception of it ends the wait."""
        result = self.within(ready, math.inf)
        assert result is not None
        return result

    def within(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """The same with a time limit, after which it returns None."""
        start_s, waited_s = time.perf_counter(), 0.0
        while (result := ready()) is None and waited_s < timeout_s:
            if pause_s := self.pause_s(waited_s, self._last_s):
                time.sleep(min(pause_s, timeout_s - waited_s))
            else:
                os.sched_yield()
            waited_s = time.perf_counter() - start_s
        self._last_s = waited_s
        return result


class Progress:
    """Moves large messages while this rank computes. `look` lets MPI move messages, from any thread; None: they move
    only when tested for. MPI moves a message only when it is called, over TCP about 16 KB a call. A rank that evaluates
    a chunk of a prompt calls it between layers at most, so over slow links transfers would wait for computation. A
    thread calls it instead, and sleeps when nothing large is on its way."""

    def __init__(self, look: Callable[[], object] | None) -> None:
        self._look = look
        self._is_on = threading.Event()
        self._has_thread = False

    @contextmanager
    def beside(self, n_bytes: int) -> Iterator[None]:
        """Move messages while the caller evaluates a run of so many bytes."""
        if self._look is None or n_bytes < LARGE_BYTES:
            yield
            return
        if not self._has_thread:
            threading.Thread(target=self._move, args=(self._look,), name="progress", daemon=True).start()
            self._has_thread = True
        self._is_on.set()
        try:
            yield
        finally:
            self._is_on.clear()

    def _move(self, look: Callable[[], object]) -> None:
        while self._is_on.wait():
            for _ in range(N_LOOKS):
                look()
            time.sleep(PAUSE_S)


NO_PROGRESS = Progress(None)
