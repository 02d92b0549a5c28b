"""How much a draft spreads its guesses, learned from how they fared. Knows verdicts on guesses, no tree.

A greedy target takes the likeliest token, a draft says what is likely: of guesses that it holds to be right one time in
fifty hardly any is. Temperature scaling (Guo et al. 2017): probabilities are raised to a power, and made to add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled

LEAST, MOST = 0.3, 3.0
"""Of the power."""

MEMORY = 0.98
"""What a token still weighs after the next one."""

PRIOR = 20.0
"""How firmly a power of 1 is believed, in squared nats: a contested token tells one to four."""

TINY = 1e-9


@dataclass
class TemperatureScaling:
    """Of each draft a power, moved by every contested token towards a higher likelihood of what the target chose: one
    step of Newton's method on a curvature with forgetting. What is not among the guesses counts as one further token,
    no likelier than the last of them."""

    _powers: dict[int, float] = field(default_factory=dict)
    _curvatures: dict[int, float] = field(default_factory=dict)

    def scaled(self, guesses: Sequence[Guess], draft: int) -> Sequence[Guess]:
        """The same guesses, their probabilities to the draft's power and normalised with all that is not among them."""
        power = self._powers.get(draft, 1.0)
        if not guesses or power == 1.0:
            return guesses
        shares = [max(guess.probability, TINY) for guess in guesses]
        weights = [share**power for share in shares]
        # every other token's share is the last guess's at most
        others = max(1 - sum(shares), TINY) * min(shares) ** (power - 1)
        total = sum(weights) + others
        return [Guess(guess.token, weight / total) for guess, weight in zip(guesses, weights, strict=True)]

    def settled(self, settled: Settled) -> None:
        for guesses, right in settled.contests:
            draft = guesses[0].guessed_by
            self._learn(draft, [guess for guess in guesses if guess.guessed_by == draft], right)

    def _learn(self, draft: int, guesses: Sequence[Node], right: Node | None) -> None:
        """The gradient of the log-likelihood is how much likelier than expected the right token was thought to be."""
        logs = [guess.log_prob for guess in guesses]
        shares = [math.exp(log) for log in logs]
        other, others = min(logs), max(1 - sum(shares), TINY)
        total = sum(shares) + others
        mean = (sum(share * log for share, log in zip(shares, logs, strict=True)) + others * other) / total
        spread = sum(share * (log - mean) ** 2 for share, log in zip(shares, logs, strict=True))
        variance = (spread + others * (other - mean) ** 2) / total
        power = self._powers.get(draft, 1.0)
        curvature = self._curvatures[draft] = MEMORY * self._curvatures.get(draft, 0.0) + variance / power**2
        found = right.log_prob if right is not None and right in guesses else other
        step = (found - mean) / power / (curvature + PRIOR)
        self._powers[draft] = min(max(power + step, LEAST), MOST)
