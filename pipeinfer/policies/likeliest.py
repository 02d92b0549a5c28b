"""Orders of nodes that policies share: the likeliest first. Knows the tree."""

from __future__ import annotations

from operator import attrgetter

from pipeinfer.core.policy import View
from pipeinfer.core.tree import Node

SCORE = attrgetter("score")


def to_refine(view: View, draft: int) -> list[Node]:
    """What a larger draft is asked about first: the likeliest nodes after which nothing was sent, for there its guesses
    come in time."""
    open_nodes = [node for node in view.tree.nodes if node.is_open(draft) and view.may_branch(node)]
    return sorted(open_nodes, key=lambda node: (any(child.run_id for child in node.children), -node.score))
