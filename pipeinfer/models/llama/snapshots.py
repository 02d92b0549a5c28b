"""What a sequence was after each of its newest rows, where layers keep states: by this it can go back, and branch.

A snapshot is a further sequence of libllama's. Its cells cost nothing, its state is copied when a next row changes it.
Knows libllama's sequences, no batch.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from pipeinfer.core.runs import KvOp, OpKind


class Snapshots:
    """In the sequences [first_id, first_id + n). The sequences that they are of share them as they share cells."""

    def __init__(self, lib: Any, memory: Any, first_id: int, n: int, spare: int | None) -> None:
        """`spare`: takes the cells of what is dropped, so that none are freed; None: they are freed."""
        self._lib, self._memory, self._spare = lib, memory, spare
        self._free = deque(range(first_id, first_id + n))
        self._of: dict[int, dict[int, int]] = {}  # of each sequence: the position behind a row -> the snapshot
        self._n_users: Counter[int] = Counter()

    def apply(self, op: KvOp) -> bool:
        """Whether that was all that the operation asks for."""
        if op.kind == OpKind.COPY:
            self.branch(op.src, op.dst, op.last)
        elif op.kind == OpKind.COMPACT:
            self.clear()
        else:
            self.go_back(op.src, op.first)
        return op.kind != OpKind.COMPACT

    def take(self, seqs: tuple[int, ...], end: int) -> None:
        """The row before position `end` was evaluated in the first of `seqs`: all of them are now as that one is."""
        if not self._free:
            self._evict()
        snapshot = self._free.popleft()
        for seq in (*seqs[1:], snapshot):
            self._copy(seqs[0], seq)
        for seq in seqs:
            self._note(seq, end, snapshot)

    def branch(self, src: int, dst: int, end: int) -> None:
        """`dst` begins with the cells [0, end) of `src`, and with the state that was there."""
        self._copy(self._at(src, end), dst)
        for position, snapshot in list(self._of.get(src, {}).items()):
            if position <= end:
                self._note(dst, position, snapshot)

    def go_back(self, seq: int, end: int) -> None:
        """Forget what is at position `end` and after it; at 0, all."""
        source = self._at(seq, end) if end else seq
        if source != seq or not end:
            self._remove(seq)
        if source != seq:
            self._copy(source, seq)
        for position in [position for position in self._of.get(seq, {}) if position > end or not end]:
            self._drop(seq, position)

    def clear(self) -> None:
        for seq in list(self._of):
            for position in list(self._of[seq]):
                self._drop(seq, position)

    def _at(self, seq: int, end: int) -> int:
        """A sequence with the cells [0, end) of `seq`, and the state behind them."""
        if self._lib.llama_memory_seq_pos_max(self._memory, seq) + 1 <= end:
            return seq
        assert end in self._of.get(seq, {}), f"sequence {seq} cannot go back to {end}: {sorted(self._of.get(seq, {}))}"
        return self._of[seq][end]

    def _note(self, seq: int, end: int, snapshot: int) -> None:
        known = self._of.setdefault(seq, {})
        assert known.get(end, snapshot) == snapshot, f"a second row before {end} in sequence {seq}"
        if end not in known:
            known[end] = snapshot
            self._n_users[snapshot] += 1

    def _drop(self, seq: int, end: int) -> None:
        snapshot = self._of[seq].pop(end)
        self._n_users[snapshot] -= 1
        if not self._n_users[snapshot]:
            self._remove(snapshot)
            self._free.append(snapshot)

    def _evict(self) -> None:
        """The oldest of the sequence that has the most: its row is certain, for no more guesses are placed than fit."""
        seq = max(self._of, key=lambda each: len(self._of[each]))
        oldest = self._of[seq][min(self._of[seq])]
        for each, known in self._of.items():
            for position in [position for position, snapshot in known.items() if snapshot == oldest]:
                self._drop(each, position)

    def _copy(self, src: int, dst: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, src, dst, -1, -1)

    def _remove(self, seq: int) -> None:
        if self._spare is not None:
            self._copy(seq, self._spare)
        self._lib.llama_memory_seq_rm(self._memory, seq, -1, -1)
