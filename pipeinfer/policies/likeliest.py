"""Orders of nodes that policies share, the likeliest first; and runs of a lone stage, of which one request is alone.
Knows what guesses are worth, not when they are asked for.

On a lone stage a guess that does not go with the root can only go after its verdict, so a run of n rows is worth its
expected tokens over its time,

    rate(n) = (1 + Σ P(first n − 1 guesses)) / (run_s(n) + on_way_s)

The run of the best rate goes, once further draft steps cannot raise the rate."""

import math
from collections.abc import Callable
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from pipeinfer.core.policy import PolicyView
from pipeinfer.core.tree import LOOKED_UP, Node

SCORE = attrgetter("score")
IS_EXPANDED, WAS_LOOKED_UP = attrgetter("expanded"), attrgetter("looked_up")


def unsent_in_reach(context: PolicyView) -> list[Node]:
    """Unsent guesses in reach, parents before children."""
    root, end = context.tree.root, context.tree.root.position + context.depth_left
    return [node for node in context.tree.unsent() if node.position < end and node is not root]


def to_expand(context: PolicyView, n_rows: int, is_done: Callable[[Node], bool] = IS_EXPANDED) -> list[Node]:
    """The likeliest nodes that are not done, at most `n_rows`, after which guesses could be in a run of `n_rows`."""
    unsent = sorted((node.score for node in unsent_in_reach(context)), reverse=True)
    worst = unsent[n_rows - 1] if len(unsent) >= n_rows else -math.inf
    # children score no higher than their parent
    open_nodes = [
        node for node in context.tree.nodes if not is_done(node) and node.score > worst and context.may_branch(node)
    ]
    return sorted(open_nodes, key=SCORE, reverse=True)[:n_rows]


def to_refine(context: PolicyView, draft: int) -> list[Node]:
    """Nodes for a larger draft, the likeliest first: before all those after which nothing was sent, to be in time."""
    open_nodes = [node for node in context.tree.nodes if node.is_open(draft) and context.may_branch(node)]
    return sorted(open_nodes, key=lambda node: (any(child.run_id for child in node.children), -node.score))


def chance(context: PolicyView, score: float) -> float:
    """P of a node with this score. The root's score is that of all guesses above it, and may be too low for `exp`."""
    return math.exp(score - context.tree.root.score)


# -- a lone stage

MOST_ROWS = 8  # rows of a lone stage's run, unless more are cheap
IDLE_SHARE = 0.05  # of a one-row run a lone stage may be idle: a run after the verdict has better guesses
LEAST_AHEAD = 0.25  # probability of its first guess from which a lone stage's run goes ahead of the verdict


class ExpectedRun(NamedTuple):
    """Expected tokens of a run, its rows, and seconds until the next run can start."""

    tokens: float
    n_rows: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def grows(self, context: PolicyView, hit: float, left_s: float, first_rate: float) -> bool:
        """Whether waiting raises the rate: for one more guess, right with probability `hit` and made in `left_s`
        seconds, or for those of further draft steps, each right at `first_rate` if the one before is."""
        tokens = self.tokens
        for n_rows in range(self.n_rows + 1, most_rows(context) + 1):
            tokens += hit
            if tokens > self.rate * (round_s(context, n_rows) + left_s):
                return hit > 0
            hit, left_s = hit * first_rate, left_s + context.draft_s
        return False


def best_run(context: PolicyView) -> tuple[list[Node], ExpectedRun]:
    """The root and as many of the likeliest unsent guesses as give the best rate."""
    root = context.tree.root
    nodes = context.fitting([root, *likeliest(context)]) or [root]
    best, tokens = ExpectedRun(1.0, 1, round_s(context, 1)), 1.0
    for n_rows, node in enumerate(nodes[1 : most_rows(context)], start=2):
        tokens += chance(context, node.score)
        best = max(best, ExpectedRun(tokens, n_rows, round_s(context, n_rows)), key=lambda each: each.rate)
    return nodes[: best.n_rows], best


def best_ahead(context: PolicyView) -> list[Node]:
    """As many of the likeliest unsent guesses as give the best rate; none if the first is so unlikely that its run
    would usually delay the next root's."""
    nodes = context.fitting(likeliest(context))
    if not nodes or chance(context, nodes[0].score) < LEAST_AHEAD:
        return []
    tokens = list(accumulate(chance(context, node.score) for node in nodes))
    return nodes[: max(range(1, len(nodes) + 1), key=lambda n_rows: tokens[n_rows - 1] / context.run_s(n_rows))]


def pays_ahead(context: PolicyView) -> bool:
    """Whether the stage would be idle for long if the next run waited for a verdict, and the draft makes guesses for
    further runs as fast as rows are evaluated."""
    guesses_keep_up = context.draft_s * MOST_ROWS <= context.run_s(MOST_ROWS)
    return not context.is_at_head and guesses_keep_up and context.on_way_s > IDLE_SHARE * context.run_s(1)


def pays_alone(context: PolicyView, first_rate: float) -> bool:
    """Whether the request is alone on one stage and runs of several rows pay there, or guesses were looked up for one:
    then the next run waits for the verdict of the one in flight, unless `pays_ahead`. Single rows go before it, which
    hides what a verdict takes beside the evaluation."""
    if context.n_stages > 1 or not context.is_alone or not context.run_s(1):
        return False
    looked_up = any(node.guessed_by == LOOKED_UP for node in unsent_in_reach(context))
    return looked_up or saved_share(context, first_rate) > 0


def saved_share(context: PolicyView, first_rate: float) -> float:
    """The share of a token's time that guesses save at best if runs wait for verdicts, each right at `first_rate` if
    the one before is; 0 where they save none."""
    if not context.run_s(1):
        return 0.0
    is_hidden = context.n_stages == 1 and not context.is_at_head  # what a verdict takes, and a step of the draft
    single_s, ahead_s = (context.run_s(1), context.draft_s) if is_hidden else (round_s(context, 1), 0.0)
    token_s, tokens, hit = single_s, 1.0, 1.0
    for n_guesses in range(1, most_rows(context)):
        hit *= first_rate
        tokens += hit
        token_s = min(token_s, (round_s(context, 1 + n_guesses) + n_guesses * context.draft_s - ahead_s) / tokens)
    return 1 - token_s / single_s


def to_expand_ahead(context: PolicyView, first_rate: float) -> list[Node]:
    """The likeliest open nodes, one for each cheap row, after which guesses may pay in the next run."""
    nodes = to_expand(context, most_rows(context))[: context.n_cheap_rows]
    return [node for node in nodes if may_pay(context, node, first_rate)]


def may_pay(context: PolicyView, node: Node, first_rate: float) -> bool:
    """Whether a guess after the node is at least as probable as the share of a one-row run that its row costs at best.
    Its run starts with the uppermost unsent ancestor."""
    first = node
    while first.run_id is None and first.parent is not None and first.parent.run_id is None:
        first = first.parent
    n_above = node.position + 1 - first.position
    row_s, above_s = context.run_s(1), context.run_s(n_above)
    further = range(n_above + 1, max(most_rows(context), n_above + 1) + 1)
    least = min((context.run_s(n_rows) - above_s) / (n_rows - n_above) for n_rows in further)
    return math.exp(node.score - first.score) * first_rate * row_s >= least


def likeliest(context: PolicyView) -> list[Node]:
    return sorted(unsent_in_reach(context), key=SCORE, reverse=True)[: most_rows(context)]


def round_s(context: PolicyView, n_rows: int) -> float:
    """Seconds from a run of `n_rows` to the next one that waits for its verdict."""
    return context.run_s(n_rows) + context.on_way_s


def most_rows(context: PolicyView) -> int:
    return max(MOST_ROWS, context.n_cheap_rows)
