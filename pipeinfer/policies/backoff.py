"""When guesses are not worth making, and when they are tried again. Knows verdicts on guesses, no tree."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.core.tree import Settled

SILENT_BELOW, RESUMED_ABOVE = 0.06, 0.15
"""Share of contested tokens that had been guessed, a running mean."""

SHORTEST, LONGEST = 4, 64


@dataclass
class SpeculationBackoff:
    """When hardly any guess is right, only every so manieth root gets guesses: at growing intervals while they fail."""

    _interval: int = 0  # roots between two tries; 0: guesses pay
    _n_roots: int = 0

    @property
    def holds(self) -> bool:
        """Whether the root of now gets no guesses."""
        return self._interval > 0 and self._n_roots % self._interval > 0

    def settled(self, settled: Settled, hit_rate: float) -> str:
        """The root moved. Returns what the user should know, usually nothing."""
        self._n_roots += len(settled.path) - 1
        if not self._interval and hit_rate < SILENT_BELOW:
            self._interval = SHORTEST
            return "hardly any guess of the draft is right: only single tokens are sent, guesses are tried now and then"
        if self._interval and hit_rate > RESUMED_ABOVE:
            self._interval = 0
            return "the draft's guesses are right again: speculation goes on"
        if self._interval and settled.n_contested:
            self._interval = SHORTEST if settled.n_matched else min(2 * self._interval, LONGEST)
        return ""
