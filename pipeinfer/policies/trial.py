"""Whether guesses earn their time: seconds a token with them and without, measured in turns. Knows no tree."""

from collections.abc import Callable
from dataclasses import dataclass

N_WITH, N_WITHOUT = 12, 8
"""Tokens over which the one and the other is measured at least."""

N_SKIPPED = 2
"""Verdicts after a change that count for neither: runs of before are in flight."""

SURELY = 0.9
"""Guesses are put to the test unless a token takes less than this share of what it takes without, by estimate."""

LOSS = 1.03
"""Times as long as without guesses that a token may take with them."""

LEAST_REST, LONGEST_REST = 32, 1536
"""Tokens without guesses before they are tried again: twice as many each time that they do not pay."""

SHARE_OF_TRIES = 0.02
"""Of the time, which trying guesses again may cost."""

MOST_LINES = 2
"""For the user of one text: where guesses hardly matter the answer changes often."""

TRUSTED = 256
"""Tokens for which the time without guesses holds once it was measured."""


@dataclass
class SpeculationTrial:
    """`rests`: the next tokens are made without guesses."""

    rests: bool = False
    _tests: bool = False  # it rests only to be measured
    _said: bool = False  # that guesses do not pay
    _n_said: int = 0
    _with_s: float = 0.0
    _without_s: float = 0.0
    _age: int = TRUSTED  # tokens since that was measured
    _rest: int = 0  # tokens of the last one
    _left: int = 0  # tokens left of this one
    _n_skipped: int = 0
    _n: int = 0
    _seconds: float = 0.0

    def settled(
        self, n_tokens: int, seconds: float, estimate_s: float, may_try: Callable[[], bool] = lambda: True
    ) -> str:
        """So many tokens of a lone request came after so many seconds. `estimate_s`: what a token would take without
        guesses, as far as that is known. `may_try`: asked when a rest is over, whether it may end now. Returns what the
        user should know, usually nothing."""
        self._age += n_tokens
        self._left -= n_tokens
        if self._n_skipped < N_SKIPPED:
            self._n_skipped += 1
            return ""
        self._n, self._seconds = self._n + n_tokens, self._seconds + seconds
        if self._n < (N_WITHOUT if self.rests else N_WITH):
            return ""
        token_s = max(self._seconds / self._n, 1e-9)
        self._begin()
        if self.rests:
            self._without_s, self._age = token_s, 0
            if self._tests:
                return self._decide()
            if self._left <= 0 and may_try():
                self._turn()
            return ""
        self._with_s = (self._with_s + token_s) / 2 if self._with_s else token_s
        if self._age < TRUSTED:
            return self._decide()
        if token_s >= SURELY * estimate_s:
            self._tests = True
            self._turn()
        return ""

    def _decide(self) -> str:
        loss = self._with_s / self._without_s
        self._tests, pays = False, loss <= LOSS
        tries = int(N_WITH * (loss - 1) / SHARE_OF_TRIES)
        self._rest = 0 if pays else min(max(LEAST_REST, tries, 2 * self._rest), LONGEST_REST)
        self._left = self._rest
        if self.rests == pays:
            self._turn()
        if self._said is not pays or self._n_said == MOST_LINES:
            return ""
        self._said, self._n_said = not pays, self._n_said + 1
        if pays:
            return "guesses save time again: speculation goes on"
        return (f"guesses cost time here: {1 / self._with_s:.1f} tokens/s with them, {1 / self._without_s:.1f} without "
                "them; they are tried again now and then")  # fmt: skip

    def _turn(self) -> None:
        self.rests, self._n_skipped = not self.rests, 0
        self._begin()

    def _begin(self) -> None:
        self._n, self._seconds = 0, 0.0
