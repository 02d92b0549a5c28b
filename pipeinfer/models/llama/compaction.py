"""Pack the cells of a KV cache: parked ones are free again, all others lie in the order of positions. Knows no rows.

Sequences are packed one after the other, each into the first free cells, its own included. These are in ascending
order, so that a cell only moves to the front, and the cells of a sequence keep their order. What sequences share is
packed with the shortest of them, before what the others have behind it.
"""

import ctypes
from typing import Any

from pipeinfer.core.runs import KvOp
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.prefill import CacheForm


class Compaction:
    """Of a context whose parked cells are in the sequence `spare`; the next one is empty. `whole`: a sequence has a
    state beside its cells, and can only be moved as a whole.

    Where layers have a window, libllama takes a cell outside of it for free if it belongs to one sequence alone.
    Meanwhile all cells are the next sequence's, too.
    """

    def __init__(self, lib: Any, context: Any, spare: int, form: CacheForm, whole: bool = False) -> None:
        self._lib, self._context, self._spare, self._form, self._whole = lib, context, spare, form, whole
        self._memory = lib.llama_get_memory(context)
        self._shared: list[KvOp] = []

    def share(self, op: KvOp) -> None:
        """A SHARED operation: the cells of its `dst` are taken out, and are those of its `src` again after `run`."""
        self._lib.llama_memory_seq_rm(self._memory, op.dst, op.first, op.last)
        self._shared.append(op)

    def run(self) -> None:
        """Free what is parked and move all else to the front, the cells of a sequence in the order of positions."""
        lib, memory, guard = self._lib, self._memory, self._spare + 1
        lib.llama_memory_seq_rm(memory, self._spare, -1, -1)
        starts = {op.dst: op.last for op in self._shared}
        ends = sorted((end, seq) for seq in range(self._spare) if (end := self._end(seq)))
        if self._form.window:
            for end, seq in ends:
                lib.llama_memory_seq_cp(memory, seq, guard, 0, end)
        for end, seq in ends:
            if self._whole:
                self._restore(seq, self._save(seq))
                continue
            for piece in self._form.pieces(starts.get(seq, 0), end):
                self._move(seq, *piece, [other for _, other in ends] if self._form.window else [])
        if self._form.window and ends:
            end, seq = ends[-1]
            lib.llama_memory_seq_cp(memory, seq, self._spare, end - 1, end)
            self._restore(self._spare, self._save(self._spare))  # the search for cells goes on behind all of them
            lib.llama_memory_seq_rm(memory, self._spare, -1, -1)
            lib.llama_memory_seq_rm(memory, guard, -1, -1)
        for op in self._shared:
            lib.llama_memory_seq_cp(memory, op.src, op.dst, op.first, op.last)
        self._shared.clear()

    def _move(self, seq: int, first: int, end: int, guarded: list[int]) -> None:
        """Pack the cells of a sequence at positions [first, end). All before them are packed."""
        lib, memory, spare, guard = self._lib, self._memory, self._spare, self._spare + 1
        lib.llama_memory_seq_cp(memory, seq, spare, first, end)
        cells = self._save(spare)
        owners = (seq, guard) if guarded else (seq,)
        for each in (spare, *owners):
            lib.llama_memory_seq_rm(memory, each, first, end)
        for each in guarded:
            lib.llama_memory_seq_cp(memory, each, guard, first, end)
        self._restore(spare, cells)
        for each in owners:
            lib.llama_memory_seq_cp(memory, spare, each, first, end)
        lib.llama_memory_seq_rm(memory, spare, -1, -1)

    def _save(self, seq: int) -> ctypes.Array[ctypes.c_uint8]:
        size = self._lib.llama_state_seq_get_size(self._context, seq)
        state = (ctypes.c_uint8 * size)()
        if not self._lib.llama_state_seq_get_data(self._context, state, size, seq):
            raise RuntimeError(f"packing the KV cache failed: sequence {seq} cannot be saved; {ggml.last_errors()}")
        return state

    def _restore(self, seq: int, state: ctypes.Array[ctypes.c_uint8]) -> None:
        if not self._lib.llama_state_seq_set_data(self._context, state, len(state), seq):
            raise RuntimeError(f"packing the KV cache failed: sequence {seq} cannot be put back; {ggml.last_errors()}")

    def _end(self, seq: int) -> int:
        """The position behind the last of a sequence; 0 if it is empty."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1
