"""Log-probabilities of the target's tokens. Knows no request and no message."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeinfer.core.sampling import largest, total_weight
from pipeinfer.core.types import FloatArray

MAX_TOP = 20
"""Most likely tokens that can be asked for."""

LEAST = -9999.0
"""The least log-probability, also of probability 0: JSON has no infinity."""


class Likely(NamedTuple):
    """A token, and the natural logarithm of its probability."""

    token: int
    logprob: float


class ScoredToken(int):
    """A chosen token with its log-probability and the most likely tokens, in order. It is an int, so that it passes
    from the last stage through the tree like any other token."""

    logprob: float
    top: tuple[Likely, ...]

    def __new__(cls, token: int, logprob: float, top: Sequence[Likely]) -> "ScoredToken":
        made = super().__new__(cls, token)
        made.logprob, made.top = logprob, tuple(top)
        return made


def scored(logits: FloatArray, token: int, n_top: int) -> ScoredToken:
    """The token with the log-softmax of logits (n_vocab,) at it and at the `n_top` most likely, ties by id. The logits
    are the model's own, before temperature, penalties, biases and grammars."""
    greatest = logits.max()
    log_total = float(greatest) + math.log(total_weight(logits, greatest))

    def logprob(id: int) -> float:
        return max(LEAST, float(logits[id]) - log_total)

    ids = largest(logits, n_top) if 0 < n_top < len(logits) else np.arange(len(logits) if n_top else 0)
    ordered = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return ScoredToken(token, logprob(token), [Likely(id, logprob(id)) for id in ordered])
