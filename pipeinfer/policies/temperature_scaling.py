"""Temperature scaling of drafts' probabilities, learned from verdicts on guesses. Knows no tree.

A greedy target takes the likeliest token, so a draft's improbable guesses are right more rarely than it says. Their
probabilities are raised to a power and normalised (Guo et al. 2017).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled

LEAST, MOST = 0.3, 3.0
"""Of the power."""

MEMORY = 0.98
"""The weight of a token after the next one."""

PRIOR = 20.0
"""The weight of a power of 1, in squared nats; a guessed-at token weighs one to four."""

TINY = 1e-9


@dataclass
class TemperatureScaling:
    """A power for each draft, moved by every guessed-at token towards a higher likelihood of the target's choice: a
    step of Newton's method, on a curvature with forgetting. All other tokens count as one, as likely as the last
    guess."""

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
        curvature = self._curvatures[draft] = MEMORY * self._curvatures.get(draft, 0.0) + variance / power**2
        found = right.log_prob if right is not None and right in guesses else other
        step = (found - mean) / power / (curvature + PRIOR)
        self._powers[draft] = min(max(power + step, LEAST), MOST)
