"""Prompts evaluated in blocks, each in a KV cache of its own; the decoding cache gets the cells. Knows no stage.

Attention uses tiles only where K and V are of one type, and adds up tile by tile, so that a row's bits depend on where
the cells lie. Here they lie in the order of positions, from the first cell on, whatever the decoding cache holds. Each
block's cells are rounded as in that cache before the next block sees them, so that cells that another request has
evaluated are as good as these."""

from types import ModuleType

import numpy as np

from pipeinfer.core.blocks import LARGEST
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.models.llama.cell_state import BF16, F16, CacheForm, StateBytes, restore_state, round_state, save_state
from pipeinfer.models.llama.decoder import ContextSize, Decoder, LlamaContext
from pipeinfer.models.llama.rows import Logits, blocks_of

PROMPT, COPIED = 0, 1
N_SEQ = 2  # sequences of a prompt's context: its rows, and cells that are being copied


class Prefill:
    """One prompt in a context of its own, which this frees. `end`: the position behind the last evaluated row."""

    def __init__(self, library: ModuleType, context: LlamaContext, form: CacheForm, n_vocab: int) -> None:
        self.context, self.end, self._lib, self._form = context, 0, library, form
        self.logits = Logits(library, context.handle, context.size.n_outputs, n_vocab)
        self._memory = library.llama_get_memory(context.handle)

    def take(self, cells: StateBytes, first: int, end: int) -> None:
        """Add a piece of cells of the decoding cache. Pieces come in ascending order."""
        if not restore_state(self._lib, self.context.handle, COPIED, round_state(cells, self._form, BF16, F16)):
            raise RuntimeError(f"the cells {first}-{end} before a prompt's blocks cannot be copied")
        self._lib.llama_memory_seq_cp(self._memory, COPIED, PROMPT, first, end)
        self._lib.llama_memory_seq_rm(self._memory, COPIED, -1, -1)
        self.end = end

    def round_cells(self, first: int, end: int) -> None:
        """Round the newest cells, at positions [first, end), as the decoding cache does."""
        pieces = [(self.cells(*piece), piece) for piece in self._form.pieces(first, end)]
        self.forget(first)
        for cells, piece in pieces:
            self.take(cells, *piece)

    def forget(self, first: int) -> None:
        """Free the cells from position `first` on."""
        self._lib.llama_memory_seq_rm(self._memory, PROMPT, first, -1)
        self.end = min(self.end, first)

    def cells(self, first: int, end: int) -> StateBytes:
        """A piece of cells for the decoding cache."""
        self._lib.llama_memory_seq_cp(self._memory, PROMPT, COPIED, first, end)
        state = save_state(self._lib, self.context.handle, COPIED)
        self._lib.llama_memory_seq_rm(self._memory, COPIED, -1, -1)
        return round_state(state, self._form, F16, BF16)

    def close(self) -> None:
        self._lib.llama_free(self.context.handle)


class Prefills:
    """The prompts that are being evaluated, by their sequence in the decoding context. `transfer`: a sequence there
    that is empty between calls."""

    def __init__(self, decoder: Decoder, context: LlamaContext, form: CacheForm, transfer: int, n_vocab: int) -> None:
        self._decoder, self._lib, self._context, self._form = decoder, decoder.lib, context, form
        self._memory, self._transfer = decoder.lib.llama_get_memory(context.handle), transfer
        self._n_vocab = n_vocab
        self.by_seq: dict[int, Prefill] = {}

    def evaluate(self, batch: Batch, hidden: FloatArray | None) -> FloatArray:
        """Evaluate blocks of one prompt, whose cells the sequence has afterwards. Returns the logits (n_wanted,
        n_vocab): of all rows, if the prompt is scored, or of none. Raises what `Decoder.decode` raises; the sequence is
        as before then."""
        assert batch.span
        first, n_rows, seq = int(batch.positions[0]), len(batch.positions), batch.seqs[0][0]
        prefill = self._open(seq, first, batch.span.end, bool(batch.wanted.any()))
        try:
            logits = [self._evaluate_block(prefill, batch, hidden, *edges) for edges in blocks_of(batch)]
            self._hand_over(prefill, seq, first, first + n_rows)
        except BaseException:
            prefill.forget(first)
            raise
        if first + n_rows == batch.span.end:
            self.drop(seq)
        return np.concatenate(logits)

    def _evaluate_block(
        self, prefill: Prefill, batch: Batch, hidden: FloatArray | None, start: int, end: int
    ) -> FloatArray:
        rows, n_rows = slice(start, end), end - start
        wanted = batch.wanted[rows] if self._decoder.is_last else None
        seqs: list[tuple[int, ...]] = [(PROMPT,)] * n_rows
        parts = batch.tokens[rows], batch.positions[rows], seqs, None, batch.wanted[rows]
        block = Batch(*parts, adapters=batch.adapters)
        self._decoder.decode(prefill.context, block, None if hidden is None else hidden[rows], wanted, start)
        logits = prefill.logits.of(np.zeros(0, np.bool_) if wanted is None else wanted).copy()
        prefill.round_cells(int(block.positions[0]), int(block.positions[-1]) + 1)
        return logits

    def _open(self, seq: int, start: int, n_cells: int, scored: bool) -> Prefill:
        """The sequence's prompt, whose next row is `start`. Made, with the cells before that, at the first block, or
        where blocks follow those of another request. `scored`: its rows want logits, else none does."""
        prefill = self.by_seq.get(seq)
        if prefill is None or prefill.end != start:
            self.drop(seq)
            n_outputs = N_SEQ if self._decoder.is_last and not scored else LARGEST
            size = ContextSize(n_cells, LARGEST, LARGEST, N_SEQ, n_outputs, (F16, F16), are_blocks=True)
            prefill = self.by_seq[seq] = Prefill(
                self._lib, self._decoder.create_context(size), self._form, self._n_vocab
            )
            for first, end in self._form.pieces(0, start):
                self._lib.llama_memory_seq_cp(self._memory, seq, self._transfer, first, end)
                cells = save_state(self._lib, self._context.handle, self._transfer)
                self._lib.llama_memory_seq_rm(self._memory, self._transfer, -1, -1)
                prefill.take(cells, first, end)
        return prefill

    def _hand_over(self, prefill: Prefill, seq: int, first: int, end: int) -> None:
        """Give the sequence the prompt's cells at [first, end). Raises KvCacheFull if there is no room for them."""
        lib, memory, transfer = self._lib, self._memory, self._transfer
        for start, stop in self._form.pieces(first, end):
            if not restore_state(lib, self._context.handle, transfer, prefill.cells(start, stop)):
                lib.llama_memory_seq_rm(memory, seq, first, -1)
                raise self._decoder.cache_full(self._context, end - first)
            lib.llama_memory_seq_cp(memory, transfer, seq, start, stop)
            lib.llama_memory_seq_rm(memory, transfer, -1, -1)

    def drop(self, seq: int) -> None:
        if seq in self.by_seq:
            self.by_seq.pop(seq).close()

    def clear(self) -> None:
        for seq in list(self.by_seq):
            self.drop(seq)
