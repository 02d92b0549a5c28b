"""The shipped pair as stages of libllama in this process, for engines that tests drive by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage

N_CELLS, N_SEQ, N_LAYER = 768, 31, 9


def load(cuts: Sequence[int]) -> list[LlamaStage]:
    """The target, cut before these layers."""
    info = read_model_info(TARGET)
    assert info.n_layer == N_LAYER
    params = LlamaParams(N_CELLS, N_SEQ + 1, n_batch=129, n_outputs_max=33)
    return [LlamaStage(open_slice(info, first, last), params) for first, last in pairwise([0, *cuts, N_LAYER])]


def load_draft() -> LlamaStage:
    info = read_model_info(DRAFT)
    params = LlamaParams(N_CELLS, N_SEQ + 1, n_batch=32, n_outputs_max=32, exact=False)
    return LlamaStage(open_slice(info, 0, info.n_layer), params)
