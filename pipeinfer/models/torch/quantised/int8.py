"""Matrices as whole numbers of 8 bits with a scale a row, a quarter of float32. Knows no layer.

Rows that they multiply are bf16. Few rows go through torch's own kernel for CPUs, which reads a byte a weight; more,
and all on GPUs, are multiplied with a piece of the matrix at a time that is made bf16 for them.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

LARGEST = 127
FEW_ROWS = 16
"""Up to so many torch's kernel is as fast as the other way, or faster (measured)."""

WHOLE = 32
"""Numbers of a row that the kernel takes at a time, wherever the row ends: of other widths it crashes."""

PIECE = 1 << 22
"""Numbers that are bf16 at a time: little memory, and they are in the cache when they are used."""


@dataclass(frozen=True, slots=True)
class Int8:
    """values: (…, n_out, n_in) int8; scales: (…, n_out) bf16, what each row's values are to be multiplied with."""

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __getitem__(self, index: int | torch.Tensor) -> "Int8":
        return Int8(self.values[index], self.scales[index])


def quantised(rows: torch.Tensor) -> Int8:
    """(n_out, n_in) in float32, each row to the nearest of 255 numbers."""
    scales = (rows.abs().amax(-1) / LARGEST).bfloat16()
    steps = rows / torch.where(scales > 0, scales, 1).float()[..., None]
    return Int8(steps.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales)


def multiply_int8(rows: torch.Tensor, weight: Int8) -> torch.Tensor:
    """(n_rows, n_in) bf16 -> (n_rows, n_out) in float32."""
    if rows.device.type == "cpu" and len(rows) <= FEW_ROWS and rows.shape[1] % WHOLE == 0:
        return torch._weight_int8pack_mm(rows, weight.values, weight.scales).float()
    step = max(1, PIECE // weight.values.shape[1])
    return torch.cat(
        [
            linear(rows, values.bfloat16()).float() * scales.float()
            for values, scales in zip(weight.values.split(step), weight.scales.split(step), strict=True)
        ],
        1,
    )
