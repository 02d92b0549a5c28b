"""One prompt in a KV cache of its own, and its cells as the cache that decodes wants them. Knows libllama, no stage.

Attention uses tiles only where K and V are of one type, and adds up tile by tile, so that a row's bits depend on where
the cells lie. Here they lie in the order of positions, from the first cell on, whatever the decoding cache holds. What
a block has left is rounded as that cache does before the next one sees it, so that it makes no difference whether the
cells before it are from here or were handed over: another request may have evaluated them.
"""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt

F16, BF16 = 1, 30
PROMPT, PART = 0, 1
STATE_CELLS = 256
"""Cells copied at a time: bounds the memory of a copy."""

N_SEQ = 2
"""Sequences that the context must have: the prompt's, and one for the cells that are copied out."""

# a mark, the sequence; of each cache streams, cells; of each cell position, sequences, the sequence; whether V is
# transposed, layers; of each record type and bytes of a row
_HEAD, _CACHE, _CELL, _LAYERS, _RECORD = "<Ii", "<II", "<iIi", "<II", "<iQ"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CacheForm:
    """What the cells of a model's caches are.

    cell_bytes   what is noted of each beside its position and sequences
    has_values   V is there, and not a part of K
    rounds_keys  the cache that decodes has K in BF16 and V in F16; else the reverse
    window       tokens that the layers with the shortest window see; 0: all see everything
    """

    cell_bytes: int = 0
    has_values: bool = True
    rounds_keys: bool = True
    window: int = 0

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions [first, end) in pieces that are copied at a time. A state lacks what its last cell's window
        leaves out."""
        n_most = min(STATE_CELLS, self.window or STATE_CELLS)
        for start in range(first, end, n_most):
            yield start, min(start + n_most, end)

    @property
    def types(self) -> tuple[int, int]:
        """Of K and V in the cache that decodes."""
        return BF16 if self.rounds_keys else F16, F16 if self.rounds_keys and self.has_values else BF16


class Prefill:
    """Holds, and frees, the `context` in which rows of one prompt are evaluated, as sequence PROMPT. `end`: behind the
    last of them."""

    def __init__(self, library: ModuleType, context: object, form: CacheForm) -> None:
        self.context, self.end, self._lib, self._form = context, 0, library, form
        self._memory = library.llama_get_memory(context)

    def take(self, cells: Bytes, first: int, end: int) -> None:
        """Take a piece's cells, as the cache that decodes has them. Pieces come in ascending order."""
        state = with_values(cells, self._form, BF16, F16)
        if not self._lib.llama_state_seq_set_data(self.context, as_bytes(state), len(state), PART):
            raise RuntimeError(f"the cells {first}-{end} before a prompt's blocks cannot be copied")
        self._lib.llama_memory_seq_cp(self._memory, PART, PROMPT, first, end)
        self._lib.llama_memory_seq_rm(self._memory, PART, -1, -1)
        self.end = end

    def settle(self, first: int, end: int) -> None:
        """The newest rows, [first, end), have been evaluated: round them."""
        pieces = [(self.cells(*piece), piece) for piece in self._form.pieces(first, end)]
        self.forget(first)
        for cells, piece in pieces:
            self.take(cells, *piece)

    def forget(self, first: int) -> None:
        """Free the cells from position `first` on."""
        self._lib.llama_memory_seq_rm(self._memory, PROMPT, first, -1)
        self.end = min(self.end, first)

    def cells(self, first: int, end: int) -> Bytes:
        """A piece's cells as `llama_state_seq_set_data` takes them for the cache that decodes."""
        self._lib.llama_memory_seq_cp(self._memory, PROMPT, PART, first, end)
        state = state_of(self._lib, self.context, PART)
        self._lib.llama_memory_seq_rm(self._memory, PART, -1, -1)
        return with_values(state, self._form, F16, BF16)

    def close(self) -> None:
        self._lib.llama_free(self.context)


def state_of(library: ModuleType, context: object, seq: int) -> Bytes:
    """The cells of a sequence as `llama_state_seq_set_data` takes them."""
    state = np.empty(library.llama_state_seq_get_size(context, seq), np.uint8)
    n_bytes = library.llama_state_seq_get_data(context, as_bytes(state), len(state), seq)
    assert n_bytes == len(state), f"{n_bytes} of {len(state)} bytes of sequence {seq}"
    return state


def with_values(state: Bytes, form: CacheForm, before: int, after: int) -> Bytes:
    """The state of one sequence with K, or V, rounded from type `before` to type `after`, which are F16 and BF16 or the
    reverse; in place. The other is F16.

    There are several caches where some layers have a sliding window. Raises ValueError for a layout that is not known:
    of other caches, or of another libllama.
    """
    at = struct.calcsize(_HEAD)
    while at < len(state):
        at = _round_cache(state, at, form, before, after)
    if at != len(state):
        raise ValueError(f"a state of {len(state)} bytes, of which {at} are understood")
    return state


def _round_cache(state: Bytes, at: int, form: CacheForm, before: int, after: int) -> int:
    """Of the cache whose state begins at byte `at`; its end."""
    n_streams, n_cells = struct.unpack_from(_CACHE, state.data, at)
    if n_streams != 1:
        raise ValueError(f"a state of {n_streams} streams; this is not understood")
    at += struct.calcsize(_CACHE)
    if n_cells == 0:
        return at
    at += n_cells * (struct.calcsize(_CELL) + form.cell_bytes)
    v_transposed, n_layers = struct.unpack_from(_LAYERS, state.data, at)
    at += struct.calcsize(_LAYERS)
    if v_transposed:
        raise ValueError("a state with V transposed; this is not understood")
    n_records = 2 * n_layers if form.has_values else n_layers
    for record in range(n_records):  # K of every layer, then V of every layer
        is_rounded = (record < n_layers) is form.rounds_keys
        type_, row_bytes = struct.unpack_from(_RECORD, state.data, at)
        if type_ != (before if is_rounded else F16):
            raise ValueError(f"record {record} of {n_records} is of type {type_}; this is not understood")
        start = at + struct.calcsize(_RECORD)
        end = start + row_bytes * n_cells
        if is_rounded:
            struct.pack_into("<i", state.data, at, after)
            values = state[start:end].view(np.uint16)
            values[:] = (_bf16_of_f16() if after == BF16 else _f16_of_bf16())[values]
        at = end
    return at


def as_bytes(state: Bytes) -> ctypes.Array[ctypes.c_uint8]:
    """The same memory for libllama."""
    return (ctypes.c_uint8 * len(state)).from_buffer(state.data)


@cache
def _bf16_of_f16() -> npt.NDArray[np.uint16]:
    """For the bits of every F16 number those of the nearest BF16 number, the even one of two."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(is_nan, (bits >> 16) | 64, rounded).astype(np.uint16)


@cache
def _f16_of_bf16() -> npt.NDArray[np.uint16]:
    """The same the other way round; what is too large for F16 becomes its largest number."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    largest = np.finfo(np.float16).max
    return np.clip(values, -largest, largest).astype(np.float16).view(np.uint16)
