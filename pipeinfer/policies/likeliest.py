"""Orders of nodes that policies share: the likeliest first. Knows the tree."""

from __future__ import annotations

import math
from operator import attrgetter

from pipeinfer.core.policy import PolicyContext
from pipeinfer.core.tree import Node

SCORE = attrgetter("score")


def unsent_in_reach(context: PolicyContext) -> list[Node]:
    """Guesses in reach that no run has carried, parents before children."""
    root, end = context.tree.root, context.tree.root.position + context.depth_left
    return [node for node in context.tree.unsent() if node.position < end and node is not root]


def to_expand(context: PolicyContext, n_rows: int) -> list[Node]:
    """The likeliest open nodes, as many as a run has rows, if guesses after them could belong to the next run."""
    unsent = sorted((node.score for node in unsent_in_reach(context)), reverse=True)
    worst = unsent[n_rows - 1] if len(unsent) >= n_rows else -math.inf
    # children score no higher than their parent
    open_nodes = [
        node for node in context.tree.nodes if not node.expanded and node.score > worst and context.may_branch(node)
    ]
    return sorted(open_nodes, key=SCORE, reverse=True)[:n_rows]


def to_refine(context: PolicyContext, draft: int) -> list[Node]:
    """What a larger draft is asked about first: the likeliest nodes after which nothing was sent, for there its guesses
    come in time."""
    open_nodes = [node for node in context.tree.nodes if node.is_open(draft) and context.may_branch(node)]
    return sorted(open_nodes, key=lambda node: (any(child.run_id for child in node.children), -node.score))
