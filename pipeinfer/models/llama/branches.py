"""Sequences that branch off others within a batch whose rows are evaluated one by one, with what states they have.

Knows libllama's sequences, no batch.
"""

from typing import Any


class Branches:
    """A row's further sequences get its cell and its state. They are copied when the next row of either changes it, so
    that a chain of guesses, whose rows are each in the sequences of all that follow, is copied once a row."""

    def __init__(self, lib: Any, memory: Any) -> None:
        self._lib, self._memory = lib, memory
        self._source: dict[int, tuple[int, int]] = {}  # of each that lacks cells: which has them, and the first of them

    def follow(self, seqs: tuple[int, ...], position: int) -> None:
        """The row at `position` was evaluated in the first of `seqs`: the others are to be as that one."""
        for seq in seqs[1:]:
            _, first = self._source.get(seq, (seq, position))
            self._source[seq] = seqs[0], first

    def advance(self, seq: int) -> None:
        """The next row is to be evaluated in this sequence."""
        for other in [each for each, (source, _) in self._source.items() if seq in (each, source)]:
            source, first = self._source.pop(other)
            self._lib.llama_memory_seq_cp(self._memory, source, other, first, -1)

    def settle(self) -> None:
        """No row follows."""
        for seq in list(self._source):
            self.advance(seq)
