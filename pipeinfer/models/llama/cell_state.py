"""The cells of a sequence as libllama saves them: rounded between caches, and packed in one. Knows libllama, no stage.

A state holds, after a mark and the sequence: of each cache streams and cells; of each cell position, number of
sequences, and the sequence; whether V is transposed, and layers; for K of every layer, then V of every layer, the type,
the bytes of a row, and the rows."""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.runs import KvOp
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.params import IS_X86

F16, BF16 = 1, 30
STATE_CELLS = 256  # cells copied at a time: bounds the memory of a copy
ROPE_OF_PLANES, PLANE_BYTES = (8, 40), 12
"""libllama's types of positions with several dimensions, and their bytes in a cell."""

_HEAD, _CACHE, _CELL, _LAYERS, _RECORD = "<Ii", "<II", "<iIi", "<II", "<iQ"
N_CACHES = 2  # where some layers have a sliding window

StateBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The layout of a model's cells.

    plane_bytes  further positions of each cell, where a position has several dimensions
    has_values   V is there, and not a part of K
    rounds_keys  the cache that decodes has K in BF16 and V in F16; else the reverse
    window       tokens that the layers with the shortest window see; 0: all"""

    plane_bytes: int = 0
    has_values: bool = True
    rounds_keys: bool = True
    window: int = 0

    @classmethod
    def of(cls, library: ModuleType, model: object, info: ModelInfo) -> "CacheForm":
        """Of a loaded model. x86 has vector instructions for keys in BF16; elsewhere rounded values cost less."""
        has_planes = library.llama_model_rope_type(model) in ROPE_OF_PLANES
        has_values, window = not info.layers.shares_values, library.llama_model_n_swa(model)
        return cls(PLANE_BYTES if has_planes else 0, has_values, IS_X86 or not has_values, window)

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions [first, end) in pieces copied at a time. A state lacks cells out of its last one's window, and
        all before a multiple of the window where that is a chunk."""
        n_most = min(STATE_CELLS, self.window or STATE_CELLS)
        while first < end:
            edge = (first // self.window + 1) * self.window if self.window else end
            stop = min(first + n_most, edge, end)
            yield first, stop
            first = stop

    @property
    def types(self) -> tuple[int, int]:
        """Of K and V in the cache that decodes."""
        return BF16 if self.rounds_keys else F16, F16 if self.rounds_keys and self.has_values else BF16


def save_state(library: ModuleType, context: object, seq: int) -> StateBytes:
    """The cells of a sequence."""
    state = np.empty(library.llama_state_seq_get_size(context, seq), np.uint8)
    n_bytes = library.llama_state_seq_get_data(context, _as_bytes(state), len(state), seq)
    if n_bytes != len(state):
        raise RuntimeError(f"the cells of sequence {seq} cannot be saved: {n_bytes} of {len(state)} bytes")
    return state


def state_bytes(n_layers: int, cell_bytes: int) -> tuple[int, int]:
    """What saved cells take at most: bytes for all together, and for each. `cell_bytes`: of one, in all layers."""
    caches = N_CACHES * (struct.calcsize(_CACHE) + struct.calcsize(_LAYERS))
    whole = struct.calcsize(_HEAD) + caches + 2 * n_layers * struct.calcsize(_RECORD)
    return whole, N_CACHES * (struct.calcsize(_CELL) + PLANE_BYTES) + cell_bytes


def restore_state(library: ModuleType, context: object, seq: int, state: StateBytes) -> bool:
    """Put cells into a sequence; False if there is no room for them."""
    return bool(library.llama_state_seq_set_data(context, _as_bytes(state), len(state), seq))


def round_state(state: StateBytes, form: CacheForm, before: int, after: int) -> StateBytes:
    """The state with K, or V, rounded in place from type `before` to type `after`: F16 to BF16, or back. The other is
    F16. Models with sliding windows have several caches. Raises ValueError for another libllama's layout."""
    at = struct.calcsize(_HEAD)
    while at < len(state):
        at = _round_cache(state, at, form, before, after)
    if at != len(state):
        raise ValueError(f"a state of {len(state)} bytes, of which {at} are understood")
    return state


def _round_cache(state: StateBytes, at: int, form: CacheForm, before: int, after: int) -> int:
    """Round the cache whose state begins at byte `at`; its end."""
    n_streams, n_cells = struct.unpack_from(_CACHE, state.data, at)
    if n_streams != 1:
        raise ValueError(f"a state of {n_streams} streams; this is not understood")
    at += struct.calcsize(_CACHE)
    if n_cells == 0:
        return at
    at += n_cells * (struct.calcsize(_CELL) + form.plane_bytes)
    v_transposed, n_layers = struct.unpack_from(_LAYERS, state.data, at)
    at += struct.calcsize(_LAYERS)
    if v_transposed:
        raise ValueError("a state with V transposed; this is not understood")
    n_records = 2 * n_layers if form.has_values else n_layers
    for record in range(n_records):
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


def _as_bytes(state: StateBytes) -> ctypes.Array[ctypes.c_uint8]:
    """The same memory for libllama."""
    return (ctypes.c_uint8 * len(state)).from_buffer(state.data)


@cache
def _bf16_of_f16() -> npt.NDArray[np.uint16]:
    """By the bits of an F16 number those of the nearest BF16 number, ties to even."""
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(is_nan, (bits >> 16) | 64, rounded).astype(np.uint16)


@cache
def _f16_of_bf16() -> npt.NDArray[np.uint16]:
    """The reverse; numbers too large for F16 become its largest."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    largest = np.finfo(np.float16).max
    return np.clip(values, -largest, largest).astype(np.float16).view(np.uint16)


def next_position(library: ModuleType, memory: object, seq: int) -> int:
    """The position behind the last of a sequence; 0 if it is empty."""
    return int(library.llama_memory_seq_pos_max(memory, seq)) + 1


class Compaction:
    """Packs a context's cells. `spare`: the sequence of parked cells; the next one is empty. `whole`: a sequence has a
    state beside its cells, and can only be moved as a whole. Where layers have a window, libllama treats a cell outside
    of it as free if one sequence alone has it: meanwhile the sequence after `spare`, the guard, has all cells too."""

    def __init__(self, lib: Any, context: Any, spare: int, form: CacheForm, whole: bool = False) -> None:
        self._lib, self._context, self._spare, self._form, self._whole = lib, context, spare, form, whole
        self._memory = lib.llama_get_memory(context)
        self._shared: list[KvOp] = []

    def share(self, op: KvOp) -> None:
        """A SHARED operation: remove the cells of its `dst`; `run` gives it those of its `src` again."""
        self._lib.llama_memory_seq_rm(self._memory, op.dst, op.first, op.last)
        self._shared.append(op)

    def run(self) -> None:
        """Free parked cells and move all others to the front, each sequence's in the order of positions."""
        lib, memory, guard = self._lib, self._memory, self._spare + 1
        lib.llama_memory_seq_rm(memory, self._spare, -1, -1)
        starts = {op.dst: op.last for op in self._shared}
        ends = sorted((end, seq) for seq in range(self._spare) if (end := next_position(self._lib, self._memory, seq)))
        if self._form.window:
            for end, seq in ends:
                lib.llama_memory_seq_cp(memory, seq, guard, 0, end)
        for end, seq in ends:
            if self._whole:
                self._restore(seq, save_state(lib, self._context, seq))
                continue
            for piece in self._form.pieces(starts.get(seq, 0), end):
                self._move(seq, *piece, [other for _, other in ends] if self._form.window else [])
        if self._form.window and ends:
            end, seq = ends[-1]
            lib.llama_memory_seq_cp(memory, seq, self._spare, end - 1, end)
            # the search for free cells then starts behind all of them
            self._restore(self._spare, save_state(lib, self._context, self._spare))
            lib.llama_memory_seq_rm(memory, self._spare, -1, -1)
            lib.llama_memory_seq_rm(memory, guard, -1, -1)
        for op in self._shared:
            lib.llama_memory_seq_cp(memory, op.src, op.dst, op.first, op.last)
        self._shared.clear()

    def _move(self, seq: int, first: int, end: int, guarded: list[int]) -> None:
        """Pack the cells of a sequence at positions [first, end). All before them are packed."""
        lib, memory, spare, guard = self._lib, self._memory, self._spare, self._spare + 1
        lib.llama_memory_seq_cp(memory, seq, spare, first, end)
        cells = save_state(lib, self._context, spare)
        owners = (seq, guard) if guarded else (seq,)
        for each in (spare, *owners):
            lib.llama_memory_seq_rm(memory, each, first, end)
        for each in guarded:
            lib.llama_memory_seq_cp(memory, each, guard, first, end)
        self._restore(spare, cells)
        for each in owners:
            lib.llama_memory_seq_cp(memory, spare, each, first, end)
        lib.llama_memory_seq_rm(memory, spare, -1, -1)

    def _restore(self, seq: int, state: StateBytes) -> None:
        if not restore_state(self._lib, self._context, seq, state):
            raise RuntimeError(f"packing the KV cache failed: sequence {seq} cannot be restored; {ggml.last_errors()}")
