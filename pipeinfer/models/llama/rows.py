"""A batch's rows: checked, cut into parts, padded to groups, as libllama takes them and its logits; and checks of their
results. Loads no library."""

import ctypes
import math
from dataclasses import dataclass
from itertools import pairwise
from types import EllipsisType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault
from pipeinfer.models.llama.params import in_whole_groups

Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


def check_rows(n_rows: int, wanted: Flags | None, n_rows_max: int, n_outputs_max: int) -> None:
    """Raises ValueError for batches on which libllama ends the process."""
    if not 0 < n_rows <= n_rows_max:
        raise ValueError(f"a batch of {n_rows} rows, 1 to {n_rows_max} are possible")
    if wanted is not None and n_rows > n_outputs_max < np.count_nonzero(wanted):
        raise ValueError(f"{np.count_nonzero(wanted)} rows want logits, at most {n_outputs_max} can")


def first_positions(batch: Batch) -> dict[int, int]:
    """The lowest position of each sequence in the batch."""
    first: dict[int, int] = {}
    for position, seqs in zip(batch.positions.tolist(), batch.seqs, strict=True):
        for seq in seqs:
            first[seq] = min(position, first.get(seq, position))
    return first


def blocks_of(batch: Batch) -> list[tuple[int, int]]:
    """The rows [start, end) of each block of a batch of whole blocks."""
    assert batch.span, "rows that are no blocks"
    first, n_rows = int(batch.positions[0]), len(batch.positions)
    edges = [edge - first for edge in batch.span.edges if first <= edge <= first + n_rows]
    assert edges[0] == 0 and edges[-1] == n_rows, f"rows {first} and {edges} on are no whole blocks"
    return list(pairwise(edges))


def stateful_parts(batch: Batch, exact: bool) -> list[Indices]:
    """The rows of each part where layers have states: sums depend on the number of a sequence's rows at once, and
    libllama reorders a batch of several sequences. Whole blocks; else each row, or without `exact` each sequence."""
    if batch.span:
        return [np.arange(start, end) for start, end in blocks_of(batch)]
    if exact:
        return [np.array([row]) for row in range(len(batch.positions))]
    firsts = np.array([seqs[0] for seqs in batch.seqs])
    return [np.flatnonzero(firsts == seq) for seq in dict.fromkeys(firsts.tolist())]


def part_of(batch: Batch, rows: Indices) -> Batch:
    """These rows, without `hidden`, as a batch of their own, each in its first sequence alone."""
    seqs = [batch.seqs[row][:1] for row in rows]
    return Batch(batch.tokens[rows], batch.positions[rows], seqs, None, batch.wanted[rows], adapters=batch.adapters)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch for libllama, which is in whole groups of rows where each row has the same bits in these alone.

    hidden   (n_rows, n_embd), the input of the first layer, if it is not tokens
    wanted   (n_rows,), on the last stage: the rows with logits
    logits   which of these logits are the original batch's
    n_added  rows behind those of the original batch"""

    batch: Batch
    hidden: FloatArray | None
    wanted: Flags | None
    logits: Flags | slice | EllipsisType = ...
    n_added: int = 0


def pad_to_groups(batch: Batch, hidden: FloatArray | None, wanted: Flags | None, seq: int, group: int) -> PaddedBatch:
    """Repeat the last row to fill whole groups of `group` rows, in the empty sequence `seq` from position 0 on, and
    compute the logits of further rows, the added ones first, until these fill whole groups too."""
    n_rows = len(batch.positions)
    n_added = in_whole_groups(n_rows, group) - n_rows
    rows = np.minimum(np.arange(n_rows + n_added), n_rows - 1)
    positions = np.concatenate([batch.positions, np.arange(n_added, dtype=np.int32)])
    seqs = [*batch.seqs, *[(seq,)] * n_added]
    padded = Batch(batch.tokens[rows], positions, seqs, None, batch.wanted[rows], adapters=batch.adapters)
    hidden = None if hidden is None else hidden[rows]
    if wanted is None:
        return PaddedBatch(padded, hidden, None, n_added=n_added)
    original = np.concatenate([wanted, np.zeros(n_added, np.bool_)])
    n_wanted = int(np.count_nonzero(original))
    others = np.flatnonzero(~original)[::-1]
    computed = original.copy()
    computed[others[: in_whole_groups(n_wanted, group) - n_wanted]] = True
    is_original = original[computed]
    first = slice(n_wanted)  # a view, if the batch's own logits come first
    return PaddedBatch(padded, hidden, computed, first if is_original[first].all() else is_original, n_added)


def check_result(rows: FloatArray, are_logits: bool, where: str) -> None:
    """ModelFault if a row, (n_rows, n), cannot be a residual stream or logits of a sound model. Every value must be
    finite, except that logits may be -inf (an excluded token) and must not be all equal. One pass over logits, two over
    a residual stream, in the ordinary case: NaN counts as the highest value."""
    if not rows.size:
        return
    highest = rows.item(rows.argmax())
    lowest = highest if are_logits else rows.item(rows.argmin())
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        sound = np.isfinite(rows) | (np.isneginf(rows) & are_logits)
        if not sound.all():
            bad, row = rows[~sound][0], np.argmin(sound.all(axis=1))
            raise _fault(f"a value that is no number ({bad}) in row {row} of {len(rows)}", where)
    if are_logits and rows.shape[1] > 1:
        for index, row in enumerate(rows):
            if row[0] == row[-1] and (row == row[0]).all():
                raise _fault(f"the same logit ({row[0]}) for every token in row {index} of {len(rows)}", where)


def _fault(result: str, where: str) -> ModelFault:
    files = "a factor is too large, or a file" if "--lora" in where else "the model file"
    return ModelFault(f"{where} computed {result}: {files} is damaged; copy or download it again")


# -- for libllama


class LlamaBatch:
    """A llama_batch over arrays that are allocated once: filling it costs some microseconds."""

    def __init__(self, library: ModuleType, n_rows_max: int, n_seq_max: int) -> None:
        """Room for n_rows_max rows, in n_seq_max sequences each at most."""
        self._tokens = np.zeros(n_rows_max, np.int32)
        self._positions = np.zeros(n_rows_max, np.int32)
        self._n_seqs = np.ones(n_rows_max, np.int32)
        self._flags = np.zeros(n_rows_max, np.int8)
        self._ids = np.zeros((n_rows_max, n_seq_max), np.int32)
        self._id_pointers = self._ids.ctypes.data + np.arange(n_rows_max, dtype=np.uint64) * self._ids.strides[0]
        self._call = call = library.llama_batch()
        self._token_pointer = _pointer(self._tokens, ctypes.c_int32)
        self._hidden = np.empty(0, np.float32)
        call.pos = _pointer(self._positions, ctypes.c_int32)
        call.n_seq_id = _pointer(self._n_seqs, ctypes.c_int32)
        call.seq_id = _pointer(self._id_pointers, ctypes.POINTER(ctypes.c_int32))
        call.logits = _pointer(self._flags, ctypes.c_int8)

    def fill(
        self, batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None, both: bool = False
    ) -> Any:
        """The llama_batch of these rows, valid until the next call. The input is `hidden`, or the tokens if that is
        None, or `both`. `wanted`: rows that come out of the last layer; None: all."""
        n_rows = len(batch.positions)
        call = self._call
        call.n_tokens = n_rows
        self._positions[:n_rows] = batch.positions
        self._flags[:n_rows] = 1 if wanted is None else wanted
        for row, seqs in enumerate(batch.seqs):
            self._n_seqs[row] = len(seqs)
            self._ids[row, : len(seqs)] = seqs
        call.token = call.embd = None
        if hidden is not None:
            self._hidden = np.ascontiguousarray(hidden, np.float32)  # held while libllama reads it
            call.embd = _pointer(self._hidden, ctypes.c_float)
        if hidden is None or both:
            self._tokens[:n_rows] = batch.tokens
            call.token = self._token_pointer
        return call


class Logits:
    """The logits of a context's last batch, for batches in which up to `n_rows_max` rows want some."""

    def __init__(self, library: ModuleType, context: object, n_rows_max: int, n_vocab: int) -> None:
        self._lib, self._context, self._n_rows_max, self._n_vocab = library, context, n_rows_max, n_vocab
        self._address, self._all = 0, np.empty((0, n_vocab), np.float32)

    def of(self, flags: npt.NDArray[np.bool_]) -> FloatArray:
        """(n_wanted, n_vocab), a view of libllama's buffer, rows in the order of the batch."""
        n_wanted = int(np.count_nonzero(flags))
        if n_wanted == 0:
            return np.empty((0, self._n_vocab), np.float32)
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if address != self._address:  # libllama moves the buffer when it grows
            buffer = (ctypes.c_float * (self._n_rows_max * self._n_vocab)).from_address(address)
            self._address, self._all = address, np.ctypeslib.as_array(buffer).reshape(-1, self._n_vocab)
        return self._all[:n_wanted]


def _pointer(array: npt.NDArray[Any], item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))
