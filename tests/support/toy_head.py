"""A head on the toy target that looks at every cell: are those of settled tokens made of the target's features?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node
from pipeinfer.core.types import FloatArray
from pipeinfer.models.drafts.model_drafter import HeadDrafter
from tests.support.toy import N_EMBD, N_VOCAB, OracleDrafter, Reference, mix, path_to, toy_features

READ = (0, 2, 3)
"""Layers of the target whose outputs it reads."""

Cell = tuple[int, tuple[float, ...]]
"""A token, and what was known of the token before it."""


class ToyHead:
    """A HeadModel. A cell's state is a hash of it and of all that it sees. The sequence rules are libllama's."""

    is_last, n_embd, n_vocab = True, N_EMBD, N_VOCAB

    def __init__(self, n_cells: int) -> None:
        self.n_cells, self.seqs = n_cells, dict[int, dict[int, Cell]]()
        self.states: FloatArray = np.empty((0, N_EMBD), np.float32)

    def encode(self, features: FloatArray) -> FloatArray:
        assert features.shape[1] == N_EMBD * len(READ)
        return features.reshape(len(features), len(READ), N_EMBD).sum(axis=1)

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            path = self.seqs.setdefault(op.src, {})
            span = {at: cell for at, cell in path.items() if op.first <= at < op.last}
            if op.kind is OpKind.COPY:
                assert not self.seqs.get(op.dst), f"copy into sequence {op.dst}, which is not empty"
                self.seqs[op.dst] = span
            else:
                assert op.kind is OpKind.REMOVE
                for at in span:
                    del path[at]

    def next_position(self, seq: int) -> int:
        return max(self.seqs.get(seq, {}), default=-1) + 1

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        assert batch.hidden is not None
        before = {seq: dict(path) for seq, path in self.seqs.items()}
        states = []
        for row, (token, at) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)):
            seen = self.seqs.setdefault(batch.seqs[row][0], {})
            assert not seen or max(seen) == at - 1, f"a cell at {at} after {sorted(seen)}"
            owners = [self.seqs.setdefault(owner, {}) for owner in batch.seqs[row]]
            assert all(own == seen for own in owners), "coupled sequences differ"
            for own in owners:
                own[at] = (token, tuple(batch.hidden[row].tolist()))
            states.append(toy_features(mix(token, *map(int, batch.hidden[row]), len(seen))))
        if stop():
            self.seqs = before
            return None
        self.states = np.array(states, np.float32).reshape(-1, N_EMBD)
        return np.zeros((int(batch.wanted.sum()), N_VOCAB), np.float32)

    def clear(self) -> None:
        self.seqs.clear()

    def close(self) -> None:
        pass


def features_after(reference: Reference, path: Sequence[int]) -> FloatArray:
    """Of the last token of a text, what the toy target's stages give."""
    reference.hash_after(tuple(path))
    h, found = path[-1], []
    for layer, value in enumerate(reference.known[tuple(path)][1]):
        h = mix(h, value)
        found += toy_features(h) if layer in READ else []
    return np.array(found, np.float32)


class ToyHeadDrafter(HeadDrafter):
    """Guesses as an OracleDrafter does, and checks what the head knows before it guesses.

    `n_true`, `n_blind`: cells of settled tokens that were made of features, and of nothing.
    """

    def __init__(self, oracle: OracleDrafter, pool: SequencePool, n_batch: int, shift: int) -> None:
        self.toy = ToyHead(pool.n_cells)
        super().__init__(self.toy, pool, n_batch, shift=shift)
        self.oracle, self.n_true, self.n_blind = oracle, 0, 0

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        root, found = request.tree.root, super().expand(request, widths, interrupted)
        if found and request.tree.root is root:  # else it has yet to be told what settled meanwhile
            self._check(request)
        return found

    def _guess(self, request: Request, node: Node, logits: FloatArray, width: int) -> list[Guess]:
        return self.oracle._guess(request, path_to(request, node), width)

    def _check(self, request: Request) -> None:
        """The root's cell and all before it are made of what the target computed, without a gap."""
        root, text = request.tree.root, self.pool._texts[request.id]
        end = root.position + 1 - self.shift
        cells = {at: cell for at, cell in self.toy.seqs[text.seq].items() if at < end}
        assert sorted(cells) == list(range(min(cells), end)), "cells are missing"
        for at, (token, before) in cells.items():
            n_before = at + self.shift  # tokens before the cell's
            assert token == request.tokens[n_before]
            is_true = n_before > 0 and before == self._true(request.tokens[:n_before])
            assert is_true or not any(before), f"the cell at {at} was made of other features"
            self.n_true += is_true
            self.n_blind += not is_true

    def _true(self, path: Sequence[int]) -> tuple[float, ...]:
        """What a cell after this text is made of."""
        return tuple(self.toy.encode(features_after(self.oracle.reference, path)[None])[0].tolist())
