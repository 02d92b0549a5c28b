"""Random LoRA adapters for models of tests. Deterministic by seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pipeinfer.models.gguf.model_info import layer_of, read_model_info

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_adapter(
    path: Path,
    model: Path,
    rank: int = 8,
    kind: str = "F16",
    alpha: float = 12.0,
    names: tuple[str, ...] = MATRICES,
    ranks: Mapping[str, int] = {},
    seed: int = 0,
    strength: float = 1.0,
    head: bool = False,
    **metadata: str,
) -> Path:
    """An adapter of all layers' matrices of these names, `head`: and of the output. `ranks`: others of some names;
    `metadata`: other values of `general.type`, `architecture` and `adapter.type`."""
    info, rng = read_model_info(model), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, metadata.get("architecture", info.architecture))
    writer.add_type(metadata.get("type", "adapter"))
    writer.add_string("adapter.type", metadata.get("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    for tensor in info.tensors:
        is_head = head and tensor.name == "output.weight"
        is_named = layer_of(tensor.name) is not None and tensor.name.split(".")[2] in names
        if not (is_head or (is_named and tensor.name.endswith(".weight"))):
            continue
        n_in, n_out, *planes = tensor.shape
        r = ranks.get(tensor.name.split(".")[-2], rank)
        for end, shape in ((".lora_a", (r, n_in)), (".lora_b", (n_out, r))):
            data = rng.standard_normal((*planes, *shape), np.float32) * np.float32(strength / np.sqrt(shape[-1]))
            _add(writer, tensor.name + end, data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, data: np.ndarray[Any, Any], kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, data)
    elif kind == "F16" or data.shape[-1] % 32:
        writer.add_tensor(name, data.astype(np.float16))
    else:
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(data, type_), raw_dtype=type_)
