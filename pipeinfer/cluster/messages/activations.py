"""The residual stream in bytes: as float32, or rounded to bf16. Knows no message."""

from enum import Enum

import numpy as np
import numpy.typing as npt

from pipeinfer.core.types import FloatArray

Buffer = npt.NDArray[np.uint8]

QUIET = 0x40
"""The bit of a bf16 that keeps a NaN from becoming infinite when its lower half is dropped."""


class WireType(Enum):
    """The type of activations in messages."""

    F32 = "f32"
    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value

    @property
    def n_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is WireType.F32 else 2


def activation_bytes(n_rows: int, n_embd: int, wire_type: WireType) -> int:
    """Bytes of `n_rows` activations."""
    return n_rows * n_embd * wire_type.n_bytes


def read_activations(buffer: Buffer, n_embd: int, wire_type: WireType) -> FloatArray:
    """(n_rows, n_embd): a view if the type is float32."""
    if wire_type is WireType.F32:
        return buffer.view(np.float32).reshape(-1, n_embd)
    bits = buffer.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(-1, n_embd)


def write_activations(values: FloatArray, buffer: Buffer, wire_type: WireType) -> None:
    """`buffer` has `activation_bytes` of (n_rows, n_embd)."""
    if wire_type is WireType.F32:
        buffer.view(np.float32)[:] = values.reshape(-1)
    else:
        buffer.view(np.uint16)[:] = _rounded(values).reshape(-1)


def rounded(values: FloatArray) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16, in the same shape."""
    return _rounded(values).astype(np.uint16)


def _rounded(values: FloatArray) -> npt.NDArray[np.uint32]:
    """The nearest bf16, ties to even, in the lower half; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = bits >> np.uint32(16)
    nearest = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = np.isnan(values)
    if is_nan.any():
        nearest[is_nan] = upper[is_nan] | np.uint32(QUIET)
    return nearest
