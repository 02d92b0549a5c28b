"""GGUF models of any size with random weights in bf16, written as fast as a disk takes them: matrices are pieces of one
pool of numbers. For benchmarks; no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.gguf_factory import add_vocabulary

POOL = 1 << 24
BF16 = gguf.GGMLQuantizationType.BF16


@dataclass(frozen=True)
class Size:
    """A llama's dimensions. Layers from `n_strong` on add only `weak` times as much: the first alone are a draft,
    whose best guess is right four times of five."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_strong: int = 2
    weak: float = 0.25


SIZES = {
    "tiny": Size(4, 64, 4, 2, 128, 320),
    "1b": Size(16, 2048, 32, 8, 8192, 128256),
    "8b": Size(32, 4096, 32, 8, 14336, 128256),
}


def write_random(path: Path, size: Size, n_layer: int = 0) -> Path:
    """The model, or its first `n_layer` layers alone."""
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    head_dim, n_layer = size.n_embd // size.n_head, n_layer or size.n_layer
    writer.add_name("random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(n_layer)
    writer.add_context_length(8192)
    writer.add_embedding_length(size.n_embd)
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_head)
    writer.add_head_count_kv(size.n_head_kv)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, size.n_vocab)
    made: dict[tuple[int, int, float], npt.NDArray[np.uint8]] = {}

    def matrix(name: str, n_out: int, n_in: int, scale: float = 1.0) -> None:
        """Of one shape and scale all are alike, which costs nothing to hold and is as much to read."""
        if (n_out, n_in, scale) not in made:
            numbers = np.resize(pool, (n_out, n_in)) * np.float32(scale / np.sqrt(n_in))
            made[n_out, n_in, scale] = gguf.quants.quantize(numbers, BF16)
        writer.add_tensor(name, made[n_out, n_in, scale], raw_dtype=BF16)

    ones = np.ones(size.n_embd, np.float32)
    matrix("token_embd.weight", size.n_vocab, size.n_embd, 8.0)
    matrix("output.weight", size.n_vocab, size.n_embd, 6.0)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(n_layer):
        at, adds, kv = f"blk.{layer}.", 1.0 if layer < size.n_strong else size.weak, size.n_head_kv * head_dim
        writer.add_tensor(f"{at}attn_norm.weight", ones)
        writer.add_tensor(f"{at}ffn_norm.weight", ones)
        for name, n_out in (("q", size.n_embd), ("k", kv), ("v", kv)):
            matrix(f"{at}attn_{name}.weight", n_out, size.n_embd)
        matrix(f"{at}attn_output.weight", size.n_embd, size.n_embd, adds)
        for name in ("gate", "up"):
            matrix(f"{at}ffn_{name}.weight", size.n_ff, size.n_embd)
        matrix(f"{at}ffn_down.weight", size.n_embd, size.n_ff, adds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
