"""Values of fixed layout, side by side in one buffer. Knows no message."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.messages.activations import Buffer

MAX_US = 2**31 - 1
SHORT, INT, LONG = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8")


def joined(*parts: bytes) -> Buffer:
    return np.frombuffer(bytearray().join(parts), np.uint8)


def packed(dtype: np.dtype[Any], values: Any) -> bytes:
    """One value, or a sequence of them."""
    return np.array(values, dtype).tobytes()


def view(buffer: Buffer, dtype: np.dtype[Any], at: int, n: int) -> npt.NDArray[Any]:
    """`n` consecutive values; the array shares the buffer's memory."""
    return np.ndarray(n, dtype, buffer, at)


def microseconds(seconds: float) -> int:
    return min(round(1e6 * seconds), MAX_US)
