"""A slice and its LoRA adapters loaded into libllama, its contexts, and llama_decode on them; and which of libggml's
tiled kernels are used. Knows no sequences.

From 8 rows on tiled kernels multiply by weights of TILED_TYPES in the file's layout, and add up in another order. They
skip tensors whose field `extra` is set, which nothing else reads for weights in a CPU's plain memory."""

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import AdapterScales, FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.adapter import Adapter, ScaledAdapter, active_scales
from pipeinfer.models.gguf.model_info import LONG, N_CTX_SHORT, ModelInfo
from pipeinfer.models.gguf.slice import SliceFile, slice_tensors
from pipeinfer.models.gguf.writer import memory_file
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.eval_callback import EvalCallback, SliceNodes
from pipeinfer.models.llama.ggml import device_list
from pipeinfer.models.llama.params import GROUP_CELLS, TILED_ROWS, TILED_TYPES, LlamaParams, may_lay_out
from pipeinfer.models.llama.rows import Flags, LlamaBatch
from pipeinfer.models.llama.tensor_places import HOST, moved_tensors
from pipeinfer.models.llama.threads import ThreadShare


class LoadedAdapters:
    """Adapters of a model, which frees them. With exact numerics rows of guesses have adapters without tiles, and
    blocks of a prompt, always of the same rows, have them as in the file."""

    def __init__(self, library: ModuleType, model: object, adapters: Sequence[ScaledAdapter], is_exact: bool) -> None:
        """`adapters`: slices, with the factors of rows that say nothing. Before any context, for which libllama counts
        their nodes. Raises UserError if libllama refuses one."""
        self._lib, self._model = library, model
        self._adapters = [adapter for adapter, _ in adapters]
        self._default = active_scales(adapters)
        self._of_blocks = self._of_rows = [[*self._load(adapter, False)] for adapter in self._adapters]
        if is_exact and any(pair.is_tiled for adapter in self._adapters for pair in adapter.pairs):
            self._of_rows = [[*self._load(adapter, True)] for adapter in self._adapters]

    def apply(self, context: object, are_blocks: bool, scales: AdapterScales | None) -> None:
        """Before a batch. libllama makes its graphs anew where they differ from those of the last one."""
        if not self._adapters:
            return
        parts, applied = self._of_blocks if are_blocks else self._of_rows, list[tuple[object, float]]()
        for number, scale in self._default if scales is None else scales:
            applied += [(handle, self._adapters[number].scale(scale, rank)) for handle, rank in parts[number]]
        handles = (self._lib.llama_adapter_lora_p_ctypes * len(applied))(*(handle for handle, _ in applied))
        factors = (ctypes.c_float * len(applied))(*(factor for _, factor in applied))
        self._lib.llama_set_adapters_lora(context, handles, len(applied), factors)

    def _load(self, adapter: Adapter, untiled: bool) -> Iterator[tuple[object, int]]:
        for rank, content in adapter.files(untiled):
            yield self._open(adapter.path, content), rank

    def _open(self, path: Path, content: bytes) -> object:
        def write(fd: int) -> None:
            with open(fd, "wb", closefd=False) as file:
                file.write(content)

        with open(memory_file("adapter", len(content), (), write), "rb") as file:
            handle = self._lib.llama_adapter_lora_init(self._model, f"/proc/self/fd/{file.fileno()}".encode())
        if not handle:
            raise UserError(f"{path} cannot be loaded: {ggml.last_errors() or 'libllama gives no reason'}")
        return handle


NAME_BYTES = 64  # a tensor's field follows its name, of so many bytes
FIND = "_ZNK11llama_model10get_tensorEPKc"  # libllama's `llama_model::get_tensor`
_MARK = ctypes.create_string_buffer(1)


def can_find() -> bool:
    """Whether this build exports the address of a model's tensors."""
    return hasattr(ggml.ggml(), FIND)


def exclude(tensor: int) -> None:
    """Switch tiled kernels off for the tensor at this address."""
    _extra(tensor).value = ctypes.addressof(_MARK)


class Tiles:
    """The tensors of these names, as far as a loaded model has them. Valid as long as it is loaded."""

    def __init__(self, model: object, names: Iterable[str]) -> None:
        find = getattr(ggml.ggml(), FIND)
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        tensors = filter(None, (find(model, name.encode()) for name in names))
        self._fields = [field for field in map(_extra, tensors) if not field.value]  # that of repacked weights is set
        self._are_used = True

    def use(self, are_used: bool) -> None:
        """Switch tiled kernels on or off for these tensors."""
        if are_used != self._are_used:
            for field in self._fields:
                field.value = None if are_used else ctypes.addressof(_MARK)
            self._are_used = are_used


def _extra(tensor: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(ggml.ggml().ggml_get_name(tensor) + NAME_BYTES)


LOAD_BY_READING, LOAD_BY_MAPPING = 0, 1
FLASH_ATTENTION_AUTO, FLASH_ATTENTION_ON = -1, 1
PLANES = ("attn_k_b", "attn_v_b")
"""Matrices of three dimensions, by which libllama multiplies permuted rows. libggml's AMX kernels accept such weights
when they are loaded, and no such rows later, which ends the process."""

MOST_CELLS = 2**31 - 1  # of a context
MTP = 1  # libllama's type of a context that evaluates a model's own head
NO_SLOT, INVALID_BATCH = 1, -1


class BatchRefused(RuntimeError):
    """libllama did not begin a batch. The cache is as it was before."""


class KvCacheFull(BatchRefused):
    """A batch needs more cells than are free."""


class EvaluationStopped(Exception):
    """`stop` ended an evaluation."""


class _BufferOverride(ctypes.Structure):
    """libllama's llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class ContextSize(NamedTuple):
    """Rows of a batch, rows at once, sequences, rows that come out, types of K and V. `are_blocks`: of a prompt."""

    n_cells: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_outputs: int
    cache_types: tuple[int, int]
    are_blocks: bool = False


class LlamaContext(NamedTuple):
    handle: object
    size: ContextSize


class Decoder:
    """Layers [first, last) of a model.

    out      (n_batch, n_embd), the residual stream after the slice; no rows on the last slice
    tapped   (n_taps, n_batch, n_embd), the same after the tapped layers"""

    def __init__(
        self, slice_file: SliceFile, params: LlamaParams, closing: ExitStack, adapters: Sequence[ScaledAdapter] = ()
    ) -> None:
        """`closing` frees the model; `adapters`: of the slice. Raises UserError if libllama or the build refuses it."""
        info, self.params, self.lib = slice_file.info, params, ggml.load_library()
        architecture, first, last = info.layers.architecture, slice_file.first, slice_file.last
        self.is_last, self.where = slice_file.is_last, f"layers {first}-{last - 1} of {info.path}"
        # untouched pages of this array cost no memory: a stage that only sees small batches stays small
        self.out = np.empty((0 if self.is_last else params.n_batch, info.n_embd), np.float32)
        self.tapped = np.empty((len(params.taps), params.n_batch, info.n_embd), np.float32)
        self._has_output = self.is_last and last - first - 1 in params.taps
        # a slice that is not whole gets no tokens; where libllama takes no embeddings they replace those of any tokens
        self._by_tokens = architecture.by_tokens and not (slice_file.is_first and self.is_last)
        nodes = SliceNodes(architecture, last - first, self._by_tokens or not slice_file.is_first, params.taps)
        interval_s = params.stop_interval_s if params.n_gpu_layers == 0 else None
        self.callback = EvalCallback(self.lib, nodes, self.out, self.tapped, interval_s)
        self.threads = ThreadShare(params.n_threads)
        self.batch = LlamaBatch(self.lib, params.n_batch, params.n_seq_max)
        self.is_head = info.head is not None  # whose rows are a token and features
        self._is_mtp = info.head is not None and info.head.is_mtp
        self._n_ctx_short = info.n_ctx_short if params.rope_factors else 0
        self.model = self._load(slice_file)
        closing.callback(self.lib.llama_model_free, self.model)
        self._adapters = LoadedAdapters(self.lib, self.model, adapters, params.exact and params.n_gpu_layers == 0)
        self.where += "".join(f", with --lora {adapter.path}," for adapter, _ in adapters)
        tiled = (each.name for each in slice_tensors(info, first, last) if each.tensor.type in TILED_TYPES)
        self._tiles = Tiles(self.model, tiled) if 0 < params.group < TILED_ROWS else None

    def _load(self, slice_file: SliceFile) -> object:
        params, options = self.params, self.lib.llama_model_default_params()
        if params.n_gpu_layers and not ggml.has_gpu():
            shown = "all" if params.n_gpu_layers < 0 else params.n_gpu_layers
            needs = "0, --rpc, or a GPU and a build with CMAKE_ARGS=-DGGML_CUDA=on"
            raise UserError(f"libllama has no GPU here: -ngl {shown} (of drafts -ngld) needs {needs}")
        n_layer = slice_file.last - slice_file.first
        options.n_gpu_layers = n_layer + 1 if params.n_gpu_layers < 0 else params.n_gpu_layers
        devices = None if params.devices is None else device_list(params.devices)  # held while it loads
        options.devices = devices and ctypes.addressof(devices)
        # torch's oneDNN releases a thread's AMX tiles, which libggml configures once: its next product ends by SIGILL
        may_repack = ggml.amx_works() and "torch" not in sys.modules
        repacks = may_repack and may_lay_out(slice_file.info, params.repack, params.exact, params.repacked)
        options.use_extra_bufts = repacks
        n_on_cpu = min(n_layer, n_layer + 1 - options.n_gpu_layers)
        overrides = self._overrides(slice_file, n_on_cpu, repacks)
        if len(overrides) > 1:
            options.tensor_buft_overrides = ctypes.addressof(overrides)  # held while it loads
        options.load_mtp = self._is_mtp
        if params.rope_factors:
            factors = self._factors(slice_file.info)
            options.kv_overrides = factors  # held while it loads
        # repacking copies the weights: mapped, they would be in memory twice
        options.load_mode = LOAD_BY_READING if repacks else LOAD_BY_MAPPING
        ggml.hear_errors()
        model = self.lib.llama_model_load_from_file(str(slice_file.path).encode(), options)
        if not model:
            raise UserError(f"{self.where} cannot be loaded: {ggml.last_errors() or 'libllama gives no reason'}")
        return model

    def _overrides(self, slice_file: SliceFile, n_on_cpu: int, repacks: bool) -> "ctypes.Array[_BufferOverride]":
        """For libllama, with an empty one behind the last. `n_on_cpu`: layers."""
        moved = moved_tensors(slice_file.info, slice_file.first, slice_file.last, self.params.places)
        types = {pattern: ggml.buffer_type(device) for pattern, device in moved.items()}
        if repacks:
            in_host = [pattern for pattern, device in moved.items() if device == HOST]
            planes = [pattern for pattern in in_host if any(name in pattern for name in PLANES)]
            layers = "|".join(map(str, range(n_on_cpu)))
            planes += [rf"^blk\.({layers})\.({'|'.join(PLANES)})\.weight"] * bool(layers)
            types |= dict.fromkeys(planes, ggml.mapped_buffers())
        overrides = [_BufferOverride(pattern.encode(), type) for pattern, type in types.items()]
        return (_BufferOverride * (len(overrides) + 1))(*overrides)

    def _factors(self, info: ModelInfo) -> Any:
        """For libllama, which takes the long rope factors in contexts of more cells than this entry says; and an empty
        one."""
        overrides = (self.lib.llama_model_kv_override * 2)()
        overrides[0].tag = self.lib.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[0].key = f"{info.architecture}.{N_CTX_SHORT}".encode()
        overrides[0].value.val_i64 = 1 if self.params.rope_factors == LONG else MOST_CELLS
        return overrides

    def create_context(self, size: ContextSize) -> LlamaContext:
        """A context that the caller frees. Raises UserError if there is no memory for it."""
        params, options = self.params, self.lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = size[:4]
        # libllama holds logits for one row a sequence at least, and ends the process where fewer are allowed
        options.n_outputs_max = max(size.n_outputs, size.n_seq_max)
        options.n_threads = options.n_threads_batch = params.n_threads
        options.kv_unified = options.swa_full = options.no_perf = True
        options.op_offload = False
        options.flash_attn_type = FLASH_ATTENTION_ON if params.flash else FLASH_ATTENTION_AUTO
        options.type_k, options.type_v = size.cache_types
        if self.callback.is_needed:
            options.cb_eval, options.cb_eval_user_data = self.callback.function, ctypes.addressof(self.callback.state)
        options.yarn_orig_ctx = self._n_ctx_short  # 0: as the file says
        options.ctx_type = MTP if self._is_mtp else 0
        handle = self.lib.llama_init_from_model(self.model, options)
        if not handle:
            what = f"no KV cache of {size.n_cells} cells for {self.where}"
            raise UserError(f"{what}: {ggml.last_errors()}; use a smaller context (-c) or more ranks")
        if self._has_output:  # else some architectures drop rows without logits before
            ggml.load_extension().llama_set_embeddings_nextn(handle, True, False)
        return LlamaContext(handle, size)

    def decode(
        self, context: LlamaContext, batch: Batch, hidden: FloatArray | None, wanted: Flags | None, at: int = 0
    ) -> None:
        """Evaluate rows from their tokens, or from `hidden`; the residual stream goes to `out` from row `at` on. Raises
        EvaluationStopped, what `stop` raised, KvCacheFull and BatchRefused, RuntimeError for other failures."""
        self.callback.expect(len(batch.positions), context.size.n_ubatch, at, hidden)
        if self._tiles:
            self._tiles.use(context.size.are_blocks)
        if self._by_tokens:
            batch, hidden = replace(batch, tokens=np.zeros_like(batch.tokens)), None
        self._adapters.apply(context.handle, context.size.are_blocks, batch.adapters)
        n_threads = self.threads.begin()
        self.lib.llama_set_n_threads(context.handle, n_threads, n_threads)
        try:
            call = self.batch.fill(batch, hidden, wanted, both=self.is_head)
            code = int(self.lib.llama_decode(context.handle, call))
        finally:
            self.threads.end()
        if self.callback.fault is not None:
            raise self.callback.fault
        if self.callback.stopped:
            raise EvaluationStopped
        if code == NO_SLOT:
            raise self.cache_full(context, len(batch.positions))
        if code:
            kind = BatchRefused if code == INVALID_BATCH else RuntimeError
            call = f"llama_decode of {len(batch.positions)} rows"
            raise kind(f"{call} in {self.where} failed with {code}: {ggml.last_errors()}")

    def n_cells(self, context: LlamaContext) -> int:
        """Without those for rows that fill groups up."""
        return int(self.lib.llama_n_ctx(context.handle)) - GROUP_CELLS * bool(self.params.group)

    def cache_full(self, context: LlamaContext, n_rows: int) -> KvCacheFull:
        return KvCacheFull(f"no room for {n_rows} rows in the KV cache of {self.n_cells(context)} cells")
