"""When to stop guessing, and when to try again. Knows verdicts on guesses, no tree."""

from dataclasses import dataclass

from pipeinfer.core.tree import Settled

SILENT_BELOW, RESUMED_ABOVE = 0.06, 0.15
"""Running means of the share of guessed-at tokens that had been guessed."""

SHORTEST, LONGEST = 4, 64


@dataclass
class SpeculationBackoff:
    """When hardly any guess is right, only one root in an interval gets guesses; the interval grows while they fail."""

    _interval: int = 0  # roots between two tries; 0: guesses pay
    _n_roots: int = 0

    @property
    def holds(self) -> bool:
        """Whether the current root gets no guesses."""
        return self._interval > 0 and self._n_roots % self._interval > 0

    def settled(self, settled: Settled, hit_rate: float) -> str:
        """The root moved. Returns a notice for the user, usually empty."""
        self._n_roots += len(settled.path) - 1
        if not self._interval and hit_rate < SILENT_BELOW:
            self._interval = SHORTEST
            return "hardly any guess of the draft is right: only single tokens are sent, guesses are tried now and then"
        if self._interval and hit_rate > RESUMED_ABOVE:
            self._interval = 0
            return "the draft's guesses are right again: speculation goes on"
        if self._interval and (drafted := settled.drafted):
            was_right = drafted[0][1] is not None
            self._interval = SHORTEST if was_right else min(2 * self._interval, LONGEST)
        return ""
