"""What the scripts that train models write alike: a GGUF file's shape, weights and end. Knows no net."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


def add_shape(
    writer: gguf.GGUFWriter,
    *,
    n_vocab: int,
    n_ctx: int,
    n_embd: int,
    n_layer: int,
    n_ff: int,
    n_head: int,
    n_head_kv: int,
    rope_base: float,
    norm_eps: float,
) -> None:
    """Of layers like llama's; a head has n_embd / n_head values, all of which are rotated."""
    writer.add_vocab_size(n_vocab)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_rope_dimension_count(n_embd // n_head)
    writer.add_rope_freq_base(rope_base)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_layer_norm_rms_eps(norm_eps)


def add_weight(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], type_name: str) -> None:
    """Matrices in this type, all else in F32."""
    kind = gguf.GGMLQuantizationType[type_name]
    if values.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
