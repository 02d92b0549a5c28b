"""Continuous speculation: a tree's best guesses first, in segments, and ever new ones (FlowSpec, Liu et al. 2025).
Sections III-A to III-D and IV-A. The pruning of section III-C is in the core."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pipeinfer.core.policy import N_ROWS, NOTHING, Answer, AwaitDraft, PaperPolicy, PolicyView, Send
from pipeinfer.core.settings import MAX_DEPTH, MAX_RUN, MAX_TREE, MAX_WIDTH, setting
from pipeinfer.core.tree import Node, Settled
from pipeinfer.policies.likeliest import SCORE

EXPANSION_HELP = "Layers added in a step; 0: as many as are drafted while a stage works on a run, --depth at least."

Selection = Callable[[Sequence[Node]], list[Node]]


@dataclass(unsafe_hash=True)  # by its settings, which stay as they are
class FlowSpec(PaperPolicy):
    """Rounds of continuous steps: a round lasts while the target's token is among the guesses that were sent.

    `depth`: layers of a round's first tree below its root (d_0). `tree_size`: nodes of that tree that are verified, the
    root among them (L_0). `width`: nodes of a layer that the draft expands, and guesses after each (k). `segment`: rows
    of a run (L_seg). `expansion_depth`, `expansion_size`: of what a step adds to the tree (d_se, L_se).

    A node is expanded once, also where the draft reads the target's features (EAGLE-3) and more of them have come
    since. So a fresh tree from a new root (section III-D) reuses what was drafted below that root, and d_se counts the
    layers beyond it.

    Ablations of table III: without `scored`, segments go layer by layer; without `expansion`, a round is its first tree
    alone ("Pruned PP"); with --no-cancel, too, each tree is verified as a whole before the next ("Chunk-PP")."""

    name: ClassVar[str] = "flowspec"
    n_seq: ClassVar[int] = 127
    uses: ClassVar[tuple[str, ...]] = ("cancel", "partitions")

    depth: int = setting(
        5, "--depth", help="Layers of a round's first tree below its root.", least=1, most=MAX_DEPTH, shown=True
    )
    tree_size: int = setting(80, "--tree-size", help="Nodes of that tree.", least=1, most=MAX_TREE, shown=True)
    width: int = setting(10, "--width", help="Guesses after each token at most.", least=1, most=MAX_WIDTH, shown=True)
    segment: int = setting(16, "--segment", help="Rows a run.", least=1, most=MAX_RUN, shown=True)
    expansion_depth: int = setting(0, "--expansion-depth", most=MAX_DEPTH, shown=True, paper=5, help=EXPANSION_HELP)
    expansion_size: int = setting(64, "--expansion-size", help="Nodes of these.", least=1, most=MAX_TREE, shown=True)
    scored: bool = setting(True, "--no-score-order", help="Ablation: segments layer by layer, not the best first.")
    expansion: bool = setting(True, "--no-expansion", help="Ablation: a round ends with its first tree.")
    _root: Node | None = field(default=None, init=False, repr=False, compare=False)
    _layer: list[Node] = field(default_factory=list, init=False, repr=False, compare=False)  # drafted last
    _end: int = field(default=0, init=False, repr=False, compare=False)  # position of the last layer to draft
    _select: Selection | None = field(default=None, init=False, repr=False, compare=False)  # selects nodes of it then
    _sequence: list[Node] = field(default_factory=list, init=False, repr=False, compare=False)  # S, its unsent part
    _n_empty: int = field(default=0, init=False, repr=False, compare=False)  # segments in flight without a live node
    _has_returned: bool = field(default=False, init=False, repr=False, compare=False)  # one of them, not expanded after

    @property
    def n_rows(self) -> int:
        return max(N_ROWS, self.segment)

    # -- sending: step-wise verification (section III-B)

    def send(self, context: PolicyView) -> Answer:
        """The next segment, as soon as the first stage can take it."""
        self._step(context)
        root = context.tree.root
        if root is not self._root:
            return NOTHING
        if root.run_id is None:
            return AwaitDraft(root) if self._select else Send(self._segment(context) or [root])
        if context.n_inflight > context.n_stages:
            return NOTHING
        return (context.early() if context.n_inflight else None) or Send(self._segment(context))

    def _segment(self, context: PolicyView) -> list[Node]:
        return context.fitting(self._unsent())[: self.segment]

    def _unsent(self) -> list[Node]:
        """S without what was sent or pruned."""
        return [node for node in self._sequence if node.live and node.run_id is None]

    def _append(self, nodes: Iterable[Node]) -> None:
        """Extend S, in descending order of the scores; parents score no lower than children, and come first."""
        order = (lambda node: -node.score) if self.scored else (lambda node: (node.position, -node.score))
        self._sequence = sorted([*self._unsent(), *nodes], key=order)

    # -- drafting

    def draft(self, context: PolicyView) -> dict[Node, int]:
        """The layer that is being expanded, in one batch."""
        self._step(context)
        if self._select is None or context.tree.root is not self._root:
            return {}
        return {node: self.width for node in self._layer if self._is_open(context, node)}

    @staticmethod
    def _is_open(context: PolicyView, node: Node) -> bool:
        return not node.expanded and context.may_branch(node)

    def _step(self, context: PolicyView) -> None:
        """After new verdicts: start a round, or expand the tree (section III-A)."""
        root, n_before, self._n_empty = context.tree.root, self._n_empty, context.n_dead
        self._has_returned |= self._n_empty < n_before
        if root is not self._root:
            if self._continues(context):
                self._root = root
                if self.expansion:
                    self._expand_context_aware(context)
            elif self._root is None or not context.n_evaluated:
                self._root = root
                self._initialise(context)
        elif self.expansion and self._select is None and root.run_id is not None and self._has_returned:
            self._expand_score_aware(context)
        self._grow(context)

    def settled(self, settled: Settled, context: PolicyView) -> str:
        self._n_empty = context.n_dead
        return ""

    def _continues(self, context: PolicyView) -> bool:
        """The continuous condition (equation 2): the target's new token was already sent."""
        return self._root is not None and context.tree.root.run_id is not None

    def _initialise(self, context: PolicyView) -> None:
        """Draft a round's first tree: the best L_0 nodes of d_0 layers (section III-B)."""
        self._sequence = []
        self._draft_from([context.tree.root], self.depth, self._best)

    def _expand_context_aware(self, context: PolicyView) -> None:
        """Draft d_se layers of T_se from the new root: its best L_se nodes, without known ones (section III-D)."""
        self._draft_from(self._open_layer(context, [context.tree.root]), self._n_layers(context), self._best_of_fresh)

    def _expand_score_aware(self, context: PolicyView) -> None:
        """The context is as before: draft d_se more layers, and add the best L_se new nodes (section III-D)."""
        self._has_returned = False
        if self._layer:
            self._draft_from(self._layer, self._n_layers(context), self._best_of_rest)

    def _n_layers(self, context: PolicyView) -> int:
        """d_se; unless it is given, such that drafting takes as long as a stage's run (section IV-A), d_0 at least."""
        if self.expansion_depth or not context.draft_s:
            return self.expansion_depth or self.depth
        return max(self.depth, min(int(context.run_s(self.segment) / context.draft_s), MAX_DEPTH))

    def _draft_from(self, layer: list[Node], n_layers: int, select: Selection) -> None:
        self._layer, self._end, self._select = layer, layer[0].position + n_layers, select

    def _open_layer(self, context: PolicyView, layer: list[Node]) -> list[Node]:
        """The first layer from `layer` on that is not expanded."""
        while layer and not any(self._is_open(context, node) for node in layer):
            below = self._next(context, layer)
            if not below:
                break
            layer = below
        return layer

    def _next(self, context: PolicyView, layer: list[Node]) -> list[Node]:
        """The k children of a layer with the highest scores (section III-B)."""
        return _top(context.in_reach(child for node in layer for child in node.children), self.width)

    def _grow(self, context: PolicyView) -> None:
        """Go down the layers that are expanded; select nodes once the last one is reached."""
        while self._select and not any(self._is_open(context, node) for node in self._layer):
            self._layer = self._next(context, self._layer)
            if not self._layer or self._layer[0].position >= self._end:
                drafted = context.in_reach(context.tree.nodes)
                self._append(self._select([node for node in drafted if node.position <= self._end]))
                self._select = None

    # -- which drafted nodes are verified; they come parents first

    def _best(self, drafted: Sequence[Node]) -> list[Node]:
        """T_0."""
        return [node for node in _top(drafted, self.tree_size) if node.run_id is None]

    def _best_of_fresh(self, drafted: Sequence[Node]) -> list[Node]:
        """T_se without the nodes of T."""
        return self._new(_top(drafted, self.expansion_size))

    def _best_of_rest(self, drafted: Sequence[Node]) -> list[Node]:
        return _top(self._new(drafted), self.expansion_size)

    def _new(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes that are not in the tree T: neither sent nor chosen."""
        chosen = set(self._sequence)
        return [node for node in nodes if node.run_id is None and node not in chosen]


def _top(nodes: Sequence[Node], n: int) -> list[Node]:
    """The n nodes with the highest cumulative scores (equation 1), parents before children."""
    return sorted(nodes, key=SCORE, reverse=True)[:n]
