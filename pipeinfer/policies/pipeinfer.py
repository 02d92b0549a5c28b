"""Asynchronous pipelined speculation (PipeInfer, sections IV-A and IV-B).

The newest token goes out at once; guesses follow in micro-batches while it is in flight. Guesses that survive a verdict
stay in the tree and in the pipeline: they are never drafted or sent twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeinfer.interfaces import Guess
from pipeinfer.policies.base import View
from pipeinfer.tree import Node, Settled


@dataclass
class PipeInfer:
    """`microbatch`: guesses a run at most. `inflight`: runs in flight at most (0: one more than there are stages).

    Cutoffs are probabilities under the draft: the likeliest guess after a node enters the tree from `accept_cutoff` on,
    a further one (up to `width` in all) from `split_cutoff` on. Reactive speculation (section IV-B.2): each guess sent
    ahead raises the accept cutoff by `recovery`, each refused expansion lowers it by `decay`; an accepted guess
    resets it.
    """

    microbatch: int = 1
    inflight: int = 0
    width: int = 3
    accept_cutoff: float = 0.02
    split_cutoff: float = 0.3
    recovery: float = 0.0
    decay: float = 0.01
    _shift: float = field(default=0.0, init=False)

    def send(self, view: View) -> list[Node]:
        root = view.tree.root
        if root.run_id is None:
            return [root]
        if view.n_inflight >= (self.inflight or view.n_stages + 1):
            return []
        return self._ready(view)[: self.microbatch]

    def draft(self, view: View) -> list[Node]:
        """The open node of the highest score, while fewer guesses wait than the next two runs can carry."""
        if len(self._ready(view)) >= 2 * self.microbatch:
            return []
        open_nodes = [node for node in view.tree.nodes if not node.expanded and view.may_branch(node)]
        return [max(open_nodes, key=lambda node: node.score)] if open_nodes else []

    def _ready(self, view: View) -> list[Node]:
        """Unsent guesses, likeliest first; a child never comes before its parent."""
        guesses = [node for node in view.tree.unsent() if node.parent is not None and view.in_reach(node)]
        return sorted(guesses, key=lambda node: -node.score)

    def keep(self, node: Node, guesses: list[Guess]) -> list[Guess]:
        cutoff = max(0.0, self.accept_cutoff + self._shift)
        kept = [
            guess for rank, guess in enumerate(guesses) if guess.probability >= (self.split_cutoff if rank else cutoff)
        ]
        self._shift += self.recovery if kept else -self.decay
        return kept

    def settled(self, settled: Settled) -> None:
        if settled.n_matched:
            self._shift = 0.0
