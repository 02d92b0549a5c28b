"""A dynamic prediction tree, fed to the pipeline layer by layer (PipeDec, Yin et al. 2025, sections 3.2 to 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, NOTHING, Answer, PaperPolicy, PolicyView, Send
from pipeinfer.core.settings import MAX_RUN, MAX_WIDTH, setting
from pipeinfer.core.tree import Node
from pipeinfer.policies.likeliest import SCORE


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class PipeDec(PaperPolicy):
    """Each timestep one layer of the tree enters the pipeline, and the draft expands it meanwhile.

    `children`: guesses after each node (the paper's c). `layer_width`: nodes of a layer at most (w). `group`: stages
    that act as one (G_i), so that a layer enters only once as many are free.

    A node's `score` is its cumulative log-probability B (section 3.3.3). Which of the draft's guesses make the next
    layer is decided when it is sent, after the newest verdict has pruned the tree: the update that section 3.3.4 has
    follow a hit. After a miss the root is new and alone, and so is the tree (section 3.3.2). The defaults are the
    paper's (section 4.3.1): `early` makes its timesteps."""

    name: ClassVar[str] = "pipedec"
    n_seq: ClassVar[int] = 127
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")

    children: int = setting(16, "--children", help="Guesses after each token.", least=1, most=MAX_WIDTH, shown=True)
    layer_width: int = setting(32, "--layer-width", help="Guesses a run.", least=1, most=MAX_RUN, shown=True)
    group: int = setting(1, "--group", help="Stages that act as one.", least=1, most=1000, shown=True)

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, self.layer_width)

    def send(self, context: PolicyView) -> Answer:
        """The next layer, as soon as the first group of stages is through with the one before."""
        root = context.tree.root
        if root.run_id is None:
            return Send([root])
        if context.n_inflight >= -(-context.n_stages // self.group):
            return NOTHING
        if context.n_inflight and (early := context.early()):
            return early
        return Send(self._top(context, self._next_layer(context)))

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """All nodes of the layer that was sent last, in one batch."""
        layer = self._last_layer(context)
        return {node: self.children for node in layer if not node.expanded and context.may_branch(node)}

    def _last_layer(self, context: PolicyView) -> list[Node]:
        """X^(l): the deepest nodes that were sent."""
        sent = [node for node in context.tree.nodes if node.run_id is not None]
        end = max((node.position for node in sent), default=0)
        return [node for node in sent if node.position == end]

    def _next_layer(self, context: PolicyView) -> list[Node]:
        """The guesses after it, B^(l+1) in their scores."""
        return context.in_reach(child for node in self._last_layer(context) for child in node.children)

    def _top(self, context: PolicyView, candidates: Sequence[Node]) -> list[Node]:
        """D = TopK(Flatten(B^(l+1)), min(w, n^(l) c))."""
        return context.fitting(sorted(candidates, key=SCORE, reverse=True)[: self.layer_width])
