"""How far a draft's probabilities can be trusted, learned from verdicts on its guesses. Knows no tree."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled

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


LEAST_POWER, MOST_POWER = 0.3, 3.0
"""Of the power."""

POWER_MEMORY = 0.98
"""The weight of a token after the next one."""

PRIOR = 20.0
"""The weight of a power of 1, in squared nats; a guessed-at token weighs one to four."""

TINY = 1e-9


@dataclass
class TemperatureScaling:
    """A power for each draft, to which its probabilities are raised and then normalised (Guo et al. 2017): a greedy
    target takes the likeliest token, so improbable guesses are right more rarely than a draft says. Every guessed-at
    token moves the power by a step of Newton's method towards a higher likelihood of the target's choice, on a
    curvature with forgetting. All other tokens count as one, as likely as the last guess."""

    _powers: dict[int, float] = field(default_factory=dict)
    _curvatures: dict[int, float] = field(default_factory=dict)

    def scaled(self, guesses: Sequence[Guess], draft: int) -> Sequence[Guess]:
        """The guesses with their probabilities raised to the draft's power and normalised with all other tokens."""
        power = self._powers.get(draft, 1.0)
        if not guesses or power == 1.0:
            return guesses
        shares = [max(guess.probability, TINY) for guess in guesses]
        weights = [share**power for share in shares]
        # other tokens are at most as likely as the last guess
        others = max(1 - sum(shares), TINY) * min(shares) ** (power - 1)
        total = sum(weights) + others
        return [Guess(guess.token, weight / total) for guess, weight in zip(guesses, weights, strict=True)]

    def settled(self, settled: Settled) -> None:
        for guesses, right in settled.drafted:
            draft = guesses[0].guessed_by
            self._learn(draft, [guess for guess in guesses if guess.guessed_by == draft], right)

    def _learn(self, draft: int, guesses: Sequence[Node], right: Node | None) -> None:
        """The gradient of the log-likelihood: the right token's log-probability less the expected one."""
        logs = [guess.log_prob for guess in guesses]
        shares = [math.exp(log) for log in logs]
        other, others = min(logs), max(1 - sum(shares), TINY)
        total = sum(shares) + others
        mean = (sum(share * log for share, log in zip(shares, logs, strict=True)) + others * other) / total
        spread = sum(share * (log - mean) ** 2 for share, log in zip(shares, logs, strict=True))
        variance = (spread + others * (other - mean) ** 2) / total
        power = self._powers.get(draft, 1.0)
        curvature = self._curvatures[draft] = POWER_MEMORY * self._curvatures.get(draft, 0.0) + variance / power**2
        right_log = right.log_prob if right is not None and right in guesses else other
        step = (right_log - mean) / power / (curvature + PRIOR)
        self._powers[draft] = min(max(power + step, LEAST_POWER), MOST_POWER)
