"""A StageModel on libllama: evaluate a slice of layers, on CPU and GPU builds alike. Knows no MPI and no tokenizer.

The residual stream leaves through libllama's evaluation callback, which may also end an evaluation; see
`eval_callback`.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.kv.blocks import LARGEST, Span
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import POSITION_END, FloatArray
from pipeinfer.errors import ModelFault, UserError
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.batch import LlamaBatch, check_rows, free_cells
from pipeinfer.models.llama.branches import Branches
from pipeinfer.models.llama.check_result import check_result
from pipeinfer.models.llama.compaction import Compaction
from pipeinfer.models.llama.eval_callback import EvalCallback
from pipeinfer.models.llama.groups import Filled, fill_up
from pipeinfer.models.llama.loading import cache_form, load_model, token_table
from pipeinfer.models.llama.logits import Logits
from pipeinfer.models.llama.params import GROUP_CELLS, LlamaParams, largest_part
from pipeinfer.models.llama.parts import apart, blocks_of, part_of
from pipeinfer.models.llama.prefill import F16, N_SEQ, PROMPT, Prefill, as_bytes, state_of
from pipeinfer.models.llama.threads import ThreadShare
from pipeinfer.models.llama.tiles import Tiles, names_of

MAX_SEQUENCES = 255  # libllama can have one more, in which prompts come in
FLASH_ATTENTION_AUTO, FLASH_ATTENTION_ON = -1, 1
NO_SLOT, INVALID_BATCH = 1, -1


class KvCacheFull(RuntimeError):
    """A batch found no free cells. The cache is as it was before."""


class LlamaStage:
    """Layers [first, last) with their KV cache. A whole model is the stage that is both first and last."""

    context_type = 0  # libllama's: a context of the layers that predict the next token

    def __init__(self, slice_file: SliceFile, params: LlamaParams) -> None:
        """Load the slice and close its file. Raises UserError when the build or the memory does not do."""
        info = slice_file.info
        if not 2 <= params.n_seq_max <= MAX_SEQUENCES:
            raise ValueError(f"n_seq_max {params.n_seq_max}, 2 to {MAX_SEQUENCES} are possible")
        self.params = params = params.with_room()
        self.is_first, self.is_last = slice_file.is_first, slice_file.is_last
        self.n_embd, self.n_vocab = info.n_embd, info.n_vocab
        self.slice_bytes = slice_file.n_bytes
        self._where = f"layers {slice_file.first}-{slice_file.last - 1} of {info.path}"
        self._n_layer = slice_file.last - slice_file.first
        self._spare, self._arrival = params.n_seq_max - 1, params.n_seq_max
        self._model = self._context = None
        self._lib = ggml.load_library()
        known = info.layers.known
        self._has_states = known.states is not None
        # a slice that is not whole gets no tokens; where libllama takes no embeddings they are written over any tokens'
        self._by_tokens = known.by_tokens and not (self.is_first and self.is_last)
        # untouched pages of this array cost no memory: a stage that only sees small batches stays small
        self._out = np.empty((0 if self.is_last else params.n_batch, self.n_embd), np.float32)
        self.n_features, self._n_rows = len(params.taps), 0
        tapped = np.empty((self.n_features, params.n_batch, self.n_embd), np.float32)
        self._features = np.empty_like(tapped) if self._has_states else tapped
        self._gives_output = self.is_last and self._n_layer - 1 in params.taps
        writes, on_cpu = self._by_tokens or not self.is_first, params.n_gpu_layers == 0
        self._callback = EvalCallback(
            self._lib, self._n_layer, self._out, known, writes, on_cpu, params.stop_interval_s, params.taps, tapped
        )
        # batches whose rows shall have the bits that each has alone are computed in parts that are not tiled
        self._n_part = params.n_batch if self._has_states else largest_part(info, params)
        self._tiles: Tiles | None = None
        self._prefills: dict[int, Prefill] = {}  # of each sequence whose prompt is under way
        self._sources: tuple[SourceFile, ...] = ()
        if params.exact:  # its pages are mapped, and must stay as they are
            self._sources, slice_file.sources = slice_file.sources, ()
        self._table: ggml.TokenTable | None = None
        self.threads = ThreadShare(params.n_threads)
        try:
            self._model = load_model(self._lib, slice_file, params, self._where)
            if params.in_groups:
                self._tiles = Tiles(self._model, names_of(info, slice_file.first, slice_file.last))
            self._table = token_table(slice_file) if self.is_first and not self.is_last else None
            self._form = cache_form(self._lib, self._model, info)
            self._context = self._create_decoding_context()
        except BaseException:
            self.close()
            raise
        finally:
            slice_file.close()
        self._memory = self._lib.llama_get_memory(self._context)
        self._compaction = Compaction(self._lib, self._context, self._spare, self._form, self._has_states)
        n_cells = int(self._lib.llama_n_ctx(self._context))
        self.n_cells = n_cells - GROUP_CELLS * params.in_groups
        self.kv_bytes = n_cells * sum(params.cache.cell_bytes(info.kv_shapes[slice_file.first : slice_file.last]))
        self._batch = LlamaBatch(self._lib, params.n_batch, params.n_seq_max)
        self._logits = Logits(self._lib, self._context, params.n_outputs_max, self.n_vocab)

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        """See StageModel. On the first stage batch.hidden is ignored. Raises KvCacheFull, and what `stop` raises.

        ModelFault when the model's file was changed, or the result is no number.
        """
        n_rows = self._n_rows = len(batch.positions)
        wanted = batch.wanted if self.is_last else None
        check_rows(n_rows, wanted, self.params.n_batch, self.params.n_outputs_max)
        self._callback.begin(None if self._has_states else stop)
        result = None if self._callback.stopped else self._evaluate_as_fits(batch, wanted)
        if result is not None:
            for source in self._sources:
                source.check()
            try:
                check_result(result, self.is_last, self._where)
            except ModelFault:
                for source in self._sources:
                    source.blame()
                raise
        return result

    @property
    def features(self) -> FloatArray:
        """See FeatureStage: those after the layers that are tapped."""
        return self._features[:, : self._n_rows]

    def _evaluate_as_fits(self, batch: Batch, wanted: npt.NDArray[np.bool_] | None) -> FloatArray | None:
        if self._has_states:
            return self._evaluate_apart(batch)
        return self._evaluate_blocks(batch, batch.span) if batch.span else self._evaluate_rows(batch, wanted)

    def _evaluate_rows(self, batch: Batch, wanted: npt.NDArray[np.bool_] | None) -> FloatArray | None:
        n_rows, hidden = len(batch.positions), self._hidden(batch)
        filled = fill_up(batch, hidden, wanted, self._arrival) if self._tiles else Filled(batch, hidden, wanted)
        code = self._decode(self._context, filled.batch, filled.hidden, filled.wanted)
        if filled.n_added:
            self._lib.llama_memory_seq_rm(self._memory, self._arrival, -1, -1)
        if code == 0 and not self._callback.stopped:
            return self._out[:n_rows] if filled.wanted is None else self._logits.of(filled.wanted)[filled.logits]
        if code not in (NO_SLOT, INVALID_BATCH):
            free_cells(self._lib, self._memory, batch)
        if self._was_stopped():
            return None
        raise self._failure(code, n_rows)

    def _evaluate_apart(self, batch: Batch) -> FloatArray:
        """Rows of layers with states, part by part. Never stopped: a state cannot go back to what it was."""
        wanted = batch.wanted if self.is_last else np.ones(len(batch.positions), np.bool_)
        result = np.empty((len(wanted), self.n_vocab if self.is_last else self.n_embd), np.float32)
        branches = Branches(self._lib, self._memory)
        for rows in apart(batch, self.params.exact):
            part = part_of(batch, rows)
            branches.advance(part.seqs[0][0])
            code = self._decode(self._context, part, self._hidden(part), part.wanted if self.is_last else None)
            if code:
                raise self._failure(code, len(rows))
            branches.follow(batch.seqs[rows[-1]], int(part.positions[-1]))
            self._features[:, rows] = self._callback.tapped[:, : len(rows)]
            result[rows[wanted[rows]]] = self._logits.of(part.wanted) if self.is_last else self._out[: len(rows)]
        branches.settle()
        return result[wanted]

    def _hidden(self, batch: Batch) -> FloatArray | None:
        """What goes into the first layer; None where libllama looks the tokens up itself."""
        if not self.is_first:
            return batch.hidden
        return self._table.lookup(batch.tokens) if self._table is not None else None

    def _decode(
        self, context: object, batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None,
        at: int = 0,
    ) -> int:  # fmt: skip
        """llama_decode's answer. The residual stream goes to the rows of `_out` from `at` on."""
        self._callback.expect(len(batch.positions), self._n_part if context is self._context else LARGEST, at, hidden)
        if self._tiles:
            self._tiles.use(context is not self._context)
        n_threads = self.threads.begin()
        self._lib.llama_set_n_threads(context, n_threads, n_threads)
        code = -1
        try:
            code = int(self._lib.llama_decode(context, self._fill(batch, hidden, wanted)))
        finally:
            self.threads.end()
        return code

    def _fill(self, batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None) -> object:
        if self._by_tokens:
            return self._batch.fill(replace(batch, tokens=np.zeros_like(batch.tokens)), None, wanted)
        return self._batch.fill(batch, hidden, wanted)

    def _was_stopped(self) -> bool:
        if self._callback.fault is not None:
            raise self._callback.fault
        return self._callback.stopped

    def _failure(self, code: int, n_rows: int) -> Exception:
        reason = ggml.last_errors()
        if code == NO_SLOT:
            return KvCacheFull(f"no room for {n_rows} rows in the KV cache of {self.n_cells} cells")
        return RuntimeError(f"llama_decode of {n_rows} rows in {self._where} failed with {code}: {reason}")

    def _evaluate_blocks(self, batch: Batch, span: Span) -> FloatArray | None:
        """Blocks of a prompt: evaluated in a context of their own, their cells taken over into the cache."""
        first, n_rows, ((seq,), *_) = int(batch.positions[0]), len(batch.positions), batch.seqs
        prefill = self._prefill_of(seq, first, span.end)
        code = self._evaluate_in(prefill, batch)
        if code or self._callback.stopped:
            prefill.forget(first)
            if self._was_stopped():
                return None
            raise self._failure(code, n_rows)
        if not self._take_over(prefill, seq, first, first + n_rows):
            prefill.forget(first)
            raise self._failure(NO_SLOT, n_rows)
        if first + n_rows == span.end:
            self._drop_prefill(seq)
        return np.empty((0, self.n_vocab), np.float32) if self.is_last else self._out[:n_rows]

    def _evaluate_in(self, prefill: Prefill, batch: Batch) -> int:
        """Block by block; the first answer of llama_decode that is not 0, or 0. Stops when told to."""
        hidden = self._hidden(batch)
        for start, end in blocks_of(batch):
            rows = slice(start, end)
            wanted = np.zeros(end - start, np.bool_) if self.is_last else None
            block = Batch(batch.tokens[rows], batch.positions[rows], [(PROMPT,)] * (end - start), None, batch.wanted)
            code = self._decode(prefill.context, block, None if hidden is None else hidden[rows], wanted, start)
            if code or self._callback.stopped:
                return code
            prefill.settle(int(block.positions[0]), int(block.positions[-1]) + 1)
        return 0

    def _prefill_of(self, seq: int, start: int, n_cells: int) -> Prefill:
        """The context of the sequence's prompt, whose next row is `start`. Made, with the cells before that, where a
        span begins, or blocks that follow those of another request."""
        prefill = self._prefills.get(seq)
        if prefill is None or prefill.end != start:
            self._drop_prefill(seq)
            n_outputs = N_SEQ if self.is_last else LARGEST  # no row of a block wants logits
            context = self._create_context(n_cells, LARGEST, LARGEST, N_SEQ, n_outputs, (F16, F16))
            prefill = self._prefills[seq] = Prefill(self._lib, context, self._form)
            self._hand_over(seq, prefill, start)
        return prefill

    def _hand_over(self, seq: int, prefill: Prefill, n_cells: int) -> None:
        """Give a prompt's context the sequence's first cells, some at a time: they are copied."""
        lib, memory, arrival = self._lib, self._memory, self._arrival
        for first, end in self._form.pieces(0, n_cells):
            lib.llama_memory_seq_cp(memory, seq, arrival, first, end)
            cells = state_of(lib, self._context, arrival)
            lib.llama_memory_seq_rm(memory, arrival, -1, -1)
            prefill.take(cells, first, end)

    def _take_over(self, prefill: Prefill, seq: int, first: int, end: int) -> bool:
        """Give the sequence the prompt's cells at [first, end); False if there is no room for them."""
        lib, memory, arrival = self._lib, self._memory, self._arrival
        for start, stop in self._form.pieces(first, end):
            cells = prefill.cells(start, stop)
            if not lib.llama_state_seq_set_data(self._context, as_bytes(cells), len(cells), arrival):
                lib.llama_memory_seq_rm(memory, seq, first, -1)
                return False
            lib.llama_memory_seq_cp(memory, arrival, seq, start, stop)
            lib.llama_memory_seq_rm(memory, arrival, -1, -1)
        return True

    def _drop_prefill(self, seq: int) -> None:
        if seq in self._prefills:
            self._prefills.pop(seq).close()

    def apply(self, ops: Sequence[KvOp]) -> None:
        """See StageModel. Exact numerics park removed cells instead of freeing them, until the next COMPACT."""
        for op in ops:
            last = -1 if op.last == POSITION_END else op.last
            if op.kind == OpKind.COPY:
                self._lib.llama_memory_seq_cp(self._memory, op.src, op.dst, op.first, last)
            elif op.kind == OpKind.SHARED:
                self._compaction.share(op)
            elif op.kind == OpKind.COMPACT:
                self._compaction.run()
            else:
                if op.first and self._has_states:
                    raise RuntimeError(f"{self._where} cannot go back to position {op.first}: there are states")
                self._drop_prefill(op.src)
                if self.params.exact:
                    # a freed hole would be refilled out of order, and attention adds up in the order of the cells
                    self._lib.llama_memory_seq_cp(self._memory, op.src, self._spare, op.first, last)
                self._lib.llama_memory_seq_rm(self._memory, op.src, op.first, last)

    def next_position(self, seq: int) -> int:
        return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1

    def clear(self) -> None:
        """Forget every sequence: the cache is as after loading."""
        for seq in list(self._prefills):
            self._drop_prefill(seq)
        self._lib.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free model and cache. May be called twice."""
        for seq in list(self._prefills):
            self._drop_prefill(seq)
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None
        for source in self._sources:
            source.close()
        if self._table is not None:
            self._table.close()

    def _create_decoding_context(self) -> object:
        params = self.params
        # different types keep attention off the kernels whose sums depend on batch size and thread count; what comes
        # from a prompt's own context arrives in a further sequence
        types = self._form.types if params.mixed_cache else params.cache.ggml
        n_seq_max = params.n_seq_max + params.exact
        n_outputs = params.n_outputs_max if self.is_last else params.n_batch
        return self._create_context(params.n_cells, params.n_batch, self._n_part, n_seq_max, n_outputs, types)

    def _create_context(
        self, n_cells: int, n_batch: int, n_ubatch: int, n_seq_max: int, n_outputs: int, types: tuple[int, int]
    ) -> object:
        lib, params = self._lib, self.params
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = n_cells, n_batch, n_ubatch, n_seq_max
        # libllama holds logits for one row a sequence at least, and aborts when that is not allowed for here
        options.n_outputs_max = max(n_outputs, n_seq_max)
        options.n_threads = options.n_threads_batch = params.n_threads
        options.kv_unified = options.swa_full = options.no_perf = True
        options.op_offload = False
        options.flash_attn_type = FLASH_ATTENTION_ON if params.mixed_cache else FLASH_ATTENTION_AUTO
        options.type_k, options.type_v = types
        options.cb_eval, options.cb_eval_user_data = self._callback.function, ctypes.addressof(self._callback.state)
        options.ctx_type = self.context_type
        context = lib.llama_init_from_model(self._model, options)
        if not context:
            raise UserError(f"no KV cache of {n_cells} cells for {self._where}: {ggml.last_errors()}; "
                            "use a smaller context (-c) or more ranks")  # fmt: skip
        if self._gives_output:  # else some architectures drop rows that want no logits before
            ggml.load_extension().llama_set_embeddings_nextn(context, True, False)
        return context
