"""When to stop guessing, and when to try again. Knows verdicts on guesses, no tree."""

from dataclasses import dataclass, field

from pipeinfer.core.tree import Settled
from pipeinfer.policies.told import Told

SILENT_BELOW, RESUMED_ABOVE = 0.06, 0.15
"""Running means of the share of guessed-at tokens that had been guessed."""

SHORTEST, LONGEST = 4, 64
"""Roots without guesses before a try."""

LONGEST_TRY = 32
"""Roots of a try at most: the draft reads first what came meanwhile."""


@dataclass
class SpeculationBackoff:
    """When hardly any guess is right, roots get guesses only now and then, until one was judged; the intervals grow
    while they fail."""

    told: Told = field(default_factory=Told)
    _interval: int = 0  # roots before a try; 0: guesses pay
    _n_roots: int = 0  # since the last try

    @property
    def holds(self) -> bool:
        """Whether the current root gets no guesses."""
        return self._n_roots < self._interval

    def settled(self, settled: Settled, hit_rate: float) -> str:
        """The root moved. Returns a notice for the user, usually empty."""
        self._n_roots += len(settled.path) - 1
        if not self._interval and hit_rate < SILENT_BELOW:
            self._interval, self._n_roots = SHORTEST, 0
            return self.told.of_hits(True)
        if hit_rate > RESUMED_ABOVE:
            self._interval = 0
            return self.told.of_hits(False)
        drafted = settled.drafted
        if self._interval and (drafted or self._n_roots >= self._interval + LONGEST_TRY):
            was_right = bool(drafted) and drafted[0][1] is not None
            self._interval, self._n_roots = SHORTEST if was_right else min(2 * self._interval, LONGEST), 0
        return ""
