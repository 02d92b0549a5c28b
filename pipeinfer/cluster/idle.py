"""How a rank waits. Knows no MPI."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SET_TIMER_SLACK, SLACK_NS = 29, 1000  # prctl's, of Linux


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

    def until(self, ready: Callable[[], T | None]) -> T:
        """Poll `ready` until it returns something other than None; an exception of it ends the wait."""
        result = self.within(ready, math.inf)
        assert result is not None
        return result

    def within(self, ready: Callable[[], T | None], timeout_s: float) -> T | None:
        """The same with a time limit; None if it is over."""
        start_s, waited_s = time.perf_counter(), 0.0
        spin_s = self.spin_when_busy_s if self._last_s < self.spin_when_busy_s else self.spin_s
        while (result := ready()) is None and waited_s < timeout_s:
            if waited_s < spin_s:
                os.sched_yield()
            else:
                pause_s = min(self.share * waited_s, abs(waited_s - self._last_s) / 2, self.longest_s)
                pause_s = max(pause_s, self.shortest_s)
                time.sleep(min(pause_s, timeout_s - waited_s))
            waited_s = time.perf_counter() - start_s
        self._last_s = waited_s
        return result
