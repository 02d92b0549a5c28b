"""A StageModel on libllama: evaluate a slice of layers, on CPU and GPU builds alike; and a draft's head, EAGLE-3 or
MTP. Knows no MPI, no tree and no tokenizer."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from pipeinfer.core.blocks import LARGEST
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import POSITION_END, FloatArray
from pipeinfer.errors import ModelFault
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.cell_state import (
    CacheForm,
    Compaction,
    StateBytes,
    next_position,
    restore_state,
    save_state,
)
from pipeinfer.models.llama.decoder import BatchRefused, ContextSize, Decoder, EvaluationStopped, LlamaContext
from pipeinfer.models.llama.params import LlamaParams, largest_part
from pipeinfer.models.llama.prefill import Prefills
from pipeinfer.models.llama.rows import (
    Flags,
    Indices,
    Logits,
    PaddedBatch,
    check_result,
    check_rows,
    first_positions,
    pad_to_groups,
    part_of,
    stateful_parts,
)
from pipeinfer.models.llama.token_table import TokenTable, token_table


class Branches:
    """Sequences that branch off others within a batch. A row's further sequences get its cell and its state when the
    next row of either changes it, so that a chain of guesses, whose rows are each in the sequences of all that follow,
    is copied once a row."""

    def __init__(self, lib: Any, memory: Any) -> None:
        self._lib, self._memory = lib, memory
        self._source: dict[int, tuple[int, int]] = {}  # of each that lacks cells: which has them, and the first of them

    def follow(self, seqs: tuple[int, ...], position: int) -> None:
        """The row at `position` was evaluated in the first of `seqs`; the others become copies of it."""
        for seq in seqs[1:]:
            _, first = self._source.get(seq, (seq, position))
            self._source[seq] = seqs[0], first

    def advance(self, seq: int) -> None:
        """The next row is evaluated in this sequence."""
        for other in [each for each, (source, _) in self._source.items() if seq in (each, source)]:
            source, first = self._source.pop(other)
            self._lib.llama_memory_seq_cp(self._memory, source, other, first, -1)

    def finish(self) -> None:
        """Make the copies that are left, when no row follows."""
        for seq in list(self._source):
            self.advance(seq)


class StatefulRows:
    """Evaluates batches of layers with states, in parts. `stop` ends none: a state cannot go back to what it was.

    features  (n_taps, n_batch, n_embd), of the last batch, in the order of its rows"""

    def __init__(self, decoder: Decoder, context: LlamaContext, logits: Logits) -> None:
        self._decoder, self._context, self._logits = decoder, context, logits
        self._memory = decoder.lib.llama_get_memory(context.handle)
        self.features = np.empty_like(decoder.tapped)

    def evaluate(self, batch: Batch, hidden: FloatArray | None) -> FloatArray:
        """The residual stream (n_rows, n_embd), or on the last stage logits (n_wanted, n_vocab)."""
        decoder, branches = self._decoder, Branches(self._decoder.lib, self._memory)
        wanted = batch.wanted if decoder.is_last else np.ones(len(batch.positions), np.bool_)
        outputs: list[tuple[Indices, FloatArray]] = []
        for rows in stateful_parts(batch, decoder.params.exact):
            part = part_of(batch, rows)
            branches.advance(part.seqs[0][0])
            part_hidden = None if hidden is None else hidden[rows]
            decoder.decode(self._context, part, part_hidden, part.wanted if decoder.is_last else None)
            branches.follow(batch.seqs[rows[-1]], int(part.positions[-1]))
            self.features[:, rows] = decoder.tapped[:, : len(rows)]
            output = self._logits.of(part.wanted) if decoder.is_last else decoder.out[: len(rows)]
            outputs.append((rows[wanted[rows]], output.copy()))
        branches.finish()
        order = np.argsort(np.concatenate([rows for rows, _ in outputs]))
        return np.concatenate([output for _, output in outputs])[order]


MAX_SEQUENCES = 255  # libllama can have one more, which the stage needs for copies


class LlamaStage:
    """Layers [first, last) with their KV cache. A whole model is the stage that is both first and last."""

    def __init__(self, slice_file: SliceFile, params: LlamaParams, adapters: Sequence[ScaledAdapter] = ()) -> None:
        """Load the slice and close its file. `adapters`: cut as it is. Raises UserError if the build or the memory does
        not suffice."""
        if not 2 <= params.n_seq_max <= MAX_SEQUENCES:
            raise ValueError(f"n_seq_max {params.n_seq_max}, 2 to {MAX_SEQUENCES} are possible")
        self.params = params.with_room()
        self.is_first, self.is_last = slice_file.is_first, slice_file.is_last
        self.n_embd, self.n_vocab = slice_file.info.n_embd, slice_file.info.n_vocab
        self.slice_bytes, self.n_features = slice_file.n_bytes, len(params.taps)
        self._n_layer, self._n_rows = slice_file.last - slice_file.first, 0
        self._closing = ExitStack()
        try:
            self._open(slice_file, adapters)
        except BaseException:
            self.close()
            raise
        finally:
            slice_file.close()

    def _open(self, slice_file: SliceFile, adapters: Sequence[ScaledAdapter]) -> None:
        info, params, closing = slice_file.info, self.params, self._closing
        self._sources: tuple[SourceFile, ...] = ()
        if params.exact:  # its pages are mapped, and must stay as they are
            self._sources, slice_file.sources = slice_file.sources, ()
            for source in self._sources:
                closing.callback(source.close)
        self._table: TokenTable | None = None
        if self.is_first and not self.is_last:
            self._table = token_table(slice_file)
            closing.callback(self._table.close)
        self._decoder = decoder = Decoder(slice_file, params, closing, adapters)
        self.threads, self._callback, self._lib = decoder.threads, decoder.callback, decoder.lib
        form, has_states = CacheForm.of(self._lib, decoder.model, info), info.layers.architecture.states is not None
        self.has_states = has_states
        # rows that keep the bits of single ones are computed in parts that are not tiled
        n_part = params.n_batch if has_states else largest_part(info, params)
        # types that differ keep attention off the kernels whose sums depend on batch size and thread count
        types = form.types if params.mixed_cache else params.cache.ggml
        # blocks of layers with states, of which all rows may want logits, are evaluated here
        n_outputs = (
            params.n_batch
            if not self.is_last
            else max(params.n_outputs_max, LARGEST if has_states and params.exact else 0)
        )
        self._n_outputs = n_outputs
        size = ContextSize(params.n_cells, params.n_batch, n_part, params.n_seq_max + params.parked, n_outputs, types)
        self._context = context = decoder.create_context(size)
        closing.callback(self._lib.llama_free, context.handle)
        self._memory = self._lib.llama_get_memory(context.handle)
        # users have sequences up to the spare one, for parked cells; prompts' cells arrive in a further one
        self._spare, self._arrival = params.n_seq_max - 1, params.n_seq_max
        self._transfer = self._arrival if params.parked else self._spare  # empty between calls
        self._compaction = Compaction(self._lib, context.handle, self._spare, form, has_states)
        self._logits = Logits(self._lib, context.handle, n_outputs, self.n_vocab)
        self._prefills = Prefills(decoder, context, form, self._arrival, self.n_vocab)
        closing.callback(self._prefills.clear)
        self._stateful = StatefulRows(decoder, context, self._logits) if has_states else None
        self.n_cells = decoder.n_cells(context)
        cell_bytes = sum(params.cache.cell_bytes(info.kv_shapes[slice_file.first : slice_file.last]))
        self.kv_bytes = int(self._lib.llama_n_ctx(context.handle)) * cell_bytes

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        """See StageModel. On the first stage batch.hidden is ignored. Raises KvCacheFull, and what `stop` raises.
        ModelFault when the model's file was changed, or the result is no number."""
        n_rows = self._n_rows = len(batch.positions)
        wanted = batch.wanted if self.is_last else None
        in_blocks = batch.span is not None and self._stateful is None
        check_rows(n_rows, None if in_blocks else wanted, self.params.n_batch, self._n_outputs)
        self._callback.begin(None if self._stateful else stop)
        if self._callback.stopped:
            return None
        hidden = self._hidden(batch)
        try:
            if self._stateful:
                result = self._stateful.evaluate(batch, hidden)
            elif in_blocks:
                logits = self._prefills.evaluate(batch, hidden)
                result = logits if self.is_last else self._decoder.out[:n_rows]
            else:
                result = self._evaluate_rows(batch, hidden, wanted)
        except EvaluationStopped:
            return None
        self._check(result)
        return result

    def _hidden(self, batch: Batch) -> FloatArray | None:
        """The input of the first layer; None where libllama looks the tokens up itself."""
        if not self.is_first or self._decoder.is_head:
            return batch.hidden
        return self._table.lookup(batch.tokens) if self._table is not None else None

    def _evaluate_rows(self, batch: Batch, hidden: FloatArray | None, wanted: Flags | None) -> FloatArray:
        padded = PaddedBatch(batch, hidden, wanted)
        if self.params.group:
            padded = pad_to_groups(batch, hidden, wanted, self._arrival, self.params.group)
        try:
            self._decoder.decode(self._context, padded.batch, padded.hidden, padded.wanted)
        except BatchRefused:
            raise
        except BaseException:
            for seq, position in first_positions(batch).items():
                self._lib.llama_memory_seq_rm(self._memory, seq, position, -1)
            raise
        finally:
            if padded.n_added:
                self._lib.llama_memory_seq_rm(self._memory, self._arrival, -1, -1)
        if padded.wanted is None:
            return self._decoder.out[: len(batch.positions)]
        return self._logits.of(padded.wanted)[padded.logits]

    def _check(self, result: FloatArray) -> None:
        """Raises ModelFault."""
        for source in self._sources:
            source.check()
        try:
            check_result(result, self.is_last, self._decoder.where)
        except ModelFault:
            for source in self._sources:
                source.blame()
            raise

    @property
    def features(self) -> FloatArray:
        """See FeatureStage: the residual stream after the tapped layers."""
        features = self._stateful.features if self._stateful else self._decoder.tapped
        return features[:, : self._n_rows]

    def apply(self, ops: Sequence[KvOp]) -> None:
        """See StageModel. With `params.parked` removed cells stay until the next COMPACT."""
        for op in ops:
            last = -1 if op.last == POSITION_END else op.last
            if op.kind == OpKind.COPY:
                self._lib.llama_memory_seq_cp(self._memory, op.src, op.dst, op.first, last)
            elif op.kind == OpKind.SHARED:
                self._compaction.share(op)
            elif op.kind == OpKind.COMPACT:
                self._compaction.run()
            else:
                if op.first and self._stateful:
                    raise RuntimeError(f"{self._decoder.where} cannot go back to position {op.first}: there are states")
                self._prefills.drop(op.src)
                if self.params.parked:
                    # a freed hole would be refilled out of order, and attention adds up in the order of the cells;
                    # behind it libllama would take cells that are outside of the newest guess's window
                    self._lib.llama_memory_seq_cp(self._memory, op.src, self._spare, op.first, last)
                self._lib.llama_memory_seq_rm(self._memory, op.src, op.first, last)

    def save_cells(self, seq: int, first: int, end: int) -> StateBytes:
        """See CellStage."""
        if self.has_states:
            return save_state(self._lib, self._context.handle, seq)
        transfer = self._transfer
        self._lib.llama_memory_seq_cp(self._memory, seq, transfer, first, end)
        cells = save_state(self._lib, self._context.handle, transfer)
        self._lib.llama_memory_seq_rm(self._memory, transfer, -1, -1)
        return cells

    def load_cells(self, seq: int, cells: StateBytes) -> None:
        """See CellStage."""
        transfer = seq if self.has_states else self._transfer
        if not restore_state(self._lib, self._context.handle, transfer, cells):
            raise RuntimeError(f"{self._decoder.where}: cells cannot be restored; {ggml.last_errors()}")
        if self.has_states:
            return
        self._lib.llama_memory_seq_cp(self._memory, self._transfer, seq, -1, -1)
        self._lib.llama_memory_seq_rm(self._memory, self._transfer, -1, -1)

    def next_position(self, seq: int) -> int:
        return next_position(self._lib, self._memory, seq)

    def clear(self) -> None:
        """Forget every sequence: the cache is as after loading."""
        self._prefills.clear()
        self._lib.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free model and cache. May be called twice."""
        self._closing.close()


class LlamaHead(LlamaStage):
    """A HeadModel. A row is a token and, in `hidden`, the `encode`d features of the token before it, or, while there
    are none, that token's row of `states`."""

    def __init__(self, slice_file: SliceFile, params: LlamaParams) -> None:
        """`params` without `exact`. Raises what LlamaStage raises."""
        head = slice_file.info.head
        assert head and not params.exact, f"{slice_file.path} is no head, or params are exact"
        self._extension = ggml.load_extension()
        # libllama takes it for a model with an encoder, whose batches have room for a row of each sequence
        super().__init__(slice_file, replace(params, n_batch=max(params.n_batch, params.n_seq_max)))
        self._order, self._n_embd_target, self._is_mtp = head.order, head.n_embd_target, head.is_mtp
        self._extension.llama_set_embeddings_nextn(self._context.handle, True, head.is_mtp)

    def encode(self, features: FloatArray) -> FloatArray:
        """(n_rows, n_embd) from (n_rows, n * the target's n_embd): the outputs of the layers that the head reads, the
        lowest first. At most as many rows as a batch has."""
        if self._is_mtp:  # its input is the target's output
            return features
        n_rows = len(features)
        by_layer = features.reshape(n_rows, len(self._order), self._n_embd_target)[:, self._order]
        # libllama reads positions, which must follow those of the sequence, and writes no cells
        tokens, positions = np.zeros(n_rows, np.int32), np.arange(n_rows, dtype=np.int32)
        rows = Batch(tokens, positions, [(self._spare,)] * n_rows, None, np.ones(n_rows, np.bool_))
        self._callback.begin(None)
        batch = self._decoder.batch.fill(rows, by_layer.reshape(n_rows, -1), None)
        code = int(self._lib.llama_encode(self._context.handle, batch))
        if code:
            call = f"llama_encode of {n_rows} rows in {self._decoder.where}"
            raise RuntimeError(f"{call} failed with {code}: {ggml.last_errors()}")
        return self._states(n_rows).copy()

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        if not self._is_mtp or not batch.wanted.any():
            return super().evaluate(batch, stop)
        # libllama's graphs of such heads have states of the rows with logits only
        logits = super().evaluate(replace(batch, wanted=np.ones_like(batch.wanted)), stop)
        return None if logits is None else logits[batch.wanted]

    @property
    def states(self) -> FloatArray:
        """(n_rows, n_embd) of all rows of the last `evaluate`, if some had logits. Valid until the next call."""
        return self._states(self._n_rows)

    def _states(self, n_rows: int) -> FloatArray:
        address = ctypes.cast(self._extension.llama_get_embeddings_nextn(self._context.handle), ctypes.c_void_p).value
        assert address, "libllama has no states of this head"
        buffer = (ctypes.c_float * (n_rows * self.n_embd)).from_address(address)
        return np.ctypeslib.as_array(buffer).reshape(n_rows, self.n_embd)
