"""What one run carries where it is all that there is: a single stage, a single request. Knows the tree and costs.

A guess that does not go with the root can only go with the next one, after its verdict. So a run is as good as the
tokens that are expected of it are many for its time, and for that in which its verdict is on its way; and what a row
costs may be less than the row before it, where kernels for a single row are faster than those for a few.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from pipeinfer.core.policy import View
from pipeinfer.core.tree import Node
from pipeinfer.policies.likeliest import SCORE, to_expand, unsent_in_reach

MOST_ROWS = 8
"""Unless more cost hardly more than one."""

IDLE_SHARE = 0.05
"""Of a one-row run. Who waits knows more: where verdicts are here at once every row can count."""

LEAST_AHEAD = 0.25
"""Probability, given what is in flight."""


class Promise(NamedTuple):
    """Tokens expected of a run of so many rows, and what it takes until the next one can begin."""

    tokens: float
    n_rows: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def grows(self, view: View, hit: float, left_s: float, first_rate: float) -> bool:
        """Whether it is worth the wait for a further guess, `hit` likely, which is there in `left_s`, or for as many as
        there would be after further steps of the draft, each right at `first_rate` where the one before is."""
        tokens = self.tokens
        for n_rows in range(self.n_rows + 1, _most_rows(view) + 1):
            tokens += hit
            if tokens > self.rate * (_round_s(view, n_rows) + left_s):
                return hit > 0
            hit, left_s = hit * first_rate, left_s + view.draft_s()
        return False


def best_run(view: View) -> tuple[list[Node], Promise]:
    """The root, and of the likeliest unsent guesses as many as make the most tokens a second."""
    root = view.tree.root
    guesses = sorted(unsent_in_reach(view), key=SCORE, reverse=True)[: _most_rows(view)]
    nodes = view.fitting([root, *guesses]) or [root]
    best, tokens = Promise(1.0, 1, _round_s(view, 1)), 1.0
    for n_rows, node in enumerate(nodes[1 : _most_rows(view)], start=2):
        tokens += math.exp(node.score - root.score)
        best = max(best, Promise(tokens, n_rows, _round_s(view, n_rows)), key=lambda each: each.rate)
    return nodes[: best.n_rows], best


def best_ahead(view: View) -> list[Node]:
    """Of the likeliest guesses below what is sent as many as make the most tokens a second; none where the first is so
    unlikely that its run would most often only be in the way of the next root's."""
    guesses = sorted(unsent_in_reach(view), key=SCORE, reverse=True)[: _most_rows(view)]
    nodes, root = view.fitting(guesses), view.tree.root
    if not nodes or math.exp(nodes[0].score - root.score) < LEAST_AHEAD:
        return []
    tokens = list(accumulate(math.exp(node.score - root.score) for node in nodes))
    return nodes[: max(range(1, len(nodes) + 1), key=lambda n_rows: tokens[n_rows - 1] / view.run_s(n_rows))]


def pays_ahead(view: View) -> bool:
    """Whether the stage would be idle for long if the next run waited for a verdict, and the draft guesses as fast as
    rows are evaluated: else it has no guesses for further runs, and sending those keeps it from making them."""
    guesses_keep_up = view.draft_s() * MOST_ROWS <= view.run_s(MOST_ROWS)
    return not view.is_at_head and guesses_keep_up and view.on_way_s() > IDLE_SHARE * view.run_s(1)


def pays_alone(view: View, first_rate: float) -> bool:
    """Whether a run is all that there is, and runs of several rows pay: then the next one better waits for the verdict
    of the one in flight, after which all its rows count, unless `pays_ahead`. Where single rows are better they go
    before it, which hides what a verdict takes besides the evaluation, but for guesses that were wrong."""
    if view.n_stages > 1 or not view.is_alone() or not view.run_s(1):
        return False
    single_s = _round_s(view, 1) if view.is_at_head else view.run_s(1)
    return Promise(1.0, 1, single_s).grows(view, first_rate, 0.0, first_rate)


def _round_s(view: View, n_rows: int) -> float:
    """From one run of so many rows to the next one that waits for its verdict."""
    return view.run_s(n_rows) + view.on_way_s()


def to_expand_ahead(view: View, first_rate: float) -> list[Node]:
    """The likeliest open nodes, as many as rows are cheap, after which guesses could pay in the next run."""
    nodes = to_expand(view, _most_rows(view))[: view.n_cheap_rows]
    return [node for node in nodes if _may_pay(view, node, first_rate)]


def _may_pay(view: View, node: Node, first_rate: float) -> bool:
    """Whether a guess after the node is likelier than what a row costs there is of a run, at best. The run begins with
    the uppermost of the nodes above it that was not sent."""
    first = node
    while first.run_id is None and first.parent is not None and first.parent.run_id is None:
        first = first.parent
    n_above = node.position + 1 - first.position
    row_s, above_s = view.run_s(1), view.run_s(n_above)
    further = range(n_above + 1, max(_most_rows(view), n_above + 1) + 1)
    least = min((view.run_s(n_rows) - above_s) / (n_rows - n_above) for n_rows in further)
    return math.exp(node.score - first.score) * first_rate * row_s >= least


def _most_rows(view: View) -> int:
    return max(MOST_ROWS, view.n_cheap_rows)
