"""Which cells of a KV cache each sequence has, position by position. Knows no keys, no values and no torch.

A cell is free when no sequence has it. Nothing is parked: whoever needs the order of positions asks for it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind

Cells = npt.NDArray[np.int64]


class CacheFull(RuntimeError):
    """A batch found no free cells. The cache is as it was before."""


class CellTable:
    """For n_seq sequences of up to n_cells positions each."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.n_cells, self.n_seq = n_cells, n_seq
        self.clear()

    def clear(self) -> None:
        # of each sequence and position the cell + 1; untouched pages take no memory
        self._at = np.zeros((self.n_seq, self.n_cells), np.int32)
        self._end = [0] * self.n_seq
        self._n_holders = np.zeros(self.n_cells, np.int32)

    @property
    def end(self) -> int:
        """The cell behind the last in use."""
        used = np.flatnonzero(self._n_holders)
        return int(used[-1]) + 1 if used.size else 0

    def next_position(self, seq: int) -> int:
        """The position behind the sequence's last cell; 0 when it is empty."""
        return self._end[seq]

    def apply(self, ops: Sequence[KvOp]) -> None:
        """COMPACT changes nothing: cells are free as soon as no sequence has them."""
        for op in ops:
            if op.kind == OpKind.COPY:
                self._copy(op.src, op.dst, op.first, min(op.last, self._end[op.src]))
            elif op.kind == OpKind.REMOVE:
                self._remove(op.src, op.first, min(op.last, self._end[op.src]))

    def _copy(self, src: int, dst: int, first: int, last: int) -> None:
        if src == dst or first >= last:
            return
        span, target = self._at[src, first:last], self._at[dst, first:last]
        assert not target[span > 0].any(), f"sequence {dst} has cells at positions [{first}, {last})"
        self._n_holders[span[span > 0] - 1] += 1
        target[span > 0] = span[span > 0]
        self._end[dst] = max(self._end[dst], last)

    def _remove(self, seq: int, first: int, last: int) -> None:
        if first >= last:
            return
        span = self._at[seq, first:last]
        self._n_holders[span[span > 0] - 1] -= 1
        span[:] = 0
        if last == self._end[seq]:
            kept = np.flatnonzero(self._at[seq, :first])
            self._end[seq] = int(kept[-1]) + 1 if kept.size else 0

    def place(self, batch: Batch) -> None:
        """Give every row a cell, which all its sequences have from now on.

        Raises CacheFull; ValueError when a row is not the next of its sequences. Nothing has changed then.
        """
        n_rows = len(batch.positions)
        free = np.flatnonzero(self._n_holders == 0)[:n_rows]
        if len(free) < n_rows:
            raise CacheFull(f"no room for {n_rows} rows in the KV cache of {self.n_cells} cells")
        ends: dict[int, int] = {}
        for position, seqs in zip(batch.positions.tolist(), batch.seqs, strict=True):
            for seq in seqs:
                if ends.get(seq, self._end[seq]) != position or position >= self.n_cells:
                    raise ValueError(f"a row at position {position} of sequence {seq}, which ends at {self._end[seq]}")
                ends[seq] = position + 1
        for cell, position, seqs in zip(free.tolist(), batch.positions.tolist(), batch.seqs, strict=True):
            self._at[list(seqs), position] = cell + 1
            self._n_holders[cell] = len(seqs)
        for seq, end in ends.items():
            self._end[seq] = end

    def of_rows(self, batch: Batch) -> Cells:
        """(n_rows,) the cells that `place` gave."""
        return self._at[[seqs[0] for seqs in batch.seqs], batch.positions].astype(np.int64) - 1

    def forget(self, batch: Batch) -> None:
        """Take back what `place` gave the batch, the newest cells of its sequences."""
        first: dict[int, int] = {}
        for position, seqs in zip(batch.positions.tolist(), batch.seqs, strict=True):
            for seq in seqs:
                first[seq] = min(position, first.get(seq, position))
        for seq, position in first.items():
            self._remove(seq, position, self._end[seq])

    def seen(self, seq: int, end: int) -> Cells:
        """The sequence's cells at positions [0, end), in the order of positions."""
        cells = self._at[seq, :end].astype(np.int64) - 1
        return cells if end == 0 or cells.min() >= 0 else cells[cells >= 0]

    def order(self, batch: Batch) -> Cells:
        """(n_rows, cells of the row that sees most): those that each row sees, in the order of positions, then -1.
        After `place`."""
        found = np.full((len(batch.positions), int(batch.positions.max()) + 1), -1, np.int64)
        for row, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            found[row, : position + 1] = self._at[seqs[0], : position + 1].astype(np.int64) - 1
        return found

    def mask(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """(n_rows, cells up to the last in use): which of them each row sees. After `place`."""
        found = np.zeros((len(batch.positions), self.end), np.bool_)
        for index, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            found[index, self.seen(seqs[0], position + 1)] = True
        return found
