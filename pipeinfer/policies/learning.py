"""What is learned of guesses: how far a draft's probabilities can be trusted, by verdicts on its guesses; and when
requests go without guesses: while hardly any is right, and while guesses cost more time than they save. Knows verdicts
and times, no tree."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled

LEARNING_RATE, LARGEST_BIAS = 0.2, 4.0  # of the correction, in log-odds
HIT_MEMORY = 16  # verdicts in the running means of right guesses


@dataclass
class Calibration:
    """Corrects the probability of each draft's first guess (log-odds, online logistic regression on a constant): with
    an underconfident draft chains would lose to their siblings, an overconfident one would never branch. `hit_rate`:
    the share of guessed-at tokens that had been guessed; `first_rate`: the likeliest guess; running means."""

    hit_rate: float = 0.5
    first_rate: float = 0.5
    unasked_s: float = 0.0  # time of tokens of a lone request since the smallest draft's last step
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
        """A token had been guessed, or not: update `hit_rate`."""
        self.hit_rate += (float(guessed) - self.hit_rate) / HIT_MEMORY

    def is_due(self, position: int) -> bool:
        """Whether guesses after a position are worth making to learn from them."""
        return self._n_firsts < HIT_MEMORY or position % HIT_MEMORY == 0

    def settled(self, settled: Settled) -> None:
        for guesses, right in settled.drafted:
            first = guesses[0]
            self.judged(first.guessed_by, math.exp(first.log_prob), first is right)
            self._n_firsts += 1
            self.first_rate += (float(first is right) - self.first_rate) / min(self._n_firsts, HIT_MEMORY)
            self.met(right is not None)


LEAST_POWER, MOST_POWER = 0.3, 3.0  # of the power
POWER_MEMORY = 0.98  # the weight of a token after the next one
PRIOR = 20.0  # the weight of a power of 1, in squared nats; a guessed-at token weighs one to four
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


# -- pauses

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

SILENT_BELOW, RESUMED_ABOVE = 0.06, 0.15  # running means of the share of guessed-at tokens that had been guessed
SHORTEST, LONGEST = 4, 64  # roots without guesses before a try
LONGEST_TRY = 32  # roots of a try at most: the draft reads first what came meanwhile


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

N_WITH, N_WITHOUT = 12, 8  # tokens over which the one and the other is measured at least
N_SKIPPED = 2  # verdicts after a change that count for neither: runs of before are in flight
SURELY = 0.9  # guesses are tested unless a token takes less than this share of what it takes without, by estimate
LOSS = 1.03  # times as long as without guesses that a token may take with them
LEAST_REST, LONGEST_REST = 32, 1536  # tokens without guesses before a try: twice as many each time that they do not pay
SHARE_OF_TRIES = 0.02  # of the time, which trying guesses again may cost
MOST_LINES = 2  # for the user of one text: where guesses hardly matter the answer changes often
TRUSTED, TRUSTED_MOST = 256, 1024
"""Tokens for which the time without guesses holds once it was measured: twice as many each time that the next
measurement has the same answer."""


MayTry = Callable[[], bool]
TokenSeconds = Callable[[int], float]  # of a token without guesses after so many tokens, as known now; 0: unknown


@dataclass
class WithoutGuesses:
    """What a token takes without guesses, as it was last measured. Requests of one session share it."""

    age: int = 0  # tokens since the measurement
    _token_s: float = 0.0
    _n_before: int = 0  # tokens before the measured ones
    _did_pay: bool = True  # the answer of the last measurement
    _n_trusted: int = TRUSTED  # tokens for which the measurement holds

    @property
    def holds(self) -> bool:
        return self._token_s > 0 and self.age < self._n_trusted

    def seconds(self, estimate: TokenSeconds, n_before: int) -> float:
        """After so many tokens. Both estimates are today's: earlier ones knew other costs."""
        then_s = estimate(self._n_before)
        return self._token_s * (estimate(n_before) / then_s if then_s else 1.0)

    def measured(self, token_s: float, n_before: int) -> None:
        self._token_s, self._n_before, self.age = token_s, n_before, 0

    def answered(self, pays: bool) -> None:
        """A measurement said whether guesses pay."""
        self._n_trusted = min(2 * self._n_trusted, TRUSTED_MOST) if pays is self._did_pay else TRUSTED
        self._did_pay = pays


@dataclass
class SpeculationTrial:
    """Tries of one request whether guesses save time. `rests`: the next tokens are made without guesses."""

    without: WithoutGuesses = field(default_factory=WithoutGuesses)
    notices: PauseNotices = field(default_factory=PauseNotices)
    rests: bool = False
    _is_measuring: bool = False  # it rests only to be measured
    _n_notices: int = 0
    _with_s: float = 0.0  # of a token with guesses, a running mean
    _n_rest: int = 0  # tokens of the last rest
    _n_rest_left: int = 0  # tokens left of this rest
    _n_skipped: int = 0  # verdicts since the last switch that do not count
    _n_tokens: int = 0  # of the current measurement, and their time
    _tokens_s: float = 0.0

    def settled(
        self, n_tokens: int, seconds: float, estimate: TokenSeconds, n_before: int, may_try: MayTry = lambda: True
    ) -> str:
        """So many tokens of a lone request came after so many seconds, the next one after `n_before` tokens. `may_try`:
        asked when a rest is over, whether it may end now. Returns what the user should know, usually nothing."""
        self.without.age += n_tokens
        self._n_rest_left -= n_tokens
        if self._n_skipped < N_SKIPPED:
            self._n_skipped += 1
            return ""
        self._n_tokens, self._tokens_s = self._n_tokens + n_tokens, self._tokens_s + seconds
        if self._n_tokens < (N_WITHOUT if self.rests else N_WITH):
            return ""
        token_s = max(self._tokens_s / self._n_tokens, 1e-9)
        self._begin()
        if self.rests:
            self.without.measured(token_s, n_before)
            if self._is_measuring:
                return self._decide(self.without.seconds(estimate, n_before))
            if self._n_rest_left <= 0 and may_try():
                self._switch()
            return ""
        self._with_s = (self._with_s + token_s) / 2 if self._with_s else token_s
        if self.without.holds:
            return self._decide(self.without.seconds(estimate, n_before))
        if self._with_s < SURELY * estimate(n_before):
            return self._notice(True)
        self._is_measuring = True
        self._switch()
        return ""

    def _decide(self, without_s: float) -> str:
        loss = self._with_s / without_s
        pays = loss <= LOSS
        if self._is_measuring:
            self.without.answered(pays)
            self._is_measuring = False
        tries = int(N_WITH * (loss - 1) / SHARE_OF_TRIES)
        self._n_rest = 0 if pays else min(max(LEAST_REST, tries, 2 * self._n_rest), LONGEST_REST)
        self._n_rest_left = self._n_rest
        if self.rests == pays:
            self._switch()
        return self._notice(pays, f"{1 / self._with_s:.1f} tokens/s with them, {1 / without_s:.1f} without them")

    def _notice(self, pays: bool, figures: str = "") -> str:
        line = self.notices.of_time(not pays, figures) if self._n_notices < MOST_LINES else ""
        self._n_notices += bool(line)
        return line

    def _switch(self) -> None:
        self.rests, self._n_skipped = not self.rests, 0
        self._begin()

    def _begin(self) -> None:
        self._n_tokens, self._tokens_s = 0, 0.0
