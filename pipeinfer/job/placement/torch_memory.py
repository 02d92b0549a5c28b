"""What ranks of torch will hold in memory. Loads no torch."""

from functools import lru_cache

from pipeinfer.cluster.hosts.free_memory import Memory
from pipeinfer.job.options.backends import Backend
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.gguf.slice import slice_bytes
from pipeinfer.models.llama.buffers import feed_forward_length
from pipeinfer.models.torch.params import AUTO, BF16, CACHE_BYTES, CPU, F32, HEAD_BYTES, INT4, WEIGHT_BYTES

RUNTIME_BYTES = 290_000_000
"""What Python, MPI, libllama and torch's build for CPUs take on a rank before any model is there (measured)."""

N_WIDE = 6
"""Rows of the widest kind, gates and what is above them, that are there at a time."""


def torch_memory(
    info: ModelInfo, first: int, last: int, n_cells: int, n_rows: int, n_outputs: int, backend: Backend, in_file: bool,
    is_sent: bool = False,
) -> Memory:  # fmt: skip
    """Of layers [first, last) with one context. `in_file`: on a disk, else a slice is in memory while it is loaded; a
    whole model that `is_sent` stays there, for its tokens. What a GPU holds is not counted; `auto` may be on one, and
    is taken to be on none."""
    dtype = F32 if backend.dtype == AUTO and not backend.wants_gpu else backend.dtype.replace(AUTO, BF16)
    n_bytes = CACHE_BYTES[dtype]
    is_whole, is_last = (first, last) == (0, info.n_layer), last == info.n_layer
    loading, kept = 0 if in_file or is_whole else slice_bytes(info, first, last), info.n_bytes * (is_whole and is_sent)
    if backend.wants_gpu:
        return Memory(weights=kept, runtime=RUNTIME_BYTES, loading=loading)
    rows = 4 * n_rows * (N_WIDE * feed_forward_length(info) + N_WIDE * info.n_embd)
    logits = 2 * 4 * n_outputs * info.n_vocab if is_last else 0
    mask = 4 * n_rows * n_cells * _group(info)  # of each query head of a key head, what its rows see
    # keys and values of one layer are gathered in the order of positions
    gathered = n_cells * n_bytes // 2 * max(info.kv_bytes_per_cell[first:last])
    return Memory(
        weights=kept + weight_bytes(info, first, last, dtype),
        kv=n_cells * n_bytes // 2 * sum(info.kv_bytes_per_cell[first:last]),
        buffers=rows + logits + mask + gathered,
        loading=loading,
        runtime=RUNTIME_BYTES,
    )


@lru_cache(maxsize=1 << 16)
def weight_bytes(info: ModelInfo, first: int, last: int, dtype: str, device: str = CPU) -> int:
    """Of layers [first, last), with the output head and norm on the last slice."""
    own = sum(
        tensor.n_elements
        for tensor in info.tensors
        if (layer := layer_of(tensor.name)) is not None and first <= layer < last
    )
    head = info.tensor("token_embd.weight" if info.tied else "output.weight")
    n_head = head.n_elements if head is not None and last == info.n_layer else 0
    # on a GPU there is no kernel for a head in 8 bits
    head_bytes = HEAD_BYTES[BF16 if dtype == INT4 and device != CPU else dtype]
    return int(own * WEIGHT_BYTES[dtype] + n_head * head_bytes)


def _group(info: ModelInfo) -> int:
    """Query heads of a key head."""
    heads = info.layers.of_layers("attention.head_count", 1)[0]
    heads_kv = info.layers.of_layers("attention.head_count_kv", heads if isinstance(heads, int) else 1)[0]
    return max(1, heads // max(1, heads_kv)) if isinstance(heads, int) and isinstance(heads_kv, int) else 1
