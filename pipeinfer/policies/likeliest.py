"""Orders of nodes that policies share: the likeliest first. Knows the tree."""

import math
from collections.abc import Callable
from operator import attrgetter

from pipeinfer.core.policy import PolicyView
from pipeinfer.core.tree import Node

SCORE = attrgetter("score")
IS_EXPANDED, WAS_LOOKED_UP = attrgetter("expanded"), attrgetter("looked_up")


def unsent_in_reach(context: PolicyView) -> list[Node]:
    """Unsent guesses in reach, parents before children."""
    root, end = context.tree.root, context.tree.root.position + context.depth_left
    return [node for node in context.tree.unsent() if node.position < end and node is not root]


def to_expand(context: PolicyView, n_rows: int) -> list[Node]:
    """The likeliest open nodes, at most `n_rows`, after which guesses could be in the next run of `n_rows`."""
    return _worth_growing(context, n_rows, IS_EXPANDED)


def to_look_up(context: PolicyView, n_rows: int) -> list[Node]:
    """As `to_expand`, where nothing was looked up."""
    return _worth_growing(context, n_rows, WAS_LOOKED_UP)


def _worth_growing(context: PolicyView, n_rows: int, is_done: Callable[[Node], bool]) -> list[Node]:
    unsent = sorted((node.score for node in unsent_in_reach(context)), reverse=True)
    worst = unsent[n_rows - 1] if len(unsent) >= n_rows else -math.inf
    # children score no higher than their parent
    open_nodes = [
        node for node in context.tree.nodes if not is_done(node) and node.score > worst and context.may_branch(node)
    ]
    return sorted(open_nodes, key=SCORE, reverse=True)[:n_rows]


def to_refine(context: PolicyView, draft: int) -> list[Node]:
    """Nodes for a larger draft: first those after which nothing was sent, so that its guesses are in time; the
    likeliest first."""
    open_nodes = [node for node in context.tree.nodes if node.is_open(draft) and context.may_branch(node)]
    return sorted(open_nodes, key=lambda node: (any(child.run_id for child in node.children), -node.score))


def chance(context: PolicyView, score: float) -> float:
    """P of a node with this score. The root's score is that of all guesses above it, and may be too low for `exp`."""
    return math.exp(score - context.tree.root.score)
