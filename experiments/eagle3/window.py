"""Recorded texts as tensors for a head. Knows no net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.eagle3.recording import Text


@dataclass(frozen=True, slots=True)
class Window:
    """Some texts, padded at their ends: tokens (B, n), features (B, n, 3, n_embd), taught ids and weights
    (B, n, N_TAUGHT), the weights zero where nothing is taught; `ends` (B, n, n_embd), what the target's output rows are
    multiplied by, if that is known."""

    tokens: Tensor
    features: Tensor
    taught: Tensor
    weights: Tensor
    ends: Tensor | None = None


def window_of(texts: Sequence[Text], ends: Sequence[Tensor] = ()) -> Window:
    n = max(len(text.tokens) for text in texts)

    def padded(values: Sequence[npt.NDArray[Any]]) -> Tensor:
        whole = np.zeros((len(texts), n, *values[0].shape[1:]), values[0].dtype)
        for row, value in zip(whole, values, strict=True):
            row[: len(value)] = value
        return torch.from_numpy(whole)

    taught = padded([text.taught.astype(np.int64) for text in texts])
    known = padded([np.asarray(text.taught.any(-1), np.float32) for text in texts])
    weights = padded([text.logits for text in texts]).float().exp() * known[..., None]
    features = padded([text.features.view(np.int16) for text in texts]).view(torch.bfloat16).float()
    tokens = padded([text.tokens.astype(np.int64) for text in texts])
    whole = padded([each.numpy() for each in ends]) if ends else None
    return Window(tokens, features, taught, weights, whole)
