"""What every policy answers, and what it may look at. Knows the tree, no pipeline and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeinfer.runs import Guess
from pipeinfer.tree import Node, Settled, TokenTree


@dataclass(frozen=True, slots=True)
class View:
    """One request as its policy sees it."""

    tree: TokenTree
    n_inflight: int  # runs without a verdict, cancelled ones left out
    n_stages: int
    depth_left: int  # tokens that can still come; deeper guesses are of no use
    fitting: Callable[[Sequence[Node]], list[Node]]  # which of unsent nodes there is room for, in their order
    n_cheap_rows: int = 1  # what a run may carry without costing much more than a single row
    n_drafts: int = 1

    def in_reach(self, node: Node) -> bool:
        """Whether the node's token can still be part of the output and be followed by another."""
        return node.position - self.tree.root.position < self.depth_left

    def may_branch(self, node: Node) -> bool:
        """Whether guesses after the node would be in reach."""
        return node.position + 1 - self.tree.root.position < self.depth_left


class Policy(Protocol):
    """One instance serves one request, so it may remember."""

    width: int
    """Guesses asked of the draft for each expanded node."""

    def send(self, view: View) -> list[Node]:
        """Nodes to send to the target now as one run, parents before children; empty to send nothing."""
        ...

    def draft(self, view: View) -> list[Node]:
        """Nodes the draft shall expand now, in one batch; empty to draft nothing."""
        ...

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        """Which guesses after `node` enter the tree, and how probable they are. Draft 0 is the smallest."""
        ...

    def refine(self, view: View, draft: int) -> list[Node]:
        """Nodes that draft number `draft`, a larger one, shall be asked about now, the most important first."""
        ...

    def settled(self, settled: Settled) -> str:
        """The root moved. Returns what the user should know about it, usually nothing."""
        ...
