"""What policies want the user to know while many requests are open: a line each, few an hour. Knows no policy."""

import math
from collections import deque
from collections.abc import Callable

from pipeinfer.core.types import Clock

MOST_LINES, PERIOD_S = 4, 3600.0
"""Lines in any period at most: where guesses hardly matter the answer changes often."""


class Notices:
    """A line that may not be said yet waits; a later one takes its place."""

    def __init__(self, say: Callable[[str], object], clock: Clock) -> None:
        self.say, self.clock = say, clock
        self._said = ""
        self._said_s = deque([-math.inf] * MOST_LINES, MOST_LINES)
        self._waiting = ""

    def hear(self, line: str) -> None:
        self._waiting = line if _subject(line) != _subject(self._said) else ""
        self.pass_on()

    def pass_on(self) -> None:
        """Say what waits, if that may be said by now."""
        if self._waiting and self.clock() >= self._said_s[0] + PERIOD_S:
            self._said, self._waiting = self._waiting, ""
            self._said_s.append(self.clock())
            self.say(self._said)


def _subject(line: str) -> str:
    """The line without its figures."""
    return line.partition(":")[0]
