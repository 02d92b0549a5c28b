"""The policy without settings: each run carries the guesses that save the most time, as measured here.

Guesses n that could go with the next run are ranked by

    saved(n) = P(n) · r(n)

P(n) is the probability that the target chooses n and all guesses above it: the product of the drafts' probabilities
along its path, each corrected by how such guesses fared (`TemperatureScaling`, `Calibration`). r(n) is the time until
the verdict of its nearest sent ancestor: a guess that is not sent now goes out after that verdict, as the root.

Pipeline (several stages, or several requests). A run carries the n_cheap_rows guesses of the largest saved(n): rows up
to CHEAP times the cost of one (`RunCost`), less what other requests' roots take. Further rows delay every stage and did
not pay in simulations of the shipped profiles. A run goes as late as the slowest stage allows, and up to PATIENCE of a
one-row run later if a verdict is there by then. It waits for a draft step that ends in t seconds while

    EARLIER · run_s(1) · (P(best new guess) − P(guess it replaces)) > t · P(best guess of the run)

A lone stage, of which one request is alone, has runs of its own: see `likeliest`.

In a step the draft expands as many nodes as a run carries, the likeliest first, if guesses after them could go with the
next run. A pipeline's draft starts none of t seconds while the next verdict is nearer than t · (1 − P(one of the nodes
outlives it)): the step after that verdict would be late by more than is gained. It rests when hardly any guess is right
(`SpeculationBackoff`) or guesses cost time (`SpeculationTrial`). What is looked up takes no time and stands in the tree
before the draft is asked; it rests only where it is all there is."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from pipeinfer.core.policy import NOTHING, Answer, AwaitDraft, Policy, PolicyView, Send
from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import MAX_WIDTH
from pipeinfer.core.tree import LOOKED_UP, Node, Settled
from pipeinfer.policies.learning import (
    Calibration,
    PauseNotices,
    SpeculationBackoff,
    SpeculationTrial,
    TemperatureScaling,
    WithoutGuesses,
)
from pipeinfer.policies.likeliest import (
    WAS_LOOKED_UP,
    best_ahead,
    best_run,
    chance,
    most_rows,
    pays_ahead,
    pays_alone,
    round_s,
    saved_share,
    to_expand,
    to_expand_ahead,
    to_refine,
    unsent_in_reach,
)

LEAST, LEAST_LOOKED_UP = 0.003, 0.06  # less probable guesses do not enter the tree
PATIENCE = 0.2  # one-row runs for which the slowest stage may wait for an expected verdict
EARLIER = 0.3  # one-row runs that a guess gains in this run instead of the next: a verdict between may refute it
N_BEHIND = 4  # tokens that the draft reads at no cost before it guesses again
OFTEN_RIGHT, REPAID, SPENT = 0.9, 0.5, 0.02
"""How often a good draft's likeliest guess is right; the share of what that would save of the rest of a text which a
step to learn it may cost; and that of the time since a step: what is known of the draft's time may be wrong by now."""

READ_AT_ONCE = 8  # tokens that a draft reads in the time of a step, at least


@dataclass(unsafe_hash=True)  # it has no settings
class Auto(Policy):
    """Requests of one session share what is learned of the drafts, and of tokens without guesses."""

    name: ClassVar[str] = "auto"
    n_seq: ClassVar[int] = 127
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")
    looks_up: ClassVar[bool] = True

    calibration: Calibration = field(default_factory=Calibration, compare=False, repr=False)
    temperature: TemperatureScaling = field(default_factory=TemperatureScaling, compare=False, repr=False)
    without: WithoutGuesses = field(default_factory=WithoutGuesses, compare=False, repr=False)
    notices: PauseNotices = field(default_factory=PauseNotices, compare=False, repr=False)
    _backoff: SpeculationBackoff = field(init=False, repr=False, compare=False)
    _trial: SpeculationTrial = field(init=False, repr=False, compare=False)
    # time of the last tokens; NaN before the first ones, and while other requests are open
    _settled_s: float = field(default=math.nan, init=False, repr=False, compare=False)
    _last_drafted: int = field(default=-1, init=False, repr=False, compare=False)  # the last position drafted after
    # the last position whose token may come of guesses that were sent before the rest began
    _guesses_end: int = field(default=-1, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._backoff, self._trial = SpeculationBackoff(self.notices), SpeculationTrial(self.without, self.notices)

    def begin(self) -> "Auto":
        return replace(self)

    # -- sending

    def send(self, context: PolicyView) -> Answer:
        """The root at once, with the best guesses; further runs when a stage is about to want them."""
        root = context.tree.root
        if self._all_guesses_rest(context):
            return Send([root]) if root.run_id is None else NOTHING
        if pays_alone(context, self.calibration.first_rate):
            return self._send_alone(context)
        if root.run_id is None:
            best = _best(context, context.n_cheap_rows, [root]) or [root]  # room for it is made
            return AwaitDraft(root) if self._awaits_first(context, best) else Send(best)
        if context.n_inflight and (busy := _busy(context)):
            return busy
        best = _best(context, context.n_cheap_rows)
        waits = best and context.n_inflight and self._awaits_draft(context, best)
        return AwaitDraft(best[0]) if waits else Send(best)

    def _send_alone(self, context: PolicyView) -> Answer:
        """The run of the best rate, once the draft cannot raise it; then runs ahead of its verdict, if the stage would
        be idle for long."""
        root = context.tree.root
        if context.n_inflight:
            if root.run_id is None or not pays_ahead(context):
                return NOTHING
            return _busy(context) or Send(best_ahead(context))
        best, expected = best_run(context)
        nodes, left_s = self._next_guesses(context) if self._is_caught_up(context) else ((), 0.0)
        scores = [node.score for node in nodes if node.live]
        first_rate = self.calibration.first_rate
        hit = chance(context, max(scores)) * first_rate if scores else 0.0
        return AwaitDraft(root) if expected.grows(context, hit, left_s, first_rate) else Send(best)

    def _awaits_first(self, context: PolicyView, best: list[Node]) -> bool:
        """As `_awaits_draft`, for an unsent root. A step that the draft has yet to start counts too, unless other
        requests are open or it has to read more than a few tokens first. Where the draft guesses faster than runs can
        carry guesses, a guess goes with the next run instead, so a wait gains it only if no guess after it is right: P
        (1 − P)."""
        if not context.is_alone or not self._is_caught_up(context):
            return False
        nodes, left_s = self._next_guesses(context)
        gained = self._gained(context, best, nodes)
        if gained and context.run_s(1) < context.n_cheap_rows * context.draft_s:
            gained *= 1 - gained
        return gained > 0 and EARLIER * context.run_s(1) * gained > left_s

    def _awaits_draft(self, context: PolicyView, best: list[Node]) -> bool:
        """Whether the draft's next guess saves more than the slowest stage loses by waiting."""
        nodes, left_s = context.drafting
        gained = self._gained(context, best, nodes)
        return gained > 0 and EARLIER * context.run_s(1) * gained > left_s * chance(context, best[0].score)

    def _gained(self, context: PolicyView, best: list[Node], nodes: Collection[Node]) -> float:
        """P of the best new guess after one of the nodes, less P of the guess it replaces; 0 without live nodes."""
        scores = [node.score for node in nodes if node.live]
        if not scores:
            return 0.0
        expected = chance(context, max(scores)) * self.calibration.hit_rate
        return expected - (chance(context, best[-1].score) if len(best) == context.n_cheap_rows else 0.0)

    def _next_guesses(self, context: PolicyView) -> tuple[Collection[Node], float]:
        """The nodes after which the next guesses come, and in how many seconds."""
        nodes, left_s = context.drafting
        return (nodes, left_s) if any(node.live for node in nodes) else (self.draft(context), context.draft_s)

    def _is_caught_up(self, context: PolicyView) -> bool:
        return context.is_at_head or self._last_drafted >= context.tree.root.position - N_BEHIND

    # -- drafting

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """The likeliest open nodes, if guesses after them could belong to the next run."""
        n_rows = context.n_cheap_rows
        if n_rows <= 0 or self._backoff.holds or self._draft_rests(context):
            return {}
        if context.is_at_head and context.is_alone and context.n_inflight:
            return self._probe(context)  # the run has to wait for the step
        first_rate = self.calibration.first_rate
        is_lone = pays_alone(context, first_rate)
        nodes = to_expand_ahead(context, first_rate) if is_lone else to_expand(context, n_rows)
        waits = not is_lone and context.is_alone and _awaits_verdict(context, nodes)
        return {} if waits else dict.fromkeys(nodes, MAX_WIDTH)

    def _probe(self, context: PolicyView) -> dict[Node, int]:
        """An occasional step, to learn how often the draft is right and how long a step takes."""
        root = context.tree.root
        if context.draft_s and not self._may_repay(context):
            return {}
        is_due = self.calibration.is_due(root.position) and not root.expanded and context.may_branch(root)
        return {root: MAX_WIDTH} if is_due else {}

    def _may_repay(self, context: PolicyView) -> bool:
        """Whether a good draft would save enough of the rest of the text for a step, before which this one reads on, or
        such a step is short against the time since the last one."""
        n_unread = context.tree.root.position - max(self._last_drafted, 0)
        step_s = context.draft_s * (1 + n_unread / READ_AT_ONCE)
        rest_s = context.depth_left * round_s(context, 1)
        saved_s = REPAID * saved_share(context, OFTEN_RIGHT) * rest_s
        return step_s < max(saved_s, SPENT * self.calibration.unasked_s)

    def look_up(self, context: PolicyView) -> list[Node]:
        if self._all_guesses_rest(context):
            return []
        n_rows = most_rows(context) if context.n_stages == 1 and context.is_alone else context.n_cheap_rows
        return to_expand(context, n_rows, WAS_LOOKED_UP) if n_rows > 0 else []

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        if draft == LOOKED_UP:
            return [guess for guess in guesses if guess.probability >= LEAST_LOOKED_UP]
        if not draft:
            if self._last_drafted >= 0:  # a request's first step also reads its prompt, and is not timed
                self.calibration.unasked_s = 0.0
            self._last_drafted = max(self._last_drafted, node.position)
        corrected = self.calibration.corrected(self.temperature.scaled(guesses, draft), draft)
        return [guess for guess in corrected if guess.probability >= LEAST]

    def refine(self, context: PolicyView, draft: int) -> dict[Node, int]:
        rests = self._backoff.holds or self._draft_rests(context)
        return {} if rests else dict.fromkeys(to_refine(context, draft), MAX_WIDTH)

    # -- learning

    def settled(self, settled: Settled, context: PolicyView) -> str:
        self.calibration.settled(settled)
        self.temperature.settled(settled)
        return self._backoff.settled(settled, self.calibration.hit_rate) or self._weighed(settled, context)

    def _weighed(self, settled: Settled, context: PolicyView) -> str:
        """Give the trial the time of new tokens; returns its notice. Without a draft a token that no guess was sent for
        takes the same time in either case."""
        last_s, self._settled_s = self._settled_s, context.clock() if context.is_alone else math.nan
        if self._settled_s > last_s:
            self.calibration.unasked_s += self._settled_s - last_s
        if math.isnan(last_s) or not context.is_alone or (self._backoff.holds and not self._trial.rests):
            return ""
        if self._trial.rests and context.tree.root.position <= self._guesses_end:
            return ""
        rested = self._trial.rests
        if not rested and self._last_drafted < 0 and not _has_guesses(settled, context):
            return ""
        position, token_s = context.tree.root.position, self._settled_s - last_s

        def may_try() -> bool:
            return self._last_drafted < 0 or self._may_repay(context)

        line = self._trial.settled(len(settled.tokens), token_s, partial(_least_s, context), position, may_try)
        if self._trial.rests > rested:
            sent = (node.position for node in context.tree.nodes if node.run_id is not None)
            self._guesses_end = 1 + max(sent, default=position)
        return line

    def _draft_rests(self, context: PolicyView) -> bool:
        """Whether the draft makes no guesses, as they cost more time than they save."""
        return self._trial.rests and context.is_alone

    def _all_guesses_rest(self, context: PolicyView) -> bool:
        """Whether looked-up guesses rest too: they go on while a draft rests, and rest where there is no draft."""
        return self._last_drafted < 0 and self._draft_rests(context)


def _has_guesses(settled: Settled, context: PolicyView) -> bool:
    """Whether guesses were sent for the settled tokens, or are under way."""
    judged = (guess for guesses, _ in settled.contests for guess in guesses)
    open_guesses = (node for node in context.tree.nodes if node is not context.tree.root)
    return any(guess.run_id is not None for guess in (*judged, *open_guesses))


# -- a pipeline's run


def _best(context: PolicyView, n_rows: int, first: Sequence[Node] = ()) -> list[Node]:
    """`first`, and the unsent guesses that save the most; a child saves no more than its parent."""
    if n_rows <= len(first):
        return list(first)
    unsent = unsent_in_reach(context)
    if len(unsent) > n_rows - len(first):
        saved_s = _saved_s(context, unsent)
        unsent.sort(key=saved_s.__getitem__, reverse=True)
    return context.fitting([*first, *unsent[: 2 * n_rows]])[:n_rows]


def _saved_s(context: PolicyView, nodes: Sequence[Node]) -> dict[Node, float]:
    """saved(n) of unsent nodes, parents before children, in seconds; in any unit before the first verdict."""
    left_s: dict[Node, float] = {}
    for node in nodes:
        above = node.parent
        assert above
        if above not in left_s:
            left_s[above] = context.verdict_in_s(above) or 1e-9  # overdue: its guesses come last
        left_s[node] = left_s[above]
    return {node: chance(context, node.score) * left_s[node] for node in nodes}


def _awaits_verdict(context: PolicyView, nodes: Sequence[Node]) -> bool:
    """Whether a draft step for the nodes is worth less now than one after the next verdict."""
    root = context.tree.root
    left_s = context.verdict_in_s(root) if root.run_id is not None else 0.0
    return 0 < left_s < context.draft_s and left_s < context.draft_s * (1 - _outlive(context, nodes))


def _outlive(context: PolicyView, nodes: Sequence[Node]) -> float:
    """P that the verdict of the root's run leaves one of the nodes a use."""
    decided, survivors = context.tree.root.run_id, set[Node]()
    for node in nodes:
        if node.run_id != decided:
            while node.parent and node.parent.run_id != decided:
                node = node.parent
            survivors.add(node)
    return sum(chance(context, node.score) for node in survivors)


def _busy(context: PolicyView) -> Answer | None:
    """The answer while no further run should go: each stage has one, more are under way where messages take longer than
    a run, and one waits; or it is too early. None if a run should go."""
    run_s = context.run_s(1)
    n_under_way = max(context.n_stages, math.ceil(context.on_way_s / run_s)) if run_s else context.n_stages
    return NOTHING if context.n_inflight > n_under_way else context.early(PATIENCE)


def _least_s(context: PolicyView, n_before: int) -> float:
    """What a token takes without guesses at least, after so many tokens: all stages by themselves, and the messages."""
    messages_s = max(0.0, context.on_way_s - (context.n_stages - 1) * context.run_s(1))
    return context.n_stages * context.undisturbed_s(n_before) + messages_s
