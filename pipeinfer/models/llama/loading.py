"""Load a slice into libllama, and find out what its caches hold. Knows no context and no batch."""

import ctypes
import math
from types import ModuleType

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.slice import ModelInfo, SliceFile
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.devices import device_list
from pipeinfer.models.llama.params import IS_X86, LlamaParams
from pipeinfer.models.llama.prefill import CacheForm

LOAD_BY_READING, LOAD_BY_MAPPING = 0, 1
ROPE_OF_PLANES, PLANE_BYTES = (8, 40), 12  # positions of several dimensions, and what a cell notes of them


def load_model(lib: ModuleType, slice_file: SliceFile, params: LlamaParams, where: str) -> object:
    """libllama's model, which the caller frees. `where` says in errors what it is.

    Raises UserError when the build does not do, or libllama refuses it.
    """
    if params.n_gpu_layers and not lib.llama_supports_gpu_offload():
        shown = "all" if params.n_gpu_layers < 0 else params.n_gpu_layers
        raise UserError(f"this llama-cpp-python has no GPU support: -ngl {shown} (of drafts -ngld) needs 0, or a "
                        "build with CMAKE_ARGS=-DGGML_CUDA=on")  # fmt: skip
    options = lib.llama_model_default_params()
    n_layer = slice_file.last - slice_file.first
    options.n_gpu_layers = n_layer + 1 if params.n_gpu_layers < 0 else params.n_gpu_layers
    devices = None if params.devices is None else device_list(params.devices)  # to live while it loads
    options.devices = devices and ctypes.addressof(devices)
    options.use_extra_bufts = params.repack and (not params.exact or bool(params.repacked)) and ggml.amx_works()
    options.load_mtp = slice_file.info.head is not None and slice_file.info.head.own
    # repacking copies the weights: mapped, they would be in memory twice
    options.load_mode = LOAD_BY_READING if options.use_extra_bufts else LOAD_BY_MAPPING
    ggml.hear_errors()
    model = lib.llama_model_load_from_file(str(slice_file.path).encode(), options)
    if not model:
        raise UserError(f"{where} cannot be loaded: {ggml.last_errors() or 'libllama gives no reason'}")
    return model


def token_table(slice_file: SliceFile) -> ggml.TokenTable:
    """Of a first slice: what its tokens come in as."""
    info = slice_file.info
    scale = math.sqrt(info.n_embd) if info.layers.known.scaled else 1.0
    if slice_file.table:
        (table, source), slice_file.table = slice_file.table, None  # it is the lookup's to close now
        return ggml.TokenTable(table, source, scale)
    found = info.tensor("token_embd.weight")
    assert found is not None, info.path
    return ggml.TokenTable(found, info.source(found.path), scale)


def cache_form(lib: ModuleType, model: object, info: ModelInfo) -> CacheForm:
    """x86 has vector instructions for keys in BF16; where it has not, rounded values cost less."""
    has_planes, has_values = lib.llama_model_rope_type(model) in ROPE_OF_PLANES, not info.layers.shares_values
    window = lib.llama_model_n_swa(model)
    return CacheForm(PLANE_BYTES if has_planes else 0, has_values, IS_X86 or not has_values, window)
