"""What a slice is loaded with, and what follows for the batches that it computes. Loads nothing."""

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

TILED_TYPES = frozenset([10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29])
"""GGML types, the K-quants and their kin, for which x86 builds have another kernel from TILED_ROWS rows on."""

TILED_ROWS = 8

OTHER_ALONE = frozenset([0, 1, 20, 30])
"""The same from two rows on: F32, F16, IQ4_NL, BF16."""

NUMA_STRATEGIES = ("distribute", "isolate", "numactl")
"""In the order of libggml's numbers, which begin with 1."""

LEAST_PART = 3
"""Rows at once: with fewer guesses would cost as much as tokens."""


@dataclass(frozen=True)
class LlamaParams:
    """n_cells          KV cells, rounded up to a multiple of 256
    n_seq_max        sequence ids, the highest of which the stage keeps for itself; users have 0 .. n_seq_max - 2
    n_batch          rows of the largest batch
    n_outputs_max    rows of a batch that may want logits, on the last stage; for the larger of this and n_seq_max it
                     takes 8 bytes a row and token of the vocabulary
    n_threads        at most; fewer while other processes want the cores
    n_gpu_layers     how many of this slice's layers go to the GPU; negative: all
    devices          names of libllama's devices that these layers go to; None: as libllama likes, empty: none
    stop_interval_s  about the time between two layers after which an evaluation may be ended; 0: after every one
    cache            types of keys and values, where these are not what `exact` needs
    repack           whether weights may be repacked
    repacked         types of weights that are repacked, with `exact`, and how many rows of each may be computed at
                     once; empty: none are
    taps             layers of the slice, from 0 on, after which the residual stream is copied out besides
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
    repack: bool = True
    repacked: tuple[tuple[int, int], ...] = ()
    cache: CacheTypes = F16_CACHE
    taps: tuple[int, ...] = ()

    @property
    def mixed_cache(self) -> bool:
        """Whether K and V have different types: that keeps a CPU's attention off the kernels whose sums depend on batch
        size and thread count. GPU builds have no kernel for it, and would move attention to the CPU without a word."""
        return self.exact and self.n_gpu_layers == 0


def worth_repacking(
    info: ModelInfo, params: LlamaParams, known: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Of the types that can be repacked, with how many rows of each may be computed at once, those of the model, if
    that is faster with `exact`; else none, since it is all or none of them.

    Such kernels took 5 to 30% less time for as many rows with all models that were tried (x86 with AVX-512). Smaller
    parts cost more than that where little is repacked: 8 rows took 1.4 times as long with Q4_K_M files of small models,
    most of whose rows do not divide into its blocks.
    """
    sizes = matrix_bytes(info)
    found = tuple((type, n_rows) for type, n_rows in known if type in sizes)
    n_rows, before = (largest_part(info, replace(params, repacked=each)) for each in (found, ()))
    most = 2 * sum(sizes[type] for type, _ in found) >= sum(sizes.values())
    return found if n_rows >= min(before, LEAST_PART) and (most or n_rows >= before) else ()


def largest_part(info: ModelInfo, params: LlamaParams) -> int:
    """Rows that may be computed at once if each shall have the bits that it has alone on a CPU, with `exact`."""
    if not params.exact or params.n_gpu_layers:
        return params.n_batch
    types, repacked = matrix_bytes(info).keys(), dict(params.repacked)
    as_in_file = types - repacked.keys() if IS_X86 else set[int]()
    limits = [n_rows for type, n_rows in repacked.items() if type in types]
    limits += [1] * bool(as_in_file & OTHER_ALONE) + [TILED_ROWS - 1] * bool(as_in_file & TILED_TYPES)
    return min(params.n_batch, *limits) if limits else params.n_batch


@lru_cache(maxsize=8)  # a planner asks for every way to cut
def matrix_bytes(info: ModelInfo) -> Mapping[int, int]:
    """For each GGML type the bytes of the matrices that rows are multiplied by."""
    head = "token_embd.weight" if info.tied else "output.weight"
    found: Counter[int] = Counter()
    for tensor in info.tensors:
        is_used = layer_of(tensor.name) is not None or tensor.name == head
        if is_used and sum(length > 1 for length in tensor.shape) > 1:
            found[tensor.type] += tensor.n_bytes
    return found
