"""When requests go without guesses: while hardly any guess is right, and while guesses cost more time than they save.

Knows verdicts and times, no tree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeinfer.core.tree import Settled

REST, GO_ON = "guesses cost time here", "guesses save time again: speculation goes on"
SILENT = "hardly any guess of the draft is right: only single tokens are sent, guesses are tried now and then"
RESUMED = "the draft's guesses are right again: speculation goes on"


@dataclass
class PauseNotices:
    """Lines for the user, each change once. Requests of one session share it. `cost_time`, `are_wrong`: what the user
    was told last of guesses."""

    cost_time: bool = False
    are_wrong: bool = False

    def of_time(self, cost_time: bool, figures: str) -> str:
        """The line on whether guesses cost time; empty if the user knows. `figures`: shown if they do."""
        if self.cost_time is cost_time:
            return ""
        self.cost_time = cost_time
        return f"{REST}: {figures}; they are tried again now and then" if cost_time else GO_ON

    def of_hits(self, are_wrong: bool) -> str:
        """The line on whether hardly any guess is right; empty if the user knows."""
        if self.are_wrong is are_wrong:
            return ""
        self.are_wrong = are_wrong
        return SILENT if are_wrong else RESUMED


# -- guesses that are wrong

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

    notices: PauseNotices = field(default_factory=PauseNotices)
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
            return self.notices.of_hits(True)
        if hit_rate > RESUMED_ABOVE:
            self._interval = 0
            return self.notices.of_hits(False)
        drafted = settled.drafted
        if self._interval and (drafted or self._n_roots >= self._interval + LONGEST_TRY):
            was_right = bool(drafted) and drafted[0][1] is not None
            self._interval, self._n_roots = SHORTEST if was_right else min(2 * self._interval, LONGEST), 0
        return ""


# -- guesses that cost time

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

TRUSTED, TRUSTED_MOST = 256, 1024
"""Tokens for which the time without guesses holds once it was measured: twice as many each time that the next
measurement has the same answer."""


Estimate = Callable[[int], float]
"""Seconds of a token without guesses after so many tokens, as far as they are known now; 0: unknown."""


@dataclass
class WithoutGuesses:
    """What a token takes without guesses, as it was last measured. Requests of one session share it."""

    age: int = 0  # tokens since
    _token_s: float = 0.0
    _n_before: int = 0  # tokens before it then
    _paid: bool = True
    _trusted: int = TRUSTED

    @property
    def holds(self) -> bool:
        return self._token_s > 0 and self.age < self._trusted

    def seconds(self, estimate: Estimate, n_before: int) -> float:
        """After so many tokens. Both estimates are today's: earlier ones knew other costs."""
        then_s = estimate(self._n_before)
        return self._token_s * (estimate(n_before) / then_s if then_s else 1.0)

    def measured(self, token_s: float, n_before: int) -> None:
        self._token_s, self._n_before, self.age = token_s, n_before, 0

    def answered(self, pays: bool) -> None:
        """A measurement said whether guesses pay."""
        self._trusted = min(2 * self._trusted, TRUSTED_MOST) if pays is self._paid else TRUSTED
        self._paid = pays


@dataclass
class SpeculationTrial:
    """Of one request. `rests`: the next tokens are made without guesses."""

    without: WithoutGuesses = field(default_factory=WithoutGuesses)
    notices: PauseNotices = field(default_factory=PauseNotices)
    rests: bool = False
    _tests: bool = False  # it rests only to be measured
    _n_notices: int = 0
    _with_s: float = 0.0
    _rest: int = 0  # tokens of the last one
    _left: int = 0  # tokens left of this one
    _n_skipped: int = 0
    _n: int = 0
    _seconds: float = 0.0

    def settled(
        self, n_tokens: int, seconds: float, estimate: Estimate, n_before: int,
        may_try: Callable[[], bool] = lambda: True,
    ) -> str:  # fmt: skip
        """So many tokens of a lone request came after so many seconds, the next one after `n_before` tokens. `may_try`:
        asked when a rest is over, whether it may end now. Returns what the user should know, usually nothing."""
        self.without.age += n_tokens
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
            self.without.measured(token_s, n_before)
            if self._tests:
                return self._decide(self.without.seconds(estimate, n_before))
            if self._left <= 0 and may_try():
                self._turn()
            return ""
        self._with_s = (self._with_s + token_s) / 2 if self._with_s else token_s
        if self.without.holds:
            return self._decide(self.without.seconds(estimate, n_before))
        if self._with_s < SURELY * estimate(n_before):
            return self._notice(True)
        self._tests = True
        self._turn()
        return ""

    def _decide(self, without_s: float) -> str:
        loss = self._with_s / without_s
        pays = loss <= LOSS
        if self._tests:
            self.without.answered(pays)
            self._tests = False
        tries = int(N_WITH * (loss - 1) / SHARE_OF_TRIES)
        self._rest = 0 if pays else min(max(LEAST_REST, tries, 2 * self._rest), LONGEST_REST)
        self._left = self._rest
        if self.rests == pays:
            self._turn()
        return self._notice(pays, f"{1 / self._with_s:.1f} tokens/s with them, {1 / without_s:.1f} without them")

    def _notice(self, pays: bool, figures: str = "") -> str:
        line = self.notices.of_time(not pays, figures) if self._n_notices < MOST_LINES else ""
        self._n_notices += bool(line)
        return line

    def _turn(self) -> None:
        self.rests, self._n_skipped = not self.rests, 0
        self._begin()

    def _begin(self) -> None:
        self._n, self._seconds = 0, 0.0
