"""Biases of tokens as a text such as `15+1.5 22-inf`. Knows no sampling."""

import math
import re
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_BIASES = 2048  # of one request, limited by the messages between ranks
BIAS = re.compile(r"([0-9]{1,10})([+-](?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|-inf(?:inity)?)")
MAX_TOKEN_ID, MAX_BIAS = 2**31 - 1, 1e9


def read_bias(text: str) -> tuple[int, float]:
    """(token id, bias) of llama.cpp's TOKEN_ID(+/-)BIAS. Raises ValueError with the expected form."""
    match = BIAS.fullmatch(text)
    if not match or int(match[1]) > MAX_TOKEN_ID or not is_bias(float(match[2])):
        raise ValueError(f"is no TOKEN_ID(+/-)BIAS, such as 15043+1.5, 22-3 or 22-inf, of up to {MAX_BIAS:.0e}")
    return int(match[1]), float(match[2])


def is_bias(value: float) -> bool:
    return value == -math.inf or abs(value) <= MAX_BIAS


def bias_text(pairs: Iterable[tuple[int, float]]) -> str:
    """The canonical text of biases; those of one token add up. Raises ValueError for too many tokens."""
    sums: dict[int, float] = {}
    for token, bias in pairs:
        sums[token] = sums.get(token, 0.0) + bias
        if len(sums) > MAX_BIASES:
            raise ValueError(f"names more than {MAX_BIASES} tokens; {MAX_BIASES} are possible")
    return " ".join(f"{token}{float(np.float32(bias)):+.9g}" for token, bias in sorted(sums.items()))


@lru_cache(maxsize=256)
def read_biases(text: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """(token ids, ascending; biases)."""
    pairs = [read_bias(each) for each in text.split()]
    return np.array([token for token, _ in pairs], np.intp), np.array([bias for _, bias in pairs], np.float32)
