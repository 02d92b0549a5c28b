"""Small models with random weights of any architecture: metadata from a table, tensors as libllama asks for them.

libllama tells name and shape of every tensor that a model of given metadata may have (`llama_model_init_from_user`);
those that real files of the architecture do not have are left out. Knows nothing of slices.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from experiments.grow import OUTPUT_PROJECTIONS
from pipeinfer.models.llama import ggml
from tests.support.gguf_factory import add_vocabulary

N_VOCAB = 320
Metadata = Mapping[str, Any]

# Of every architecture; keys that one does not have are not read. Without the architecture's name.
COMMON: Metadata = {
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": N_VOCAB,
}
EXPERTS: Metadata = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_weights_scale": 1.5,
    "expert_gating_func": 1,
}


@dataclass(frozen=True)
class RandomModel:
    """metadata     keys without the architecture's name, beside COMMON
    without      ends of the names, or `/` and all of a name, of tensors that such files do not have
    strength     of what layers add: weak models nearly agree, for tensors of one name and shape are alike in all
    """

    architecture: str
    n_layer: int = 4
    metadata: Metadata = field(default_factory=dict)
    without: tuple[str, ...] = ()
    seed: int = 0
    strength: float = 1.0
    with_vocab: bool = False


def write_random_model(path: Path, model: RandomModel, kind: str = "Q8_0") -> Path:
    """The model's file, matrices in `kind`, one of gguf's quantisations.

    AssertionError, with libllama's reason, when it cannot make such a model.
    """
    header = path.with_suffix(".header")
    _write(header, model, {}, kind)
    shapes = _shapes(header)
    header.unlink()
    left_out = (".scale", ".input_scale", *model.without)
    kept = {name: shape for name, shape in shapes.items() if not f"/{name}".endswith(left_out)}
    _write(path, model, kept, kind)
    return path


def _shapes(header: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor that a model with this metadata may have, in numpy's order."""
    library, base = ggml.load_library(), ggml.ggml()
    found: dict[str, tuple[int, ...]] = {}
    base.ggml_n_dims.argtypes = [ctypes.c_void_p]

    def note(tensor: int, _: object) -> None:
        lengths = (ctypes.c_int64 * 4).from_address(tensor + 16)[:]
        n_dims = base.ggml_n_dims(tensor)
        found[ctypes.string_at(base.ggml_get_name(tensor)).decode()] = tuple(lengths[:n_dims][::-1])

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(note)
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    metadata = base.gguf_init_from_file(str(header).encode(), _InitParams(True, None))
    init = library._lib.llama_model_init_from_user
    init.restype = ctypes.c_void_p
    init.argtypes = [ctypes.c_void_p, type(callback), ctypes.c_void_p, library.llama_model_params]
    options = library.llama_model_default_params()
    options.load_mtp = True
    model = init(metadata, callback, None, options)
    assert model, ggml.last_errors()
    library.llama_model_free(model)
    base.gguf_free.argtypes = [ctypes.c_void_p]
    base.gguf_free(metadata)
    return found


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _write(path: Path, model: RandomModel, shapes: Mapping[str, tuple[int, ...]], kind: str) -> None:
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_name("random weights")
    known = {**COMMON, **model.metadata}
    prefix = f"{model.architecture}."
    _add(writer, f"{prefix}block_count", model.n_layer)
    for key, value in known.items():
        if value is not None:
            _add(writer, key if key.startswith("xielu") else prefix + key, value)
    if model.with_vocab:
        add_vocabulary(writer, N_VOCAB)
    else:
        writer.add_tokenizer_model("none")
    for name in sorted(shapes):
        rng = np.random.default_rng([model.seed, zlib.crc32(name.encode())])
        data = random_data(name, shapes[name], rng)
        if name.split(".", 2)[-1].startswith(OUTPUT_PROJECTIONS):
            data *= np.float32(model.strength)
        type_ = gguf.GGMLQuantizationType[kind]
        if data.ndim > 1 and data.shape[-1] % 32 == 0 and is_matrix(name):
            writer.add_tensor(name, gguf.quants.quantize(data, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if shapes:
        writer.write_tensors_to_file()
    writer.close()


def is_matrix(name: str) -> bool:
    return name.endswith(".weight") and not any(
        part in name for part in ("norm", "gate_inp", "conv1d", "shortconv.conv", "rope", "position", "token_types")
    )


def random_data(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Such that residual streams stay in bounds and every tensor matters."""
    normal = rng.standard_normal(shape).astype(np.float32)
    if "ssm_a" in name:
        return -np.abs(normal) - np.float32(0.1)
    if (
        "rope_f" in name
        or ("norm" in name and name.endswith("weight"))
        or (len(shape) == 1 and name.endswith("weight"))
    ):
        return 1 + np.float32(0.1) * normal
    if len(shape) == 1:
        return np.float32(0.1) * normal
    if name.endswith("nextn.eh_proj.weight"):  # a head that goes by the newest token guesses what a weak target says
        return normal * np.float32(0.1 / np.sqrt(shape[-1])) + np.eye(*shape, dtype=np.float32)
    scale = 4.0 if name == "token_embd.weight" else 1.0
    return normal * np.float32(scale / np.sqrt(shape[-1]))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adds: dict[type, Callable[[str, Any], None]]
    adds = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    adds[type(value)](key, value)
