"""The tokens of each sequence, for samplers that look back. Operations apply as to a KV cache."""

from array import array
from collections.abc import Sequence

from pipeinfer.core.runs import KvOp, OpKind

NONE = array("i")


class TokenHistory:
    """Sequence id -> the tokens of its cells, by position."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            tokens = self._tokens.get(op.src, NONE)
            if op.kind is OpKind.COPY:
                self._tokens[op.dst] = tokens[: op.last]
            elif op.kind is OpKind.REMOVE:
                del tokens[op.first :]

    def add(self, seqs: Sequence[int], token: int) -> None:
        """A row was evaluated: its cell belongs to all of `seqs`."""
        for seq in seqs:
            if (tokens := self._tokens.get(seq)) is None:
                tokens = self._tokens[seq] = array("i")
            tokens.append(token)

    def last(self, seq: int, end: int, n: int) -> Sequence[int]:
        """The newest `n` of the sequence's first `end` tokens."""
        return self._tokens.get(seq, NONE)[max(0, end - n) : end]
