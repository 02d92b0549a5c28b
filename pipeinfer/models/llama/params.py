"""What a slice is loaded with, and what follows for its batches and their memory. Loads nothing."""

import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.layers import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.llama.tensor_places import TensorPlaces

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

TILED_TYPES = frozenset([10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 22, 23, 29])
"""GGML types, the K-quants and similar ones, for which x86 builds have another kernel from TILED_ROWS rows on."""

TILED_ROWS = 8

OTHER_ALONE = frozenset([0, 1, 20, 30])  # the same from two rows on: F32, F16, IQ4_NL, BF16
NUMA_STRATEGIES = ("distribute", "isolate", "numactl")  # in the order of libggml's numbers, which begin with 1
NARROW = 32  # columns of a matrix of one block a row: from 32 rows on AMX kernels read beyond it
LEAST_PART = 3  # rows at once: with fewer guesses would cost as much as tokens
GROUP = 4  # rows that libggml's kernels for repacked weights multiply at a time
MANY = 8
"""Requests from which on rows come in groups. A row alone costs as much as a group then, up to twice as much as in a
part; the mean time of a run of 1 to 8 rows is 0.85 of that in parts, of 1 to 4 rows 1.0."""

MANY_TILED, TILED_SHARE = 16, 1 / 8
"""Requests from which on, and the share of a model's bytes in TILED_TYPES that are not repacked from which on, groups
have TILED_ROWS rows, so that tiled kernels multiply: against groups of GROUP 32 rows of a Q4_K_M model take 0.8 of the
time, 16 rows 0.93, 8 rows 1.1, up to 4 rows 2.0."""

GROUP_CELLS = 256  # cells for rows that fill a group up: libllama rounds caches up to so many
CELL_INFO_BYTES = 64  # of a cell's position and sequences
ROW_PADDING = 32


class TypeRows(NamedTuple):
    """Weights of a GGML type with exact numerics.

    n_rows     rows that may be computed at once, each with the bits that it has alone
    in_groups  rows are computed in whole groups of `n_rows` instead, GROUP or TILED_ROWS, any number of groups at once,
               each with the bits that it has in one of them"""

    type: int
    n_rows: int
    in_groups: bool = False


def in_whole_groups(n_rows: int, group: int) -> int:
    """Rounded up to whole groups of `group` rows."""
    return -(-n_rows // group) * group


@dataclass(frozen=True)
class LlamaParams:
    """n_cells          KV cells, rounded up to a multiple of 256
    n_seq_max        sequence ids, the highest of which the stage uses itself; users have 0 .. n_seq_max - 2
    n_batch          rows of the largest batch
    n_outputs_max    rows of a batch that may want logits, on the last stage; the larger of this and n_seq_max takes 8
                     bytes a row and token of the vocabulary
    n_threads        at most; fewer while other processes want the cores
    n_gpu_layers     layers of this slice on the GPU; negative: all
    devices          names of libllama's devices for these layers; None: libllama's choice, empty: none
    places           tensors that are on other devices than their layers
    stop_interval_s  approximate time between two calls of `stop`; 0: after every layer
    cache            types of keys and values, unless `exact` determines them
    repack           whether weights may be repacked
    repacked         types of weights that are repacked, with `exact`, and how rows of each are computed; empty: none.
                     In groups: all types of the model's matrices
    taps             layers of the slice, from 0 on, after which the residual stream is copied out
    exact            the same row gives the same bits in every batch and tree, if the layers are on the CPU, or
                     `at_once` holds; a prompt's rows do if they come in blocks
    parks            removed cells stay, out of sight, until all are packed, as they do with `exact`
    rope_factors     which of the model's two sets, `short` or `long`; empty: it has one, or libllama chooses for each
                     context by its size
    at_once          rows that the devices of all layers compute at once, each with the bits that it has alone there, by
                     `device_proof`; 0: none are known"""

    n_cells: int
    n_seq_max: int = 32
    n_batch: int = 512
    n_outputs_max: int = 32
    n_threads: int = 1
    n_gpu_layers: int = 0
    exact: bool = True
    devices: tuple[str, ...] | None = None
    places: TensorPlaces = TensorPlaces()  # noqa: RUF009 (it is frozen)
    stop_interval_s: float = 0.0
    repack: bool = True
    repacked: tuple[TypeRows, ...] = ()
    cache: CacheTypes = F16_CACHE
    taps: tuple[int, ...] = ()
    at_once: int = 0
    rope_factors: str = ""
    parks: bool = False

    @property
    def mixed_cache(self) -> bool:
        """Whether K and V have different types: that keeps a CPU's attention off the kernels whose sums depend on batch
        size and thread count. GPU builds have no kernel for it, and would move attention to the CPU without a word."""
        return self.exact and self.n_gpu_layers == 0 and not self.at_once

    @property
    def parked(self) -> bool:
        """Whether removed cells stay until all are packed."""
        return self.exact or self.parks

    @property
    def flash(self) -> bool:
        """Whether attention must be flash attention."""
        return self.mixed_cache or self.at_once > 0

    @property
    def group(self) -> int:
        """Rows of a group, where rows are computed in whole groups; else 0."""
        return rows_in_groups(self.repacked)

    def with_room(self) -> "LlamaParams":
        """With room for the rows that fill groups up."""
        if not self.group:
            return self
        n_batch, n_outputs_max = (in_whole_groups(n_rows, self.group) for n_rows in (self.n_batch, self.n_outputs_max))
        return replace(self, n_cells=self.n_cells + GROUP_CELLS, n_batch=n_batch, n_outputs_max=n_outputs_max)


def rows_in_groups(repacked: Collection[TypeRows]) -> int:
    """Rows of a group; 0 where rows come in parts."""
    return max((each.n_rows for each in repacked if each.in_groups), default=0)


def types_in_groups(
    info: ModelInfo,
    in_parts: tuple[TypeRows, ...],
    repacked: Collection[int],
    alike: Collection[tuple[int, int]],
    n_requests: int,
) -> tuple[TypeRows, ...]:
    """All types of the model's matrices, with rows in groups, if that is faster with so many requests than `in_parts`,
    and gives a row the same bits in every batch; else none. `repacked`: types that libggml repacks. `alike`: types, and
    sizes of their groups, of which a row has the same bits in all whole groups. The number of rows of an expert depends
    on the other rows, so that models with experts, or other matrices of three dimensions, have none."""
    sizes, layers = matrix_bytes(info), info.layers.architecture
    has_planes = any(sum(length > 1 for length in tensor.shape) > 2 for tensor in info.tensors)
    has_states = layers.states is not None
    part = largest_part(info, LlamaParams(0, repacked=in_parts))
    if has_planes or has_states or _is_narrow(info) or not layers.flash or n_requests < MANY or part >= GROUP:
        return ()
    tiled = sum(n_bytes for type, n_bytes in sizes.items() if type in TILED_TYPES and type not in repacked)
    is_tiled = n_requests >= MANY_TILED and tiled >= TILED_SHARE * sum(sizes.values())
    for group in (TILED_ROWS, GROUP)[not is_tiled :]:
        if all((type, group) in alike for type in sizes):
            return tuple(TypeRows(type, group, True) for type in sorted(sizes))
    return ()


def worth_repacking(info: ModelInfo, params: LlamaParams, possible: tuple[TypeRows, ...]) -> tuple[TypeRows, ...]:
    """The model's types among those that can be repacked, if that is faster with `exact`; else none: libllama repacks
    all or none of them. Such kernels took 5 to 30% less time for as many rows with all models that were tried (x86 with
    AVX-512). Smaller parts cost more than that where little is repacked: 8 rows took 1.4 times as long with Q4_K_M
    files of small models, most of whose rows do not divide into its blocks. None either where a matrix is NARROW."""
    if _is_narrow(info):
        return ()
    sizes = matrix_bytes(info)
    repacked = tuple(each for each in possible if each.type in sizes)
    n_rows, before = (largest_part(info, replace(params, repacked=each)) for each in (repacked, ()))
    most = 2 * sum(sizes[each.type] for each in repacked) >= sum(sizes.values())
    return repacked if n_rows >= min(before, LEAST_PART) and (most or n_rows >= before) else ()


def may_lay_out(info: ModelInfo, repack: bool, exact: bool, repacked: Collection[TypeRows]) -> bool:
    """Whether libllama may copy the model's weights into the layout of faster kernels, with these numerics."""
    return repack and (not exact or bool(repacked)) and not _is_narrow(info)


def _is_narrow(info: ModelInfo) -> bool:
    """Whether a matrix is NARROW: its model is never repacked."""
    return any(tensor.shape[0] == NARROW and tensor.type not in OTHER_ALONE for tensor in _matrices(info))


def largest_part(info: ModelInfo, params: LlamaParams) -> int:
    """Rows that may be computed at once, with `exact` so that each has the bits that it has alone."""
    if params.at_once:
        return min(params.n_batch, params.at_once)
    if not params.exact or params.n_gpu_layers or params.group:
        return params.n_batch
    types, repacked = matrix_bytes(info).keys(), {each.type: each.n_rows for each in params.repacked}
    as_in_file = types - repacked.keys() if IS_X86 else set[int]()
    limits = [n_rows for type, n_rows in repacked.items() if type in types]
    limits += [1] * bool(as_in_file & OTHER_ALONE) + [TILED_ROWS - 1] * bool(as_in_file & TILED_TYPES)
    return min(params.n_batch, *limits) if limits else params.n_batch


@lru_cache(maxsize=8)  # a planner asks for every way to cut
def matrix_bytes(info: ModelInfo) -> Mapping[int, int]:
    """Bytes of the matrices of each GGML type."""
    n_bytes: Counter[int] = Counter()
    for tensor in _matrices(info):
        n_bytes[tensor.type] += tensor.n_bytes
    return n_bytes


def _matrices(info: ModelInfo) -> Iterator[Tensor]:
    """Of the layers and the output head."""
    head = "token_embd.weight" if info.tied else "output.weight"
    for tensor in info.tensors:
        is_used = layer_of(tensor.name) is not None or tensor.name == head
        if is_used and sum(length > 1 for length in tensor.shape) > 1:
            yield tensor


def buffer_bytes(info: ModelInfo, is_last: bool, n_cells: int, n_rows: int, n_outputs: int, n_wanted: int) -> int:
    """The memory of its host that libllama fills for one context beside weights, keys and values, for batches of up to
    `n_rows` rows, of which `n_wanted` want logits on the last slice. The output has room for `n_outputs`, and all of it
    is cleared; what else is reserved and never written takes no memory. The forms follow libllama's own figures
    ("compute buffer size", "output buffer size") for llama, qwen2, falcon, qwen3moe and phi3 models: within a few MB,
    rather above."""
    logits = 4 * (n_outputs if is_last else 0) * info.n_vocab  # of the output
    residual = 4 * n_rows * info.n_embd  # copied out after the last layer
    return graph_bytes(info, is_last, n_cells, n_rows, n_wanted) + logits + residual + CELL_INFO_BYTES * n_cells


def graph_bytes(info: ModelInfo, is_last: bool, n_cells: int, n_rows: int, n_outputs: int, experts: bool = True) -> int:
    """The part of `buffer_bytes` where layers are computed ("compute buffer size"). `experts`: those are too."""
    padded = -(-n_rows // ROW_PADDING) * ROW_PADDING
    mask = 2 * padded * n_cells  # float16
    hidden = 4 * n_rows * (info.n_embd + feed_forward_length(info, experts))
    return mask + max(4 * hidden, 4 * n_outputs * info.n_vocab if is_last else 0)  # logits use the layers' memory


@lru_cache(maxsize=8)  # a planner asks for every way to cut
def feed_forward_length(info: ModelInfo, experts: bool = True) -> int:
    """The widest layer's; of experts the sum of those that a row uses. Without `experts` they do not count."""
    used = info.metadata.get(f"{info.architecture}.expert_used_count")
    n_used = used.value if used is not None and isinstance(used.value, int) else 1
    widths = [
        tensor.shape[0] * (n_used if "_exps" in tensor.name else 1)
        for tensor in info.tensors
        if layer_of(tensor.name) is not None and ".ffn_down" in tensor.name and (experts or "_exps" not in tensor.name)
    ]
    return max(widths, default=info.n_embd if experts else 0)
