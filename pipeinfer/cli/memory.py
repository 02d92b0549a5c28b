"""What each rank of a plan will hold in memory: its models, their contexts, and what comes with them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.blocks import LARGEST
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.values import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.cluster.plan import Plan
from pipeinfer.cluster.room import Memory, check_room, free_room
from pipeinfer.models.buffers import buffer_bytes
from pipeinfer.models.ggml import load_library
from pipeinfer.models.gguf_slice import slice_bytes
from pipeinfer.models.model_info import ModelInfo

CELLS_PADDING = 256  # libllama's
N_GUESS_ROWS = 32  # guesses a run carries at most
N_MESSAGES = 4  # on their way in and out of a rank at a time
TOKEN_BYTES = 150  # of a vocabulary, on rank 0


def plan_memory(
    options: RunOptions, plan: Plan, info: ModelInfo, drafts: Sequence[ModelInfo], n_cells: int, n_rows: int,
    n_in_blocks: int,
) -> tuple[Memory, ...]:  # fmt: skip
    """Of every rank. `n_rows`: of the largest run; `n_in_blocks`: of the prompt, which are evaluated in a context of
    their own. What a GPU holds is not counted."""
    found = [Memory(buffers=N_MESSAGES * 4 * n_rows * info.n_embd)] * plan.n_ranks
    found[0] += Memory(buffers=TOKEN_BYTES * info.n_vocab * (1 + len(drafts)))
    n_outputs, n_on_gpu = max(N_GUESS_ROWS, options.sequences) + 1, gpu_layers(options)
    for stage in plan.stages:
        found[stage.rank] += slice_memory(
            info, stage.first, stage.last, n_cells, n_rows, n_outputs, options.numerics == "exact",
            options.slice_cache is not None, n_on_gpu,
        )  # fmt: skip
        if n_in_blocks:
            found[stage.rank] += prefill_memory(info, stage.first, stage.last, n_in_blocks, n_rows, n_outputs)
    for rank, draft in zip(plan.drafts, drafts, strict=True):
        found[rank] += slice_memory(
            draft, 0, draft.n_layer, n_cells, N_GUESS_ROWS, n_outputs, exact=False, in_file=True, n_on_gpu=n_on_gpu
        )
    return tuple(found)


def gpu_layers(options: RunOptions) -> int:
    """How many of a model's layers this rank puts on its GPU; negative: all."""
    if options.n_gpu_layers != AUTO_LAYERS:
        return options.n_gpu_layers
    return ALL_LAYERS if load_library().llama_supports_gpu_offload() else 0


def check_alone(models: Sequence[tuple[ModelInfo, bool]], n_cells: int, n_rows: int) -> None:
    """Raises UserError when this host has no memory for whole models, each (model, exact), in this process."""
    total = Memory()
    for info, exact in models:
        total += slice_memory(info, 0, info.n_layer, n_cells, n_rows, n_rows, exact, in_file=True)
    check_room(["this host"], [free_room()], [total], "use a smaller -n")


def prefill_memory(info: ModelInfo, first: int, last: int, n_cells: int, n_rows: int, n_outputs: int) -> Memory:
    """Of a prompt's context beside the other, and of the cells of a run on their way from one to the other."""
    n_cells = -(-n_cells // CELLS_PADDING) * CELLS_PADDING
    cell_bytes = sum(info.kv_bytes_per_cell[first:last])
    buffers = buffer_bytes(info, last == info.n_layer, n_cells, LARGEST, n_outputs)
    return Memory(kv=n_cells * cell_bytes, buffers=buffers + min(n_cells, n_rows) * cell_bytes)


def slice_memory(
    info: ModelInfo, first: int, last: int, n_cells: int, n_rows: int, n_outputs: int, exact: bool, in_file: bool,
    n_on_gpu: int = 0,
) -> Memory:  # fmt: skip
    """Of layers [first, last) with one context. `in_file`: on a disk, else the slice lives in memory."""
    is_whole, is_last = (first, last) == (0, info.n_layer), last == info.n_layer
    in_file = in_file or is_whole
    weights = info.n_bytes if is_whole else slice_bytes(info, first, last)
    mapped = weights if exact and in_file else 0
    # read weights are laid out anew, and a table that is also the output head is there in both forms
    head_again = 0 if exact or not is_last or (is_whole and not info.tied) else info.input_bytes
    on_host = first if n_on_gpu < 0 else max(first, last - n_on_gpu)
    return Memory(
        weights=weights - mapped + head_again,
        mapped=mapped,
        kv=n_cells * sum(info.kv_bytes_per_cell[first:on_host]),
        buffers=buffer_bytes(info, is_last, n_cells, n_rows, n_outputs),
        # without exact numerics weights are read out of the slice, which is let go when they are
        loading=0 if exact or in_file else weights,
    )
