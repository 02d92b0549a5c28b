"""Tensors of GGUF's types of 4 bits as whole numbers from 0 to 15 with a scale and an offset for every 32. Knows bytes
alone."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K

GROUP = 32
MIDDLE = 8
"""What is taken off a number before it is multiplied with its scale."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class FourBits(NamedTuple):
    """The numbers of a group stand for (number - MIDDLE) * scale + offset.

    numbers         (n_groups, GROUP), 0 to 15
    scale, offset   (n_groups,)
    """

    numbers: Bytes
    scale: Floats
    offset: Floats


def read_four_bits(kind: int, data: bytes | memoryview) -> FourBits:
    """Of whole rows of GGML type `kind`, one of `READERS`, all that they say."""
    n_bytes, read = READERS[kind]
    return read(np.frombuffer(data, np.uint8).reshape(-1, n_bytes))


def _halves(packed: Bytes) -> Bytes:
    """(…, n) -> (…, 2, n): of each byte the lower four bits, and the upper ones, as one row each."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -2)


def _floats(packed: Bytes) -> Floats:
    """(n, 2) bytes, a float16 each -> (n,)."""
    return np.ascontiguousarray(packed).view(np.float16)[:, 0].astype(np.float32)


def _q4_0(blocks: Bytes) -> FourBits:
    scale = _floats(blocks[:, :2])
    return FourBits(_halves(blocks[:, 2:]).reshape(-1, GROUP), scale, np.zeros_like(scale))


def _q4_1(blocks: Bytes) -> FourBits:
    scale, least = _floats(blocks[:, :2]), _floats(blocks[:, 2:4])
    return FourBits(_halves(blocks[:, 4:]).reshape(-1, GROUP), scale, least + MIDDLE * scale)


def _q4_k(blocks: Bytes) -> FourBits:
    """Eight groups a block, whose scales and least values are 6 bits times one number of the block."""
    steps, below = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scale = (_floats(blocks[:, :2])[:, None] * steps).astype(np.float32).reshape(-1)
    under = (_floats(blocks[:, 2:4])[:, None] * below).astype(np.float32).reshape(-1)
    numbers = _halves(blocks[:, 16:].reshape(len(blocks), -1, GROUP))
    return FourBits(numbers.reshape(-1, GROUP), scale, MIDDLE * scale - under)


READERS: dict[int, tuple[int, Callable[[Bytes], FourBits]]] = {
    int(GGMLQuantizationType.Q4_0): (18, _q4_0),
    int(GGMLQuantizationType.Q4_1): (20, _q4_1),
    int(GGMLQuantizationType.Q4_K): (144, _q4_k),
}
"""By GGML type: bytes of a block, and how it is read."""
