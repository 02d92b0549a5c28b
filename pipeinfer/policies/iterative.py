"""Plain pipelined decoding: one token at a time. The baseline that every other policy must beat."""

from __future__ import annotations

from pipeinfer.policies.base import View
from pipeinfer.runs import Guess
from pipeinfer.tree import Node, Settled


class Iterative:
    """Sends the root; never drafts."""

    width = 0

    def send(self, view: View) -> list[Node]:
        root = view.tree.root
        return [root] if root.run_id is None else []

    def draft(self, view: View) -> list[Node]:
        return []

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        return []

    def refine(self, view: View, draft: int) -> list[Node]:
        return []

    def settled(self, settled: Settled) -> str:
        return ""
