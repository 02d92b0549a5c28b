"""How many threads are fastest: tried while evaluating, for each number of rows.

More threads than pay are common: processors that share a core, memory that a few threads use up, small layers between
whose barriers little is computed. Which is it depends on model, rows and machine, and on a virtual one on who else is
there: so now and then some evaluations are given half or twice the threads, and what was faster is kept. Knows no
clocks and no library.
"""

from __future__ import annotations

import statistics
from collections import deque

MOST_ROWS = 32  # more rows are computed rather than read, by all threads there are; and prompts shall not wait
N_BEFORE, N_AFTER = 8, 8  # evaluations of each kind that are compared
TURN = 3  # evaluations one after another with as many threads
WAIT, WAIT_MAX = 16, 512  # evaluations between two trials; twice as many after each that changed nothing
PAYS = 0.95  # of the time: less would be noise, and swings
CLEARLY_NOT, NOT = 1.4, 1.1  # times as long: given up after one evaluation, and after a turn


class Trials:
    """Of evaluations of one number of rows; `best` is what has been fastest so far."""

    def __init__(self, most: int, best: int) -> None:
        self.most, self.best = most, best
        self._tried: int | None = None  # what is compared with the best, while it is
        self._n_tried = 0
        self._known: deque[float] = deque(maxlen=N_BEFORE)  # seconds of evaluations with the best
        self._found: list[float] = []  # with what is tried
        self._n_turn = 0
        self._wait = self._left = WAIT

    def n_threads(self) -> int:
        """For the next evaluation."""
        if self._tried is not None and self._n_turn < TURN:
            return self._tried
        return self.best

    def note(self, n_threads: int, seconds: float) -> None:
        """What an evaluation with so many threads took, whether that was what was asked for or not."""
        if n_threads == self._tried:
            self._found.append(seconds)
        elif n_threads == self.best:
            self._known.append(seconds)
        else:
            self._tried = None  # others want the cores: this is no time to compare
        if self._tried is None:
            self._rest()
        else:
            self._n_turn = (self._n_turn + 1) % (2 * TURN)
            self._judge(self._tried)

    def _rest(self) -> None:
        self._left -= 1
        if self._left > 0 or len(self._known) < N_BEFORE:
            return
        others = [n for n in (self.best // 2, min(self.most, 2 * self.best)) if n not in (0, self.best)]
        self._tried, self._found, self._n_turn = others[self._n_tried % len(others)], [], 0
        self._n_tried += 1

    def _judge(self, tried: int) -> None:
        known, found = statistics.median(self._known), statistics.median(self._found) if self._found else 0.0
        is_bad = found > CLEARLY_NOT * known or (len(self._found) >= TURN and found > NOT * known)
        if not is_bad and len(self._found) < N_AFTER:
            return
        if found < PAYS * known:
            self.best, self._wait = tried, WAIT
            self._known.clear()
        else:
            self._wait = min(2 * self._wait, WAIT_MAX)
        self._tried, self._left = None, self._wait


class ThreadTrials:
    """Of all numbers of rows up to MOST_ROWS, each tried by itself, from what is known of fewer rows on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of_rows: dict[int, Trials] = {}

    def n_threads(self, n_rows: int) -> int:
        """For the next evaluation of so many rows."""
        if self.most == 1 or n_rows > MOST_ROWS:
            return self.most
        if n_rows not in self._of_rows:
            fewer = max((known for known in self._of_rows if known < n_rows), default=None)
            best = self.most if fewer is None else self._of_rows[fewer].best
            self._of_rows[n_rows] = Trials(self.most, best)
        return self._of_rows[n_rows].n_threads()

    def note(self, n_rows: int, n_threads: int, seconds: float) -> None:
        """What an evaluation took that came to its end."""
        if n_rows in self._of_rows:
            self._of_rows[n_rows].note(n_threads, seconds)
