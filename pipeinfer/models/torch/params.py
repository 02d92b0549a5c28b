"""What a torch stage is loaded with. Imports no torch."""

from dataclasses import dataclass

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
F32, BF16, INT8, INT4 = "f32", "bf16", "int8", "int4"
WEIGHT_BYTES = {F32: 4.0, BF16: 2.0, INT8: 1.0, INT4: 0.625}
HEAD_BYTES = WEIGHT_BYTES | {INT4: 1.0}
CACHE_BYTES = {F32: 4, BF16: 2, INT8: 2, INT4: 2}
"""Of a weight, of one that makes logits, and of a key or value. Of 4 bits every 32 have a scale and an offset."""


@dataclass(frozen=True)
class TorchParams:
    """n_cells        KV cells
    n_seq_max      sequence ids that users have
    n_batch        rows of the largest batch
    n_outputs_max  rows of a batch that may want logits, on the last stage
    n_threads      at most; fewer while other processes want the cores
    device         where weights, keys and values are and layers are computed: `cpu`, `cuda` or `cuda:N`; `auto`: a GPU
                   where there is one
    dtype          what they are kept as: `f32`, `bf16`, or `int8` or `int4`, of which keys and values are bf16; `auto`:
                   bf16 on a GPU, else f32
    local_rank     which of the ranks of its host this is, for `auto` and `cuda`: ranks take the GPUs in turns
    padded         runs are filled up to a few sizes, as they are on a GPU, whose graphs want that
    exact          the same row gives the same bits in every batch and tree, on the CPU
    """

    n_cells: int
    n_seq_max: int = 32
    n_batch: int = 512
    n_outputs_max: int = 32
    n_threads: int = 1
    device: str = AUTO
    dtype: str = AUTO
    local_rank: int = 0
    exact: bool = True
    padded: bool = False
