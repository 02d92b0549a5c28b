"""Company for a row that would be computed alone. Knows batches, no library.

libggml multiplies weights that are not quantised (those of routers to experts, all of an F16 model) with another kernel
from two rows on. With exact numerics every row shall have the same bits, so none is computed alone.
"""

from __future__ import annotations

import platform

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Batch, FloatArray
from pipeinfer.models.gguf.model_info import layer_of
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.llama.params import LlamaParams

FLOAT_TYPES = frozenset([0, 1, 30])
"""GGML types that have several kernels: F32, F16, BF16."""


def needs_company(slice_file: SliceFile, params: LlamaParams) -> bool:
    """Whether a row alone would have other bits than with others: on x86, where there are such weights; not where there
    are states and all rows are computed alone."""
    info = slice_file.info
    if (
        info.layers.known.states
        or not params.exact
        or params.n_gpu_layers
        or platform.machine().lower() not in ("x86_64", "amd64")
    ):
        return False
    head = "token_embd.weight" if info.tied else "output.weight"
    return any(
        tensor.type in FLOAT_TYPES and sum(length > 1 for length in tensor.shape) > 1
        for tensor in info.tensors
        if layer_of(tensor.name) is not None or tensor.name == head
    )


def with_twin(
    batch: Batch, hidden: FloatArray | None, wanted: npt.NDArray[np.bool_] | None, seq: int
) -> tuple[Batch, FloatArray | None, npt.NDArray[np.bool_] | None]:
    """The batch, what comes in, and which rows are wanted, with the last row again in the sequence `seq`.

    That is a copy of the row's where it is the only one, so that the two are the same in every layer; else it is empty.
    """
    position = batch.positions[-1] if len(batch.positions) == 1 else 0
    doubled = Batch(
        np.append(batch.tokens, batch.tokens[-1]),
        np.append(batch.positions, np.int32(position)),
        [*batch.seqs, (seq,)],
        None,
        np.append(batch.wanted, False),
    )
    return (
        doubled,
        None if hidden is None else np.concatenate([hidden, hidden[-1:]]),
        None if wanted is None else np.append(wanted, False),
    )
