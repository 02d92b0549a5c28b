"""What a slice is loaded with, and what follows for the batches that it computes. Loads nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

TILED_TYPES = frozenset([10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29])
"""GGML types, the K-quants and their kin, for which x86 builds have another kernel from TILED_ROWS rows on."""

TILED_ROWS = 8

OTHER_ALONE = frozenset([0, 1, 20, 30])
"""The same from two rows on: F32, F16, IQ4_NL, BF16."""


@dataclass(frozen=True)
class LlamaParams:
    """n_cells          KV cells, rounded up to a multiple of 256
    n_seq_max        sequence ids, the highest of which the stage keeps for itself; users have 0 .. n_seq_max - 2
    n_batch          rows of the largest batch
    n_outputs_max    rows of a batch that may want logits, on the last stage; for the larger of this and n_seq_max it
                     takes 8 bytes a row and token of the vocabulary
    n_threads        at most; fewer while other processes want the cores, or where fewer are faster
    n_gpu_layers     how many of this slice's layers go to the GPU; negative: all
    devices          names of libllama's devices that these layers go to; None: as libllama likes, empty: none
    stop_interval_s  about the time between two layers after which an evaluation may be ended; 0: after every one
    cache            types of keys and values, where these are not what `exact` needs
    exact            the same row gives the same bits in every batch and tree, as far as the layers are on the CPU; a
                     prompt's rows do if they come in blocks
    """

    n_cells: int
    n_seq_max: int = 32
    n_batch: int = 512
    n_outputs_max: int = 32
    n_threads: int = 1
    n_gpu_layers: int = 0
    exact: bool = True
    devices: tuple[str, ...] | None = None
    stop_interval_s: float = 0.0
    cache: CacheTypes = F16_CACHE

    @property
    def mixed_cache(self) -> bool:
        """Whether K and V have different types: that keeps a CPU's attention off the kernels whose sums depend on batch
        size and thread count. GPU builds have no kernel for it, and would move attention to the CPU without a word."""
        return self.exact and self.n_gpu_layers == 0


def largest_part(info: ModelInfo, params: LlamaParams) -> int:
    """Rows that may be computed at once if each shall have the bits that it has alone on a CPU, with `exact`."""
    if not params.exact or params.n_gpu_layers or not IS_X86:
        return params.n_batch
    head = "token_embd.weight" if info.tied else "output.weight"
    types = {
        tensor.type
        for tensor in info.tensors
        if (layer_of(tensor.name) is not None or tensor.name == head) and sum(length > 1 for length in tensor.shape) > 1
    }
    return 1 if types & OTHER_ALONE else min(params.n_batch, TILED_ROWS - 1) if types & TILED_TYPES else params.n_batch
