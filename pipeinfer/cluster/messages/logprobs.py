"""Log-probabilities that the target gives tokens: from logits, and beside the token that was chosen.

Knows no request and no message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeinfer.cluster.messages.records import I32
from pipeinfer.core.interfaces import FloatArray
from pipeinfer.core.sampling import largest, total_weight

MAX_TOP = 20
"""Likeliest tokens beside the chosen one, at most."""

LEAST = -9999.0
"""Stands for what is less likely, for probability 0 too: JSON has no infinity."""


class Likely(NamedTuple):
    """A token, and the natural logarithm of its probability."""

    token: I32
    logprob: float


class ScoredToken(int):
    """A chosen token that brings its log-probability, and the likeliest tokens, likeliest first. Whoever does not ask
    for these takes it for the token that it is: the way from the last stage through the tree is that of all tokens."""

    logprob: float
    top: tuple[Likely, ...]

    def __new__(cls, token: int, logprob: float, top: Sequence[Likely]) -> ScoredToken:
        made = super().__new__(cls, token)
        made.logprob, made.top = logprob, tuple(top)
        return made


def scored(logits: FloatArray, token: int, n_top: int) -> ScoredToken:
    """The token with what the log-softmax of logits (n_vocab,) says of it and of the `n_top` likeliest, ties by id. The
    logits are as the model has them: neither temperature nor penalties, biases or grammars have been applied."""
    greatest = logits.max()
    log_total = float(greatest) + math.log(total_weight(logits, greatest))

    def logprob(id: int) -> float:
        return max(LEAST, float(logits[id]) - log_total)

    ids = largest(logits, n_top) if 0 < n_top < len(logits) else np.arange(len(logits) if n_top else 0)
    ordered = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return ScoredToken(token, logprob(token), [Likely(id, logprob(id)) for id in ordered])
