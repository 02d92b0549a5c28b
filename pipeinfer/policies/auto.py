"""Speculation without a choice by the user: as many guesses a run as cost next to nothing, those first that save most.

The objective is the time that verdicts are waited for. A token that was not on its way when its turn came costs the
time of a whole verdict; one that was costs its run's share of the slowest stage. So a run shall go whenever a stage is
about to want one, and shall carry what saves the most. What is estimated, and how:

* P(node), that the target will choose it and all guesses above it: the product of the drafts' confidences along its
  path, each corrected by how such guesses fared so far (`Sharpness`, `Confidence`).
* r(node), what sending it now can save at most: if it is not sent, it goes out as the root when the verdict of its
  nearest sent ancestor comes. `View.verdict_in_s` has how long that still takes, as verdicts have taken so far.
* c(n), what a run of n rows takes the slowest stage after this context, as timed at loading and observed since
  (`RunCost`). Rows are taken up to CHEAP times the time of one, here: `View.n_cheap_rows`. Further rows delay the run
  at every stage and pay only if they would never get a run of their own; in simulations of the shipped profiles they
  did not. Where memory bandwidth is the limit, as on GPUs, that makes wide trees; where arithmetic is, single chains;
  where other requests want the pipeline it is what their roots leave, down to nothing.

A run therefore carries the n_cheap_rows of the largest P(node) r(node). It goes as late as the slowest stage allows,
and up to PATIENCE of a run later if a verdict will be there by then (`Pacer`): it says what is needed. If the draft is
at work on better guesses than the run would carry, it waits for them if that is worth the time that the stage may lose:
P(best) × what is left of the draft's step < EARLIER × a one-row run × what P is won. So does a root with nothing in
flight behind it, also for a step that is yet to begin. If the draft guesses faster than runs can carry, each guess that
goes with the root is won; else the next run takes it as well, and only one after which no other is right is won:
P (1 - P). The draft expands as many nodes as a run carries in a step, the likeliest first, if their guesses could
belong to the next run. When hardly any guess is right, there are none (`Silence`). PipeInfer's, PipeDec's and
FlowSpec's trees are what comes of this at their authors' costs. A single stage that works for a single request has no
other requests and stages to think of: there a run is worth its tokens by its time (`lone_stage`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pipeinfer.core.policy import Policy, View
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled
from pipeinfer.policies.confidence import Confidence
from pipeinfer.policies.likeliest import to_expand, to_refine, unsent_in_reach
from pipeinfer.policies.limits import MAX_WIDTH
from pipeinfer.policies.lone_stage import best_ahead, best_run, pays_ahead, pays_alone, to_expand_ahead
from pipeinfer.policies.sharpness import Sharpness
from pipeinfer.policies.silence import Silence

LEAST = 0.01
"""A guess that is less probable does not enter the tree."""

PATIENCE = 0.2
"""One-row runs for which the slowest stage may wait for a verdict that is expected: it says what is needed."""

EARLIER = 0.5
"""One-row runs that a guess gains which goes with this run and not with the next one. Not a whole one: a verdict
between the two may refute it."""

N_BEHIND = 4
"""Tokens that the draft reads in no time before it guesses again."""

SOON_S = 1e-9
"""How long a verdict that is overdue still takes: guesses below it come last, and in their order."""


@dataclass(unsafe_hash=True)  # it has no settings
class Auto(Policy):
    """Requests of one session share what was learned of the drafts."""

    name: ClassVar[str] = "auto"
    n_seq: ClassVar[int] = 127
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")

    confidence: Confidence = field(default_factory=Confidence, compare=False, repr=False)
    sharpness: Sharpness = field(default_factory=Sharpness, compare=False, repr=False)
    _silence: Silence = field(default_factory=Silence, init=False, repr=False, compare=False)
    _guessed_at: int = field(default=-1, init=False, repr=False, compare=False)
    """The last position after which the draft has guessed."""

    def begin(self) -> Auto:
        return replace(self)

    # -- sending

    def send(self, view: View) -> list[Node]:
        """The root at once, and with it what is known to follow; further runs when a stage is about to want them."""
        root = view.tree.root
        if pays_alone(view, self.confidence.first_rate):
            return self._send_all(view)
        if root.run_id is None:
            best = self._best(view, view.n_cheap_rows, [root]) or [root]  # room for it is made
            return [] if self._awaits_first(view, best) else best
        if view.n_inflight and self._is_busy(view):
            return []
        best = self._best(view, view.n_cheap_rows)
        return [] if best and view.n_inflight and self._awaits_draft(view, best) else best

    @staticmethod
    def _is_busy(view: View) -> bool:
        """Whether the slowest stage has enough to do: one run a stage is under way, more where messages take longer
        than a run, and one more waits; or it is not yet about to want another."""
        run_s = view.run_s(1)
        n_under_way = max(view.n_stages, math.ceil(view.on_way_s() / run_s)) if run_s else view.n_stages
        return view.n_inflight > n_under_way or view.hold(PATIENCE)

    def _send_all(self, view: View) -> list[Node]:
        """All that pays with the root, when the draft can add no more that is worth the wait; and likewise behind it,
        where the stage would be idle for long until a verdict is here."""
        if view.n_inflight:
            is_wanted = view.tree.root.run_id is not None and pays_ahead(view) and not self._is_busy(view)
            return best_ahead(view) if is_wanted else []
        best, promise = best_run(view)
        nodes, left_s = self._next_guesses(view) if self._is_caught_up(view) else ((), 0.0)
        scores = [node.score for node in nodes if node.live]
        first_rate = self.confidence.first_rate
        hit = math.exp(max(scores) - view.tree.root.score) * first_rate if scores else 0.0
        return [] if promise.grows(view, hit, left_s, first_rate) else best

    def _awaits_first(self, view: View, best: list[Node]) -> bool:
        """As `_awaits_draft`, of a root behind which nothing is in flight that the stages could go on with; also for a
        step that the draft has yet to begin, unless it has to read more than a few tokens first, or others want it."""
        if not view.is_alone() or not self._is_caught_up(view):
            return False
        nodes, left_s = self._next_guesses(view)
        gained = self._gained(view, best, nodes) / math.exp(view.tree.root.score)
        if gained and view.run_s(1) < view.n_cheap_rows * view.draft_s():
            gained *= 1 - gained
        return gained > 0 and EARLIER * view.run_s(1) * gained > left_s

    def _is_caught_up(self, view: View) -> bool:
        return view.is_at_head or self._guessed_at >= view.tree.root.position - N_BEHIND

    def _next_guesses(self, view: View) -> tuple[Collection[Node], float]:
        """After which nodes the next ones come, and when."""
        nodes, left_s = view.drafting()
        return (nodes, left_s) if any(node.live for node in nodes) else (self.draft(view), view.draft_s())

    def _awaits_draft(self, view: View, best: list[Node]) -> bool:
        """Whether what the draft is about to guess saves more than the slowest stage loses that waits for it."""
        nodes, left_s = view.drafting()
        gained = self._gained(view, best, nodes)
        return gained > 0 and EARLIER * view.run_s(1) * gained > left_s * math.exp(best[0].score)

    def _gained(self, view: View, best: list[Node], nodes: Collection[Node]) -> float:
        """P of the best guess that the draft makes after one of the nodes, less that of the one whose place it takes;
        0 if it makes none."""
        scores = [node.score for node in nodes if node.live]
        if not scores:
            return 0.0
        promised = math.exp(max(scores)) * self.confidence.hit_rate
        return promised - (math.exp(best[-1].score) if len(best) == view.n_cheap_rows else 0.0)

    @staticmethod
    def _best(view: View, n_rows: int, first: Sequence[Node] = ()) -> list[Node]:
        """`first`, and unsent guesses that save the most; a child saves no more than its parent, and comes after it."""
        if n_rows <= len(first):
            return list(first)
        unsent = unsent_in_reach(view)
        if len(unsent) > n_rows - len(first):
            saved_s = _saved_s(view, unsent)
            unsent.sort(key=saved_s.__getitem__, reverse=True)
        return view.fitting([*first, *unsent[: 2 * n_rows]])[:n_rows]

    # -- drafting

    def draft(self, view: View) -> dict[Node, int]:
        """The likeliest open nodes, if guesses after them could belong to the next run."""
        n_rows = view.n_cheap_rows
        if n_rows <= 0 or self._silence.holds:
            return {}
        if view.is_at_head and view.is_alone() and view.n_inflight:
            return self._lesson(view)  # the run waits for it now: where guesses gain it has waited for them before
        first_rate = self.confidence.first_rate
        nodes = to_expand_ahead(view, first_rate) if pays_alone(view, first_rate) else to_expand(view, n_rows)
        return dict.fromkeys(nodes, MAX_WIDTH)

    def _lesson(self, view: View) -> dict[Node, int]:
        """A step for what is learned of it alone, now and then."""
        root = view.tree.root
        is_due = self.confidence.is_due(root.position) and not root.expanded and view.may_branch(root)
        return {root: MAX_WIDTH} if is_due else {}

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        if not draft:
            self._guessed_at = max(self._guessed_at, node.position)
        corrected = self.confidence.corrected(self.sharpness.sharpened(guesses, draft), draft)
        return [guess for guess in corrected if guess.probability >= LEAST]

    def refine(self, view: View, draft: int) -> dict[Node, int]:
        return {} if self._silence.holds else dict.fromkeys(to_refine(view, draft), MAX_WIDTH)

    # -- learning

    def settled(self, settled: Settled) -> str:
        self.confidence.settled(settled)
        self.sharpness.settled(settled)
        return self._silence.settled(settled, self.confidence.hit_rate)


def _saved_s(view: View, nodes: list[Node]) -> dict[Node, float]:
    """P(node) r(node) of unsent nodes, parents before children, in seconds; in any unit before the first verdict."""
    left_s: dict[Node, float] = {}
    for node in nodes:
        above = node.parent
        assert above
        if above not in left_s:
            left_s[above] = view.verdict_in_s(above) or SOON_S
        left_s[node] = left_s[above]
    return {node: math.exp(node.score) * left_s[node] for node in nodes}
