"""What libllama takes besides weights, keys and values. Knows headers; loads nothing.

The forms follow libllama's own figures ("compute buffer size", "output buffer size") for llama, qwen2, falcon, qwen3moe
and phi3 models: within a few MB, rather above than below.
"""

from functools import lru_cache

from pipeinfer.models.gguf.model_info import ModelInfo, layer_of

CELL_BYTES = 64  # what the cache notes of a cell: position, sequences
ROW_PADDING = 32


def buffer_bytes(info: ModelInfo, is_last: bool, n_cells: int, n_rows: int, n_outputs: int) -> int:
    """Of one context, for batches of up to `n_rows` rows, of which `n_outputs` may want logits on the last slice."""
    n_outputs = n_outputs if is_last else 0
    padded = -(-n_rows // ROW_PADDING) * ROW_PADDING
    mask = 2 * padded * n_cells  # float16: which cell a row sees
    hidden = 4 * n_rows * (info.n_embd + feed_forward_length(info))
    logits = 4 * n_outputs * info.n_vocab
    residual = 4 * n_rows * info.n_embd  # copied out after the last layer
    # the logits are there twice: in the graph, which uses the layers' room for them, and in what is read from
    return mask + max(4 * hidden, logits) + logits + residual + CELL_BYTES * n_cells


@lru_cache(maxsize=8)  # a planner asks for every way to cut
def feed_forward_length(info: ModelInfo) -> int:
    """Of the widest layer; of experts those that a row uses, together."""
    used = info.metadata.get(f"{info.architecture}.expert_used_count")
    n_used = used.value if used is not None and isinstance(used.value, int) else 1
    widths = [
        tensor.shape[0] * (n_used if "_exps" in tensor.name else 1)
        for tensor in info.tensors
        if layer_of(tensor.name) is not None and ".ffn_down" in tensor.name
    ]
    return max(widths, default=info.n_embd)
