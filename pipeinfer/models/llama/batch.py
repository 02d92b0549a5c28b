"""A llama_batch over arrays that are allocated once: filling it costs a few microseconds a row set, not one a field."""

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray


class LlamaBatch:
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
        """The llama_batch of these rows, valid until the next call. Input is `hidden`, or the tokens where it is None,
        or `both`.

        wanted: the rows that must come out of the last layer; None is all.
        """
        n_rows = len(batch.positions)
        call = self._call
        call.n_tokens = n_rows
        self._positions[:n_rows] = batch.positions
        self._flags[:n_rows] = 1 if wanted is None else wanted
        for row, seqs in enumerate(batch.seqs):
            self._n_seqs[row] = len(seqs)
            self._ids[row, : len(seqs)] = seqs
        if hidden is None:
            self._tokens[:n_rows] = batch.tokens
            call.token, call.embd = self._token_pointer, None
        else:
            self._hidden = np.ascontiguousarray(hidden, np.float32)  # held while libllama reads it
            call.token, call.embd = None, _pointer(self._hidden, ctypes.c_float)
        if both:
            self._tokens[:n_rows] = batch.tokens
            call.token = self._token_pointer
        return call


def check_rows(n_rows: int, wanted: npt.NDArray[np.bool_] | None, n_rows_max: int, n_outputs_max: int) -> None:
    """Raises ValueError for what libllama would end the process on."""
    if not 0 < n_rows <= n_rows_max:
        raise ValueError(f"a batch of {n_rows} rows, 1 to {n_rows_max} are possible")
    if wanted is not None and n_rows > n_outputs_max < np.count_nonzero(wanted):
        raise ValueError(f"{np.count_nonzero(wanted)} rows want logits, at most {n_outputs_max} can")


def free_cells(library: ModuleType, memory: object, batch: Batch) -> None:
    """Free the batch's cells, the newest of their sequences: the cache is as it was before."""
    first: dict[int, int] = {}
    for position, seqs in zip(batch.positions.tolist(), batch.seqs, strict=True):
        for seq in seqs:
            first[seq] = min(position, first.get(seq, position))
    for seq, position in first.items():
        library.llama_memory_seq_rm(memory, seq, position, -1)


def _pointer(array: npt.NDArray[Any], item: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(item))
