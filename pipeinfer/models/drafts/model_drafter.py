"""A draft model in this process, which expands nodes of trees, and one that reads the target's features (EAGLE-3, MTP).
Knows no policy and no pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeinfer.core.drafting import guess_next, to_the_end
from pipeinfer.core.interfaces import Batch, HeadModel, StageModel
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import POSITION_END, Constraint, ConstraintFailed, FloatArray

Constrain = Callable[[SamplingParams], Constraint] | None
Seqs = list[tuple[int, ...]]


def newest_tokens(request: Request, node: Node, n: int) -> list[int]:
    """The last `n` tokens of the path that ends with `node`."""
    below: list[int] = []
    step: Node | None = node
    while step is not None and step.parent is not None and len(below) < n:
        below.append(step.token)
        step = step.parent
    return [*request.tokens[max(0, len(request.tokens) - n + len(below)) :], *below[::-1]] if n else []


class ModelDrafter:
    """A Drafter on a whole draft model with its own KV cache.

    Committed tokens that the cache lacks (the prompt, or tokens that the draft had not guessed) are evaluated before
    nodes. `couple`: sampled guesses share the target's noise. `constrain`: makes a Constraint of a request's
    parameters; without it constraints are ignored."""

    def __init__(
        self, model: StageModel, pool: SequencePool, n_batch: int, couple: bool = True, constrain: Constrain = None
    ) -> None:
        self.model, self.pool, self.n_batch, self.couple, self.constrain = model, pool, n_batch, couple, constrain
        self._constraints: dict[int, Constraint] = {}  # by request

    @property
    def can_open(self) -> bool:
        return self.pool.n_free > 0

    def open(self, request: Request) -> None:
        self.pool.open(request.id, request.prefix_hit)
        if request.sampling.is_constrained and self.constrain:
            self._constraints[request.id] = self.constrain(request.sampling)

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        # nodes that only a larger draft has expanded are evaluated as context
        nodes = self.pool.fitting(self.pool.unplaced(list(widths))[: self.n_batch])
        if not nodes:
            return {}
        placement = self.pool.place(request.id, 0, nodes)
        tokens, positions = [node.token for node in nodes], [node.position for node in nodes]
        logits = self._evaluate(tokens, positions, placement.seqs, True, interrupted)
        if logits is None:
            self.pool.undo(nodes, placement)
            return None
        rows = [(node, row) for node, row in zip(nodes, logits, strict=True) if node in widths]
        return {node: self._guess(request, node, row, widths[node]) for node, row in rows}

    def _guess(self, request: Request, node: Node, logits: FloatArray, width: int) -> list[Guess]:
        params = request.sampling
        history = newest_tokens(request, node, params.looks_back)
        constraint = self._constraints.get(request.id)
        n_output = node.position + 1 - len(request.prompt)
        allowed = constraint.after(newest_tokens(request, node, n_output)) if constraint else None
        try:
            return guess_next(logits, params, node.position + 1, history, width, self.couple, allowed)
        except ConstraintFailed:  # the target will fail too if the text comes here
            return []

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        """Evaluate the committed tokens before the root that are missing; False if the root moves meanwhile. These runs
        are never interrupted: a draft slower than the target would make no progress."""
        root = request.tree.root
        while not self.pool.is_placed(root) and (start := self.pool.placed_end(request.id)) < root.position:
            end = min(root.position, start + self.n_batch, start + self.pool.n_free_cells)
            if end == start:
                return True  # other requests hold the cells, so there is none for nodes either
            placement = self.pool.place(request.id, end - start, [])
            tokens = request.tokens[start:end]
            self._evaluate(tokens, range(start, end), placement.seqs, False, to_the_end(interrupted))
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _evaluate(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Seqs, has_logits: bool, stop: Callable[[], bool]
    ) -> FloatArray | None:
        """Logits (n_rows, n_vocab) if `has_logits`; None when interrupted."""
        self.model.apply(self.pool.take_pending())
        flags = np.full(len(tokens), has_logits)
        batch = Batch(np.array(tokens, np.int32), np.array(positions, np.int32), seqs, None, flags)
        return self.model.evaluate(batch, stop)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        self.pool.settle(request.id, path)

    def close(self, request: Request) -> None:
        self._constraints.pop(request.id, None)
        if request.n_retained:
            self.pool.retain(request.id, request.n_retained)
        else:
            self.pool.close(request.id)

    def forget(self, request: Request) -> None:
        self.pool.close(request.id)


# -- heads. The cell of a token is computed from the token and the features of its predecessor. EAGLE-3 stores it at the
# position of the predecessor, so that a text's first token has no cell; MTP at the token's position, with zeros as the
# first token's features. Features come with the target's verdicts. Nodes below the root have none yet: their cells are
# computed from the head's states, and again from features once these tokens settle.

N_UNREAD, N_MIN_UNREAD = 4096, 64
"""The most tokens with unread features: of all requests, and of one of many. The head reads the end of longer texts."""


@dataclass(slots=True)
class _RequestFeatures:
    """What the head reads of one request, rows (n,). `features`: the target's, by position, of committed tokens whose
    successors have no cell. `states`: the head's, of nodes that have a cell, or had one before the root moved."""

    features: dict[int, FloatArray] = field(default_factory=dict)
    node_features: dict[Node, FloatArray] = field(default_factory=dict)  # the target's, of nodes that have not settled
    states: dict[Node, FloatArray] = field(default_factory=dict)


class HeadDrafter(ModelDrafter):
    """A FeatureDrafter. `pool` counts cells by the positions of their tokens; `shift`: DraftHead's. It does not guess
    after a root whose predecessor's features have not come. Features that never come, as those of a prefix that another
    request has evaluated, count as zero if one is missing; with more the head begins after them."""

    def __init__(
        self,
        model: HeadModel,
        pool: SequencePool,
        n_batch: int,
        couple: bool = True,
        constrain: Constrain = None,
        shift: int = 1,
    ) -> None:
        super().__init__(model, pool, n_batch, couple, constrain)
        self.head, self.shift = model, shift
        self._records: dict[int, _RequestFeatures] = {}

    def open(self, request: Request) -> None:
        record, prefix = _RequestFeatures(), request.prefix_hit
        if prefix and (source := self._records.get(prefix.source.id)):
            record.features = {at: row for at, row in source.features.items() if at < prefix.n_tokens}
            if prefix.moves:
                del self._records[prefix.source.id]
        super().open(request)
        self._records[request.id] = record

    def read(self, request: Request, start: int, nodes: Sequence[Node], features: FloatArray) -> None:
        record, n_context = self._records[request.id], len(features) - len(nodes)
        most = max(N_MIN_UNREAD, N_UNREAD // len(self._records))
        for row in range(max(0, n_context - most), n_context):
            record.features[start + row] = features[row].copy()  # a view would hold the memory of the whole run
        for node, row_of_node in zip(nodes, features[n_context:], strict=True):
            if node.state is not State.DEAD:
                record.node_features[node] = row_of_node.copy()
        for at in sorted(record.features)[:-most]:
            del record.features[at]

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        root, record = request.tree.root, self._records[request.id]
        if not self.pool.is_placed(root) and root.position - 1 not in record.features:
            return {}
        guesses: dict[Node, list[Guess]] = {}
        pending = self.pool.fitting(self.pool.unplaced(list(widths))[: self.n_batch])
        # a node whose parent another draft has expanded waits for the parent's state
        while ready := self.pool.fitting([node for node in pending if node is root or node.parent in record.states]):
            pending = [node for node in pending if node not in ready]
            more = self._expand(request, ready, widths, interrupted)
            if more is None:
                return None
            guesses |= more
        return guesses

    def _expand(
        self, request: Request, nodes: Sequence[Node], widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        """Evaluate nodes whose parents have states, and guess after those in `widths`."""
        record, placement = self._records[request.id], self.pool.place(request.id, 0, nodes)
        before = np.stack([self._before(request, node) for node in nodes])
        flags = np.array([node in widths for node in nodes])
        tokens = np.array([node.token for node in nodes], np.int32)
        positions = np.array([node.position for node in nodes], np.int32)
        logits = self._evaluate_after(Batch(tokens, positions, placement.seqs, before, flags), interrupted)
        if logits is None:
            self.pool.undo(nodes, placement)
            return None
        record.states.update(zip(nodes, self.head.states.copy(), strict=True))
        rows = zip((node for node in nodes if node in widths), logits, strict=True)
        return {node: self._guess(request, node, row, widths[node]) for node, row in rows}

    def _before(self, request: Request, node: Node) -> FloatArray:
        """(n_embd,), the state of a node's parent, or the encoded features of the token before the root."""
        record = self._records[request.id]
        if node.parent is not None:
            return record.states[node.parent]
        return self.head.encode(record.features[node.position - 1][None])[0]

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        root, features = request.tree.root, self._records[request.id].features
        if self.pool.is_placed(root) or not features:
            return True
        start = self.pool.placed_end(request.id)
        missing = [at for at in range(max(start, 1), root.position) if at - 1 not in features]
        first, last = start, root.position
        if root.position - 1 not in features:  # those of earlier tokens come before it: verdicts keep their order
            last = missing[0] if missing else last
        elif len(missing) > 1:
            first = missing[-1] + 1
        while (start := self.pool.placed_end(request.id)) < last:
            end = min(last, start + self.n_batch, start + self.pool.n_free_cells)
            if end == start:
                return True  # other requests hold the cells
            self._read_on(request, start, end, first, interrupted)
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _read_on(self, request: Request, start: int, end: int, first: int, interrupted: Callable[[], bool]) -> None:
        """Compute the cells of the committed tokens at positions [start, end), except those before `first`."""
        features, ((seq,), *_) = self._records[request.id].features, self.pool.place(request.id, end - start, []).seqs
        if start < first:  # cells have no gaps
            self._apply()
            self.model.apply([KvOp(OpKind.REMOVE, seq)])
        positions = range(max(start, first, self.shift), end)
        if positions:
            zeros = np.zeros_like(next(iter(features.values())))
            before = self.head.encode(np.stack([features.get(at - 1, zeros) for at in positions]))
            tokens, seqs = np.array(request.tokens[positions.start : end], np.int32), [(seq,)] * len(positions)
            flags = np.zeros(len(positions), np.bool_)
            batch = Batch(tokens, np.array(positions, np.int32), [*seqs], before, flags)
            self._evaluate_after(batch, to_the_end(interrupted))
        for at in range(start, end):
            features.pop(at - 1, None)

    def _evaluate_after(self, batch: Batch, interrupted: Callable[[], bool]) -> FloatArray | None:
        """Logits (n_wanted, n_vocab); None when interrupted. The batch has the positions of its tokens, and in `hidden`
        what the head goes on from."""
        self._apply()
        return self.model.evaluate(replace(batch, positions=batch.positions - self.shift), interrupted)

    def _apply(self) -> None:
        """Apply the pool's operations at the positions of cells."""
        moved = []
        for op in self.pool.take_pending():
            last = op.last if op.last == POSITION_END else op.last - self.shift
            moved.append(replace(op, first=max(0, op.first - self.shift), last=last))
        self.model.apply(moved)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        record = self._records[request.id]
        of_nodes = record.node_features
        record.features |= {node.position: of_nodes[node] for node in path[:-1] if node in of_nodes}
        record.node_features = {node: row for node, row in of_nodes.items() if node.live}
        record.states = {node: row for node, row in record.states.items() if node.live}
        self.pool.settle(request.id, path)
        # below the old root, cells were computed from the head's states
        self.pool.rewind(request.id, path[0].position + 1)
        first = self.pool.placed_end(request.id) - 1
        record.features = {at: row for at, row in record.features.items() if at >= first}

    def close(self, request: Request) -> None:
        record = self._records.pop(request.id)
        if request.n_retained:
            newest = sorted(at for at in record.features if at < request.n_retained)[-N_MIN_UNREAD:]
            self._records[request.id] = _RequestFeatures({at: record.features[at] for at in newest})
        super().close(request)

    def forget(self, request: Request) -> None:
        self._records.pop(request.id, None)
        super().forget(request)
