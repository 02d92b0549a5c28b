"""How far a draft's confidence can be trusted, learned from how its likeliest guesses fared. Knows no tree."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Settled

LEARNING_RATE, LARGEST_BIAS = 0.2, 4.0
"""Of the correction, in log-odds."""

HIT_MEMORY = 16
"""Verdicts in the running means of right guesses."""


@dataclass
class Calibration:
    """Corrects the probability of each draft's first guess (log-odds, online logistic regression on a constant): with
    an underconfident draft chains would lose to their siblings, an overconfident one would never branch. `hit_rate`:
    the share of guessed-at tokens that had been guessed; `first_rate`: that had been the likeliest guess; running
    means.
    """

    hit_rate: float = 0.5
    first_rate: float = 0.5
    _n_firsts: int = 0
    _biases: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def corrected(self, guesses: Sequence[Guess], draft: int) -> Sequence[Guess]:
        """The first guess's probability moved by the draft's bias, the others scaled to the rest."""
        bias = self._biases[draft]
        if not guesses or not bias:
            return guesses
        first = min(max(guesses[0].probability, 1e-6), 1 - 1e-6)
        moved = 1 / (1 + (1 - first) / first * math.exp(-bias))
        rest = (1 - moved) / (1 - first)
        return [Guess(guesses[0].token, moved), *(Guess(g.token, g.probability * rest) for g in guesses[1:])]

    def judged(self, draft: int, probability: float, right: bool) -> None:
        """A draft's likeliest guess, of this corrected probability, was right or not."""
        bias = self._biases[draft] + LEARNING_RATE * (right - probability)
        self._biases[draft] = min(max(bias, -LARGEST_BIAS), LARGEST_BIAS)

    def met(self, guessed: bool) -> None:
        """A token was among the guesses in its place or not."""
        self.hit_rate += (float(guessed) - self.hit_rate) / HIT_MEMORY

    def is_due(self, position: int) -> bool:
        """Whether guesses after a position are worth making to learn from them."""
        return self._n_firsts < HIT_MEMORY or position % HIT_MEMORY == 0

    def settled(self, settled: Settled) -> None:
        """Learn from all verdicts on drafts' guesses."""
        for guesses, right in settled.drafted:
            first = guesses[0]
            self.judged(first.guessed_by, math.exp(first.log_prob), first is right)
            self._n_firsts += 1
            self.first_rate += (float(first is right) - self.first_rate) / min(self._n_firsts, HIT_MEMORY)
            self.met(right is not None)
