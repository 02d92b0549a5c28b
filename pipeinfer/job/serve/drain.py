"""Ctrl-C and SIGTERM for a service: the first lets open requests come to their ends, a later one stops them.

Knows no signals: who hears them asks here.
"""

import math
import signal
import time
from collections.abc import Callable

ONE_PRESS_S = 0.5
"""Within so long it is the same request to stop: a launcher may hand on what the terminal has said already."""


class Drain:
    """`limit_s`: how long open requests have. Signals come in other threads."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self.clock = limit_s, clock
        self.exit_code = 0
        self._since_s = math.inf

    @property
    def began(self) -> bool:
        return self._since_s < math.inf

    @property
    def left_s(self) -> float:
        """Of the time of what is open; 0 where no drain has begun."""
        return max(0.0, self._since_s + self.limit_s - self.clock()) if self.began else 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time of what is open is over."""
        return self.clock() >= self._since_s + self.limit_s

    def interrupt(self, number: int) -> bool:
        """Whether the signal is seen to here; else the job shall stop."""
        now_s = self.clock()
        if self.began:
            return now_s < self._since_s + ONE_PRESS_S
        self.exit_code = 128 + number if number == signal.SIGINT else 0
        self._since_s = now_s
        return True

    def asked(self) -> bool:
        """Another rank was told to stop: as if this one was, if it was not."""
        return self.began or self.interrupt(signal.SIGTERM)

    def due(self) -> bool:
        """Nothing ends in the middle of a wait."""
        return False
