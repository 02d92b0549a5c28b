"""The baselines of PipeInfer's evaluation: a token at a time; and draft a tree, verify it, repeat, where pipeline and
draft wait for each other (SpecInfer, Miao et al. 2024)."""

from dataclasses import dataclass, field
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, NOTHING, PAPER, Answer, AwaitDraft, PaperPolicy, Policy, PolicyView, Send
from pipeinfer.core.runs import Guess
from pipeinfer.core.settings import MAX_RUN, MAX_WIDTH, N_DRAFT, P_MIN, setting
from pipeinfer.core.tree import Node


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class Iterative(Policy):
    """Sends the root; never drafts."""

    name: ClassVar[str] = "iterative"
    drafts: ClassVar[bool] = False

    def send(self, context: PolicyView) -> Answer:
        root = context.tree.root
        return Send([root]) if root.run_id is None else NOTHING


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class Speculative(PaperPolicy):
    """One tree at a time, into an empty pipeline. Guesses below `accept_cutoff` are dropped. The preset `paper` has the
    settings of PipeInfer's experiments, whose -ps 0.8 lets no second guess in. There the draft reads the prompt while
    the target does, and guesses afterwards."""

    name: ClassVar[str] = "speculative"

    n_draft: int = setting(4, *N_DRAFT, help="Guesses a tree.", least=1, most=MAX_RUN, shown=True)
    width: int = setting(
        4, "--width", help="Guesses after each token at most.", least=1, most=MAX_WIDTH, shown=True, paper=1
    )
    accept_cutoff: float = setting(0.05, *P_MIN, most=1, paper=0.001, help="Probability from which a guess counts.")
    _reads: bool = field(default=False, init=False, repr=False, compare=False)  # the draft's step only reads the prompt

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, 1 + self.n_draft)

    def send(self, context: PolicyView) -> Answer:
        if context.n_inflight:
            return NOTHING
        if self.draft(context) or any(self.refine(context, draft) for draft in range(1, context.n_drafts)):
            return AwaitDraft(context.tree.root)
        return Send([context.tree.root, *self._best(context)])

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """Best first: while one of the best `n_draft` guesses is not expanded, expanding it may find a better one."""
        root = context.tree.root
        self._reads = self.preset == PAPER and not context.request.n_generated
        if (context.n_inflight and not self._reads) or not context.may_branch(root):
            return {}
        if not root.expanded:
            return {root: self.width}
        best = self._best(context)
        if len(best) == self.n_draft:
            # children score no higher than their parent: only nodes above the last of the best can improve the tree
            best = best[:-1]
        open_nodes = [node for node in best if not node.expanded and context.may_branch(node)]
        return {max(open_nodes, key=lambda node: node.score): self.width} if open_nodes else {}

    def _best(self, context: PolicyView) -> list[Node]:
        """The `n_draft` guesses of the highest score, parents before children."""
        guesses = context.in_reach(context.tree.nodes[1:])
        # a stable sort: a child scores at most as much as its parent and comes after it
        chosen = set(sorted(guesses, key=lambda node: -node.score)[: self.n_draft])
        return [node for node in guesses if node in chosen]

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        return [] if self._reads else [guess for guess in guesses if guess.probability >= self.accept_cutoff]

    def refine(self, context: PolicyView, draft: int) -> dict[Node, int]:
        """The finished tree, before it is sent: each draft after the smaller ones."""
        if context.n_inflight or not context.may_branch(context.tree.root) or self.draft(context):
            return {}
        nodes = [context.tree.root, *self._best(context)]
        if draft > 1 and any(node.is_open(draft - 1) for node in nodes if context.may_branch(node)):
            return {}
        return {node: self.width for node in nodes if node.is_open(draft) and context.may_branch(node)}
