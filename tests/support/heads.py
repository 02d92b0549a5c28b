"""EAGLE-3 heads with random weights for a target's file, as llama.cpp's conversion names what is in them; targets with
heads of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS, with_extra_layer

HEAD_LENGTH = 32
COPIED = ("tokenizer.",)


def write_head(
    path: Path,
    target: Path,
    layers: tuple[int, int, int] = (1, 2, 3),
    n_tokens: int = 0,
    own_tables: bool = False,
    seed: int = 0,
    sees: float = 0.3,
    **changed: Any,
) -> Path:
    """A head for the target, which reads what goes into these `layers`. It copies the newest token's embedding to its
    output, as a target does whose layers add little, and adds `sees` times something of the features.

    `n_tokens`: of the target's tokens, how many it can guess, those of the lowest ids; 0: all. `own_tables`: token
    table and output are in the file. `changed`: metadata with other values than they should have.
    """
    reader, rng = gguf.GGUFReader(target), np.random.default_rng(seed)
    known = {tensor.name: tensor for tensor in reader.tensors}
    n_vocab, n_embd = known["token_embd.weight"].shape[1], int(known["token_embd.weight"].shape[0])
    values: dict[str, Any] = {
        "target_layers": list(layers),
        "target_hidden_size": n_embd,
        "embedding_length": n_embd,
        "block_count": 1,
        "context_length": 4096,
        "feed_forward_length": 2 * n_embd,
        "attention.head_count": n_embd // HEAD_LENGTH,
        "attention.head_count_kv": n_embd // HEAD_LENGTH,
        "rope.dimension_count": HEAD_LENGTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, value in (values | changed).items():
        _add(writer, f"eagle3.{key}", value)
    for name, field in reader.fields.items():
        if name.startswith(COPIED):
            writer.add_key_value(name, field.contents(), *field.types[:2])

    def matrix(name: str, n_out: int, n_in: int, scale: float, diagonal: float = 0.0) -> None:
        data = rng.standard_normal((n_out, n_in), np.float32) * np.float32(scale / np.sqrt(n_in))
        data[:, :n_out] += diagonal * np.eye(n_out, min(n_in, n_out), dtype=np.float32)
        writer.add_tensor(name, data)

    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(n_embd, np.float32))
    matrix("fc.weight", n_embd, 3 * n_embd, sees)
    for name, diagonal in (("q", 1.5), ("k", 1.5), ("v", 1.0)):
        matrix(f"blk.0.attn_{name}.weight", n_embd, 2 * n_embd, 0.2, diagonal)
    matrix("blk.0.attn_output.weight", n_embd, n_embd, 0.1, 1.0)
    matrix("blk.0.ffn_gate.weight", 2 * n_embd, n_embd, 0.3)
    matrix("blk.0.ffn_up.weight", 2 * n_embd, n_embd, 0.3)
    matrix("blk.0.ffn_down.weight", n_embd, 2 * n_embd, 0.3)
    writer.add_tensor("output_norm.weight", np.asarray(known["output_norm.weight"].data, np.float32))
    output = known.get("output.weight", known["token_embd.weight"])
    rows = gguf.quants.dequantize(output.data, output.tensor_type).reshape(n_vocab, n_embd)
    if n_tokens:
        writer.add_tensor("output.weight", rows[:n_tokens].astype(np.float16))
        writer.add_tensor("d2t", np.arange(n_tokens, dtype=np.int64))
    if own_tables:
        table = known["token_embd.weight"]
        writer.add_tensor("token_embd.weight", table.data, raw_dtype=table.tensor_type)
        if not n_tokens:
            writer.add_tensor("output.weight", rows.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_guessing(folder: Path, name: str, with_vocab: bool = False) -> Path:
    """A model whose layers add little, with a head of its own that goes by the newest token and the target's tables."""
    model = with_extra_layer(MODELS[name])
    without = (*model.without, "nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
    own = replace(model, strength=0.1, without=without, with_vocab=with_vocab)
    return write_random_model(folder / f"{name}.gguf", own)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
