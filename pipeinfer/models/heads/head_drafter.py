"""A draft that reads the target's features (EAGLE-3, MTP), in this process. Knows no policy and no pipeline.

The cell of a token is made of the token and of the features of the one before it: EAGLE-3 has it at that one's
position, and none of a text's first token; MTP at the token's own, the first one's made of zeros. Features come with
the target's verdicts. Below the root there are none yet: the head goes on from its own states there, and once such
tokens settle, their cells are made again from features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeinfer.core.drafting import to_the_end
from pipeinfer.core.interfaces import Batch, HeadModel
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import POSITION_END, Constraint, FloatArray
from pipeinfer.models.drafter import ModelDrafter

N_KEPT, N_KEPT_LEAST = 4096, 64
"""Tokens whose features wait for being read: of all requests at most, and of one where there are many. Of longer texts
the head reads the end."""


@dataclass(slots=True)
class _Text:
    """What is known of a request.

    features  of committed tokens after which no cell was made, by position
    of_nodes  of nodes that have not settled
    states    the head's own, of nodes that have a cell, or had one before the root moved
    """

    features: dict[int, FloatArray] = field(default_factory=dict)
    of_nodes: dict[Node, FloatArray] = field(default_factory=dict)
    states: dict[Node, FloatArray] = field(default_factory=dict)


class HeadDrafter(ModelDrafter):
    """A FeatureDrafter. `pool` counts cells by the positions of their tokens, `shift`: see Head.

    It does not guess after a root whose predecessor's features have not come. Those that never will, as of a prefix
    that another request has evaluated, are taken as zero where one is missing; of more the head begins after them.
    """

    def __init__(
        self, model: HeadModel, pool: SequencePool, n_batch: int, couple: bool = True,
        constrain: Callable[[str], Constraint] | None = None, shift: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(model, pool, n_batch, couple, constrain)
        self.head, self.shift = model, shift
        self._texts: dict[int, _Text] = {}

    def open(self, request: Request) -> None:
        text, prefix = _Text(), request.prefix_hit
        if prefix and (source := self._texts.get(prefix.source.id)):
            text.features = {at: row for at, row in source.features.items() if at < prefix.n_tokens}
            if prefix.moves:
                del self._texts[prefix.source.id]
        super().open(request)
        self._texts[request.id] = text

    def read(self, request: Request, start: int, nodes: Sequence[Node], features: FloatArray) -> None:
        text, n_context = self._texts[request.id], len(features) - len(nodes)
        most = max(N_KEPT_LEAST, N_KEPT // len(self._texts))
        for row in range(max(0, n_context - most), n_context):
            text.features[start + row] = features[row].copy()  # else the whole run's are kept
        for node, own in zip(nodes, features[n_context:], strict=True):
            if node.state is not State.DEAD:
                text.of_nodes[node] = own.copy()
        for at in sorted(text.features)[:-most]:
            del text.features[at]

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        root, text = request.tree.root, self._texts[request.id]
        if not self.pool.is_placed(root) and root.position - 1 not in text.features:
            return {}
        found: dict[Node, list[Guess]] = {}
        left = self.pool.fitting(self.pool.unplaced(list(widths))[: self.n_batch])
        # a node whose parent somebody else has expanded waits for the parent's state
        while ready := self.pool.fitting([node for node in left if node is root or node.parent in text.states]):
            left = [node for node in left if node not in ready]
            guesses = self._expand(request, ready, widths, interrupted)
            if guesses is None:
                return None
            found |= guesses
        return found

    def _expand(
        self, request: Request, nodes: Sequence[Node], widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        """Evaluate nodes whose parents' states are known, and guess after those of `widths`."""
        text, placement = self._texts[request.id], self.pool.place(request.id, 0, nodes)
        before = np.stack([self._before(request, node) for node in nodes])
        wanted = [node for node in nodes if node in widths]
        flags = np.array([node in widths for node in nodes])
        tokens, positions = [node.token for node in nodes], [node.position for node in nodes]
        logits = self._evaluate_after(before, tokens, positions, placement.seqs, flags, interrupted)
        if logits is None:
            self.pool.undo(nodes, placement)
            return None
        text.states.update(zip(nodes, self.head.states.copy(), strict=True))
        rows = zip(wanted, logits, strict=True)
        return {node: self._guess(request, node, row, widths[node]) for node, row in rows}

    def _before(self, request: Request, node: Node) -> FloatArray:
        """(n_embd,), what is known of the token before a node."""
        text = self._texts[request.id]
        if node.parent is not None:
            return text.states[node.parent]
        return self.head.encode(text.features[node.position - 1][None])[0]

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        root, known = request.tree.root, self._texts[request.id].features
        if self.pool.is_placed(root):
            return True
        if not known:
            return True
        has_come = root.position - 1 in known  # and all before it, since verdicts keep their order
        start = self.pool.placed_end(request.id)
        missing = (at for at in range(max(start, 1), root.position) if at - 1 not in known)
        begin, last = start, root.position
        if not has_come:
            last = next(missing, last)
        elif len(never := list(missing)) > 1:
            begin = never[-1] + 1
        while (start := self.pool.placed_end(request.id)) < last:
            end = min(last, start + self.n_batch, start + self.pool.n_free_cells)
            if end == start:
                return True  # other requests hold the cells
            self._read_on(request, start, end, begin, interrupted)
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _read_on(self, request: Request, start: int, end: int, begin: int, interrupted: Callable[[], bool]) -> None:
        """Make the cells of the committed tokens at positions [start, end), but for those before `begin`."""
        known, ((seq,), *_) = self._texts[request.id].features, self.pool.place(request.id, end - start, []).seqs
        if start < begin:  # cells have no gaps
            self._apply()
            self.model.apply([KvOp(OpKind.REMOVE, seq)])
        read = range(max(start, begin, self.shift), end)
        if read:
            blank = np.zeros_like(next(iter(known.values())))
            before = self.head.encode(np.stack([known.get(at - 1, blank) for at in read]))
            tokens, flags = request.tokens[read.start : end], np.zeros(len(read), np.bool_)
            self._evaluate_after(before, tokens, read, [(seq,)] * len(read), flags, to_the_end(interrupted))
        for at in range(start, end):
            known.pop(at - 1, None)

    def _evaluate_after(
        self, before: FloatArray, tokens: Sequence[int], positions: Sequence[int],
        seqs: list[tuple[int, ...]], wanted: np.typing.NDArray[np.bool_], interrupted: Callable[[], bool],
    ) -> FloatArray | None:  # fmt: skip
        """Logits (n_wanted, n_vocab); None when interrupted. `before`: (n_rows, n_embd), of the tokens before."""
        self._apply()
        at = np.array(positions, np.int32) - self.shift
        return self.model.evaluate(Batch(np.array(tokens, np.int32), at, seqs, before, wanted), interrupted)

    def _apply(self) -> None:
        """The pool's operations, by the positions of cells."""
        self.model.apply([self._moved(op) for op in self.pool.take_pending()])

    def _moved(self, op: KvOp) -> KvOp:
        last = op.last if op.last == POSITION_END else op.last - self.shift
        return replace(op, first=max(0, op.first - self.shift), last=last)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        text = self._texts[request.id]
        text.features |= {node.position: text.of_nodes[node] for node in path[:-1] if node in text.of_nodes}
        text.of_nodes = {node: row for node, row in text.of_nodes.items() if node.live}
        text.states = {node: row for node, row in text.states.items() if node.live}
        self.pool.settle(request.id, path)
        # below the old root, cells were made of the head's own states
        self.pool.rewind(request.id, path[0].position + 1)
        read = self.pool.placed_end(request.id) - 1
        text.features = {at: row for at, row in text.features.items() if at >= read}

    def close(self, request: Request) -> None:
        text = self._texts.pop(request.id)
        if request.n_retained:
            kept = sorted(at for at in text.features if at < request.n_retained)[-N_KEPT_LEAST:]
            self._texts[request.id] = _Text({at: text.features[at] for at in kept})
        super().close(request)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        super().forget(request)
