"""What a slice is loaded with, and what follows for the batches that it computes. Loads nothing."""

import platform
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

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

GROUP = 4
"""Rows that libggml's kernels for repacked weights multiply at a time."""

MANY = 8
"""Requests from which on rows come in groups. A row alone costs as much as a group then, up to twice as much as in a
part; the mean time of a run of 1 to 8 rows is 0.85 of that in parts, of 1 to 4 rows 1.0."""

GROUP_CELLS = 256
"""Cells for rows that fill a group up: libllama rounds caches up to so many."""


class TypeRows(NamedTuple):
    """Weights of a type with exact numerics.

    type       ggml's
    n_rows     that may be computed at once so that each has the bits that it has alone
    in_groups  rows are computed in groups of `n_rows` instead, any number of groups at once: each has the bits that it
               has in one of them
    """

    type: int
    n_rows: int
    in_groups: bool = False


def in_whole_groups(n_rows: int) -> int:
    """So many rows, or the next number of them that is whole groups."""
    return -(-n_rows // GROUP) * GROUP


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
    repacked         types of weights that are repacked, with `exact`, and how rows of each are computed; empty: none
                     are. In groups: all types of the model's matrices
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
    repacked: tuple[TypeRows, ...] = ()
    cache: CacheTypes = F16_CACHE
    taps: tuple[int, ...] = ()

    @property
    def mixed_cache(self) -> bool:
        """Whether K and V have different types: that keeps a CPU's attention off the kernels whose sums depend on batch
        size and thread count. GPU builds have no kernel for it, and would move attention to the CPU without a word."""
        return self.exact and self.n_gpu_layers == 0

    @property
    def in_groups(self) -> bool:
        """Whether rows are computed in whole groups."""
        return rows_in_groups(self.repacked)

    def with_room(self) -> "LlamaParams":
        """With room for the rows that fill groups up."""
        if not self.in_groups:
            return self
        n_batch, n_outputs_max = map(in_whole_groups, (self.n_batch, self.n_outputs_max))
        return replace(self, n_cells=self.n_cells + GROUP_CELLS, n_batch=n_batch, n_outputs_max=n_outputs_max)


def rows_in_groups(repacked: Collection[TypeRows]) -> bool:
    return any(each.in_groups for each in repacked)


def in_groups(
    info: ModelInfo, repacked: tuple[TypeRows, ...], known: Collection[int], n_requests: int
) -> tuple[TypeRows, ...]:
    """All types of the model's matrices, with rows in groups, if that is faster with so many requests than rows in
    parts as `repacked` has them, and gives a row the same bits in every batch; else none.

    `known`: types of which a row has the same bits in all whole groups. How many rows an expert multiplies follows from
    the other rows, so that models with experts, or other matrices of three dimensions, have none.
    """
    types, layers = matrix_bytes(info).keys(), info.layers.known
    has_planes = any(sum(length > 1 for length in tensor.shape) > 2 for tensor in info.tensors)
    possible = types <= set(known) and not has_planes and layers.flash and layers.states is None
    part = largest_part(info, LlamaParams(0, repacked=repacked))
    is_faster = n_requests >= MANY and part < GROUP
    return tuple(TypeRows(type, GROUP, True) for type in sorted(types)) if possible and is_faster else ()


def worth_repacking(info: ModelInfo, params: LlamaParams, known: tuple[TypeRows, ...]) -> tuple[TypeRows, ...]:
    """Of the types that can be repacked, with how many rows of each may be computed at once, those of the model, if
    that is faster with `exact`; else none, since it is all or none of them.

    Such kernels took 5 to 30% less time for as many rows with all models that were tried (x86 with AVX-512). Smaller
    parts cost more than that where little is repacked: 8 rows took 1.4 times as long with Q4_K_M files of small models,
    most of whose rows do not divide into its blocks.
    """
    sizes = matrix_bytes(info)
    found = tuple(each for each in known if each.type in sizes)
    n_rows, before = (largest_part(info, replace(params, repacked=each)) for each in (found, ()))
    most = 2 * sum(sizes[each.type] for each in found) >= sum(sizes.values())
    return found if n_rows >= min(before, LEAST_PART) and (most or n_rows >= before) else ()


def largest_part(info: ModelInfo, params: LlamaParams) -> int:
    """Rows that may be computed at once if each shall have the bits that it has alone on a CPU, with `exact`."""
    if not params.exact or params.n_gpu_layers or params.in_groups:
        return params.n_batch
    types, repacked = matrix_bytes(info).keys(), {each.type: each.n_rows for each in params.repacked}
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
