"""Which cells the rows of a run see, and attention to them. Knows keys and values of one layer at a time, no weights.

Keys and values are (n_head_kv, n_cells, head_dim). The query heads that share a key head are rows of one product, so
that no key is repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from pipeinfer.core.interfaces import Batch
from pipeinfer.models.torch.cells import CellTable
from pipeinfer.models.torch.groups import in_groups

SPARSE = 2.0

BLOCK = 256
"""Cells that `attend_in_order` adds up at once."""


class Seen(Protocol):
    """What a run's rows see."""

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
    """Of rows that all see these cells, (n_head_kv, n, head_dim), as far as `mask`, which is added, lets them."""
    n_rows, n_head, length = queries.shape
    found = scaled_dot_product_attention(
        grouped(queries, len(keys)), keys[None], values[None], attn_mask=mask, scale=scale
    )
    return found.view(len(keys), n_rows, n_head // len(keys), length).transpose(0, 1).reshape(n_rows, n_head * length)


def additive(seen: torch.Tensor, n_group: int, dtype: torch.dtype) -> torch.Tensor:
    """(n_rows, n_cells) -> (n_rows * n_group, n_cells): 0 for what is seen, else minus infinity."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    return mask.repeat_interleave(n_group, 0)


@contextmanager
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


class MaskedCells:
    """All rows at once, over the first cells. `seen`: (n_rows, n_cells), which of them each row sees."""

    def __init__(self, seen: torch.Tensor, n_group: int, dtype: torch.dtype) -> None:
        self._n_cells = seen.shape[1]
        # to ask a GPU would be to wait for it
        self._mask = None if seen.device.type == "cpu" and seen.all() else additive(seen, n_group, dtype)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return attend(queries, keys[:, : self._n_cells], values[:, : self._n_cells], scale, self._mask)


class BySequence:
    """The rows of each sequence together, over its cells alone: of many requests each row sees few of all cells."""

    def __init__(self, batch: Batch, table: CellTable, n_group: int, dtype: torch.dtype) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # rows, cells, mask
        firsts = torch.tensor([seqs[0] for seqs in batch.seqs])
        positions = torch.from_numpy(batch.positions)
        for seq in firsts.unique().tolist():
            (rows,) = (firsts == seq).nonzero(as_tuple=True)
            end = int(positions[rows].max()) + 1
            mask = additive(torch.arange(end) <= positions[rows, None], n_group, dtype)
            self._parts.append((rows, torch.from_numpy(table.seen(seq, end)), mask))

    @staticmethod
    def pays(batch: Batch, n_cells: int) -> bool:
        """Whether that is far less to do than to attend to all of the first `n_cells` and leave most out."""
        n_seen = int(batch.positions.sum()) + len(batch.positions)
        return SPARSE * n_seen < len(batch.positions) * n_cells

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        found = queries.new_empty((len(queries), queries[0].numel()))
        for rows, cells, mask in self._parts:
            own_keys, own_values = keys.index_select(1, cells), values.index_select(1, cells)
            found[rows] = attend(queries[rows], own_keys, own_values, scale, mask)
        return found


class RowByRow:
    """Each row by itself over the cells of its sequence, put into the order of positions: what it computes follows from
    its position and from those cells alone. For CPUs, with one thread: of several each has its own piece of a buffer,
    and how that piece is aligned shows in the bits (measured)."""

    def __init__(self, batch: Batch, table: CellTable) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}  # by sequence: (row, how many cells it sees)
        for row, (position, seqs) in enumerate(zip(batch.positions.tolist(), batch.seqs, strict=True)):
            self._rows.setdefault(seqs[0], []).append((row, position + 1))
        self._cells = {
            seq: torch.from_numpy(table.seen(seq, max(end for _, end in rows))) for seq, rows in self._rows.items()
        }

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        found: list[torch.Tensor | None] = [None] * len(queries)
        for seq, rows in self._rows.items():
            own_keys, own_values = keys.index_select(1, self._cells[seq]), values.index_select(1, self._cells[seq])
            with one_thread():
                for row, end in rows:
                    own = queries[row : row + 1]
                    found[row] = attend(own, own_keys[:, :end], own_values[:, :end], scale, None)
        return torch.cat(found)


class InOrder:
    """Rows in groups of one size, each over the cells of its sequence in the order of positions, BLOCK after BLOCK: the
    kernels have one shape whatever the run is, so that a row's sums have one order. For devices, and for recordings:
    cells that a row has not add nothing. `order`: (n_rows, n), of each row its cells, then -1."""

    def __init__(self, order: torch.Tensor, group: int) -> None:
        self._order, self._group = order, group

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return in_groups(self._group, partial(attend_in_order, keys, values, scale), queries, self._order)[0]


def attend_in_order(
    keys: torch.Tensor, values: torch.Tensor, scale: float, queries: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """In float32, whatever the cache has. A row sees its first cell at least."""
    n_rows, n_head, length = queries.shape
    asked = queries.float().reshape(n_rows * len(keys), -1, length)
    top = torch.full((*asked.shape[:2], 1), -torch.inf, device=asked.device)
    total, found = torch.zeros_like(top), torch.zeros_like(asked)
    for cells in pad(order, (0, -order.shape[1] % BLOCK), value=-1).split(BLOCK, 1):
        own_keys, own_values = (_of_cells(each, cells) for each in (keys, values))
        unseen = (cells < 0).repeat_interleave(len(keys), 0)[:, None]
        weights = (torch.bmm(asked, own_keys.mT) * scale).masked_fill_(unseen, -torch.inf)
        higher = torch.maximum(top, weights.amax(2, keepdim=True))
        weights, kept = torch.exp(weights - higher), torch.exp(top - higher)
        total, found = total * kept + weights.sum(2, keepdim=True), found * kept + torch.bmm(weights, own_values)
        top = higher
    return (found / total).view(n_rows, n_head * length)


def _of_cells(cache: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """(n_head_kv, n_cells, d) of (n_rows, n) cells -> (n_rows * n_head_kv, n, d)."""
    found = cache.index_select(1, cells.clamp_min(0).flatten()).view(len(cache), *cells.shape, -1)
    return found.transpose(0, 1).flatten(0, 1).float()


class BlockOfPrompt:
    """Rows that follow each other in one sequence, over its cells in the order of positions."""

    def __init__(
        self, positions: Sequence[int], seq: int, table: CellTable, n_group: int, dtype: torch.dtype,
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        """`upload`: to the device of the cache."""
        end = positions[-1] + 1
        self._cells = upload(torch.from_numpy(table.seen(seq, end)))
        seen = torch.arange(end) <= torch.tensor(positions)[:, None]
        self._mask = additive(upload(seen), n_group, dtype)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        own_keys, own_values = keys.index_select(1, self._cells), values.index_select(1, self._cells)
        return attend(queries, own_keys, own_values, scale, self._mask)
