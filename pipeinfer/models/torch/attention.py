"""Which cells of a KV cache each sequence has, by position, and attention of a run's rows to the cells that they see.
Knows keys and values of one layer at a time, no weights.

A cell is free when no sequence has it. Removed cells are not parked: attention reads cells in the order of positions.
Keys and values are (n_head_kv, n_cells, head_dim). The query heads that share a key head are rows of one product, so
that no key is repeated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import IntArray
from pipeinfer.models.llama.rows import first_positions
from pipeinfer.models.torch.matrices import in_groups

CellNumbers = npt.NDArray[np.int64]


class CacheFull(RuntimeError):
    """A batch needs more cells than are free. The cache is as it was before."""


class CellTable:
    """For n_seq sequences of up to n_cells positions each."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.n_cells, self.n_seq = n_cells, n_seq
        self.clear()

    def clear(self) -> None:
        # by sequence and position the cell + 1; untouched pages take no memory
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
        source, target = self._at[src, first:last], self._at[dst, first:last]
        assert not target[source > 0].any(), f"sequence {dst} has cells at positions [{first}, {last})"
        self._n_holders[source[source > 0] - 1] += 1
        target[source > 0] = source[source > 0]
        self._end[dst] = max(self._end[dst], last)

    def _remove(self, seq: int, first: int, last: int) -> None:
        if first >= last:
            return
        removed = self._at[seq, first:last]
        self._n_holders[removed[removed > 0] - 1] -= 1
        removed[:] = 0
        if last == self._end[seq]:
            rest = np.flatnonzero(self._at[seq, :first])
            self._end[seq] = int(rest[-1]) + 1 if rest.size else 0

    def place(self, batch: Batch) -> None:
        """Give every row a cell for all its sequences. Raises CacheFull; ValueError when a row is not the next of its
        sequences. Nothing has changed then."""
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

    def forget(self, batch: Batch) -> None:
        """Undo `place` for the newest batch of its sequences."""
        for seq, position in first_positions(batch).items():
            self._remove(seq, position, self._end[seq])

    def of_rows(self, batch: Batch) -> CellNumbers:
        """(n_rows,) the cells that `place` gave."""
        return self._at[[seqs[0] for seqs in batch.seqs], batch.positions].astype(np.int64) - 1

    def cells_of(self, seq: int, end: int) -> CellNumbers:
        """The sequence's cells at positions [0, end), in the order of positions."""
        cells = self._at[seq, :end].astype(np.int64) - 1
        return cells if end == 0 or cells.min() >= 0 else cells[cells >= 0]

    def order(self, batch: Batch) -> CellNumbers:
        """(n_rows, most cells of a row): the cells that each row sees, by positions, then -1. After `place`."""
        order = np.full((len(batch.positions), int(batch.positions.max()) + 1), -1, np.int64)
        for row, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            order[row, : position + 1] = self._at[seqs[0], : position + 1].astype(np.int64) - 1
        return order

    def mask(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """(n_rows, cells up to the last in use): which of them each row sees. After `place`."""
        mask = np.zeros((len(batch.positions), self.end), np.bool_)
        for row, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            mask[row, self.cells_of(seqs[0], position + 1)] = True
        return mask


Upload = Callable[[torch.Tensor], torch.Tensor]

SPARSE = 2.0  # attention by sequence is chosen where all rows over all cells would compute more than this factor
BLOCK = 256  # cells that `attend_in_order` adds up at once


class VisibleCells(Protocol):
    """The cells that each row of a run sees."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """(n_rows, n_head, head_dim) queries -> (n_rows, n_head * head_dim)."""
        ...


def grouped(queries: torch.Tensor, n_head_kv: int) -> torch.Tensor:
    """(n_rows, n_head, d) -> (1, n_head_kv, n_rows * heads of a group, d)."""
    n_rows, n_head, length = queries.shape
    split = queries.view(n_rows, n_head_kv, n_head // n_head_kv, length)
    return split.transpose(0, 1).reshape(1, n_head_kv, -1, length)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of all rows to all of these cells, (n_head_kv, n, head_dim); `mask` is added to the scores."""
    n_rows, n_head, length = queries.shape
    sums = scaled_dot_product_attention(
        grouped(queries, len(keys)), keys[None], values[None], attn_mask=mask, scale=scale
    )
    return sums.view(len(keys), n_rows, n_head // len(keys), length).transpose(0, 1).reshape(n_rows, n_head * length)


def additive(visible: torch.Tensor, n_group: int, dtype: torch.dtype) -> torch.Tensor:
    """(n_rows, n_cells) -> (n_rows * n_group, n_cells): 0 for visible cells, else minus infinity."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(n_group, 0)


@contextmanager
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


class _Masked(NamedTuple):
    """Rows, all where that is None, their cells, and the mask over these."""

    rows: torch.Tensor | None
    cells: torch.Tensor | slice
    mask: torch.Tensor | None


class MaskedCells:
    """Rows over cells that several of them share, each under a mask."""

    def __init__(self, parts: Sequence[_Masked]) -> None:
        self.parts = parts

    @classmethod
    def first(cls, visible: torch.Tensor, n_group: int, dtype: torch.dtype) -> "MaskedCells":
        """All rows over the first cells, of which each sees those of `visible`, (n_rows, n_cells)."""
        # not asked of a GPU, which the host would wait for
        sees_all = visible.device.type == "cpu" and bool(visible.all())
        mask = None if sees_all else additive(visible, n_group, dtype)
        return cls([_Masked(None, slice(visible.shape[1]), mask)])

    @staticmethod
    def by_sequence(
        positions: IntArray, seqs: Sequence[int], table: CellTable, n_group: int, dtype: torch.dtype, upload: Upload
    ) -> "MaskedCells":
        """The rows of each sequence over its cells in the order of positions. `upload`: to the device of the cache."""
        parts, owners = [], np.array(seqs)
        for seq in np.unique(owners).tolist():
            (rows,) = np.nonzero(owners == seq)
            end = int(positions[rows].max()) + 1
            visible = torch.from_numpy(np.arange(end) <= positions[rows, None])
            cells, mask = upload(torch.from_numpy(table.cells_of(seq, end))), additive(upload(visible), n_group, dtype)
            parts.append(_Masked(None if len(rows) == len(owners) else upload(torch.from_numpy(rows)), cells, mask))
        return MaskedCells(parts)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        outputs = []
        for rows, cells, mask in self.parts:
            if isinstance(cells, slice):
                visible_keys, visible_values = keys[:, cells], values[:, cells]
            else:
                visible_keys, visible_values = keys.index_select(1, cells), values.index_select(1, cells)
            queries_of_rows = queries if rows is None else queries[rows]
            outputs.append(attend(queries_of_rows, visible_keys, visible_values, scale, mask))
        if self.parts[0].rows is None:
            return outputs[0]
        sums = queries.new_empty((len(queries), queries[0].numel()))
        for part, output in zip(self.parts, outputs, strict=True):
            sums[part.rows] = output
        return sums


def is_sparse(batch: Batch, n_cells: int) -> bool:
    """Whether attention by sequence computes far less than all rows over the first `n_cells`."""
    n_visible = int(batch.positions.sum()) + len(batch.positions)
    return SPARSE * n_visible < len(batch.positions) * n_cells


class RowByRow:
    """Each row by itself over its sequence's cells in the order of positions: its result follows from its position and
    these cells alone. For CPUs, with one thread: each of several has its own piece of a buffer, whose alignment changes
    the bits (measured)."""

    def __init__(self, batch: Batch, table: CellTable) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}  # by sequence: (row, number of cells that it sees)
        for row, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            self._rows.setdefault(seqs[0], []).append((row, position + 1))
        self._cells = {
            seq: torch.from_numpy(table.cells_of(seq, max(end for _, end in rows))) for seq, rows in self._rows.items()
        }

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        sums: list[torch.Tensor | None] = [None] * len(queries)
        for seq, rows in self._rows.items():
            seq_keys, seq_values = keys.index_select(1, self._cells[seq]), values.index_select(1, self._cells[seq])
            with one_thread():
                for row, end in rows:
                    query = queries[row : row + 1]
                    sums[row] = attend(query, seq_keys[:, :end], seq_values[:, :end], scale, None)
        return torch.cat(sums)


class InOrder:
    """Rows in groups of one size, each over its sequence's cells in the order of positions, BLOCK after BLOCK: kernels
    have one shape in every run, so that a row's sums have one order. For devices and recordings: missing cells add
    nothing. `order`: (n_rows, n), each row's cells, then -1."""

    def __init__(self, order: torch.Tensor, group: int) -> None:
        self._order, self._group = order, group

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return in_groups(self._group, partial(attend_in_order, keys, values, scale), queries, self._order)[0]


def attend_in_order(
    keys: torch.Tensor, values: torch.Tensor, scale: float, queries: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """In float32, whatever the cache's type. Each row sees its first cell at least."""
    n_rows, n_head, length = queries.shape
    wide = queries.float().reshape(n_rows * len(keys), -1, length)
    top = torch.full((*wide.shape[:2], 1), -torch.inf, device=wide.device)
    total, sums = torch.zeros_like(top), torch.zeros_like(wide)
    for cells in pad(order, (0, -order.shape[1] % BLOCK), value=-1).split(BLOCK, 1):
        block_keys, block_values = (_of_cells(cache, cells) for cache in (keys, values))
        missing = (cells < 0).repeat_interleave(len(keys), 0)[:, None]
        weights = (torch.bmm(wide, block_keys.mT) * scale).masked_fill_(missing, -torch.inf)
        higher = torch.maximum(top, weights.amax(2, keepdim=True))
        weights, shrink = torch.exp(weights - higher), torch.exp(top - higher)
        total, sums = total * shrink + weights.sum(2, keepdim=True), sums * shrink + torch.bmm(weights, block_values)
        top = higher
    return (sums / total).view(n_rows, n_head * length)


def _of_cells(cache: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """(n_head_kv, n_cells, d) of (n_rows, n) cells -> (n_rows * n_head_kv, n, d)."""
    rows = cache.index_select(1, cells.clamp_min(0).flatten()).view(len(cache), *cells.shape, -1)
    return rows.transpose(0, 1).flatten(0, 1).float()
