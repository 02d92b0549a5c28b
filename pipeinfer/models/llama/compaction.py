"""Pack the cells of a KV cache: parked ones are free again, all others lie in the order of positions. Knows no rows.

What sequences share is packed with the shortest of them, before what the others have behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from pipeinfer.core.runs import KvOp
from pipeinfer.models.llama import ggml

COMPACT_CELLS = 256
"""Cells moved at a time when packing: bounds the memory the copy needs."""


class Compaction:
    """Of a context whose parked cells are in the sequence `spare`, its highest. `whole`: a sequence has a state beside
    its cells, and can only be moved as a whole."""

    def __init__(self, lib: Any, context: Any, spare: int, whole: bool = False) -> None:
        self._lib, self._context, self._spare, self._whole = lib, context, spare, whole
        self._memory = lib.llama_get_memory(context)
        self._shared: list[KvOp] = []

    def share(self, op: KvOp) -> None:
        """A SHARED operation: the cells of its `dst` are taken out, and are those of its `src` again after `run`."""
        self._lib.llama_memory_seq_rm(self._memory, op.dst, op.first, op.last)
        self._shared.append(op)

    def run(self) -> None:
        """Free what is parked and move all else to the front, the cells of a sequence in the order of positions."""
        self._lib.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
        seqs = sorted((seq for seq in range(self._spare) if self._end(seq)), key=lambda seq: (self._end(seq), seq))
        if len(seqs) == 1 and not self._whole:
            self._pack(seqs[0])
        elif seqs:
            self._pack_all(seqs)
        for op in self._shared:
            self._lib.llama_memory_seq_cp(self._memory, op.src, op.dst, op.first, op.last)
        self._shared.clear()

    def _pack_all(self, seqs: Sequence[int]) -> None:
        """Take every sequence out and put it back: while another's cells lie between, there is no room to move them."""
        states = [(seq, self._save(seq)) for seq in seqs]
        self._lib.llama_memory_clear(self._memory, False)
        for seq, state in states:
            self._restore(seq, state)

    def _save(self, seq: int) -> ctypes.Array[ctypes.c_uint8]:
        size = self._lib.llama_state_seq_get_size(self._context, seq)
        state = (ctypes.c_uint8 * size)()
        if not self._lib.llama_state_seq_get_data(self._context, state, size, seq):
            raise RuntimeError(f"packing the KV cache failed: sequence {seq} cannot be saved; {ggml.last_errors()}")
        return state

    def _restore(self, seq: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        if not self._lib.llama_state_seq_set_data(self._context, state, len(state), seq):
            raise RuntimeError(f"packing the KV cache failed: sequence {seq} cannot be put back; {ggml.last_errors()}")

    def _pack(self, seq: int) -> None:
        """Move the cells of the only sequence to the front, some at a time, in the order they have.

        With exact numerics that is the order of positions: cells are only ever handed out in ascending order.
        """
        lib, memory, spare = self._lib, self._memory, self._spare
        start = int(lib.llama_memory_seq_pos_min(memory, seq))
        for position in range(max(start, 0), self._end(seq), COMPACT_CELLS):
            end = position + COMPACT_CELLS
            lib.llama_memory_seq_cp(memory, seq, spare, position, end)
            state = self._save(spare)
            lib.llama_memory_seq_rm(memory, spare, -1, -1)
            lib.llama_memory_seq_rm(memory, seq, position, end)
            self._restore(spare, state)
            lib.llama_memory_seq_cp(memory, spare, seq, position, end)
            lib.llama_memory_seq_rm(memory, spare, -1, -1)

    def _end(self, seq: int) -> int:
        """The position behind the last of a sequence; 0 if it is empty."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1
