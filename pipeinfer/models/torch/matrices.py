"""A matrix, whatever its numbers are kept as: float32, bf16, or whole numbers of 8 or 4 bits. Knows no layer."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn.functional import linear

from pipeinfer.models.torch.params import CUDA
from pipeinfer.models.torch.quantised.int4 import Int4, Int4Rows, multiply_int4, packed
from pipeinfer.models.torch.quantised.int8 import Int8, multiply_int8

SUMS_STAY = hasattr(torch.ops.aten.mm, "dtype")
"""Whether torch gives a GPU's sums of bf16 as they are, in float32: one step less than to round them and go back, and
logits keep their order."""

Weight: TypeAlias = torch.Tensor | Int8 | Int4
Loaded: TypeAlias = torch.Tensor | Int8 | Int4Rows


def under_each_other(parts: Sequence[Loaded]) -> Weight:
    """Matrices of equal width, all of one kind, as one."""
    first = parts[0]
    if isinstance(first, Int8):
        return first if len(parts) == 1 else Int8(_joined(parts, "values"), _joined(parts, "scales"))
    if isinstance(first, Int4Rows):
        return packed(first if len(parts) == 1 else Int4Rows(_joined(parts, "pairs"), _joined(parts, "steps")))
    return first if len(parts) == 1 else torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def _joined(parts: Sequence[Loaded], name: str) -> torch.Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def multiply(rows: torch.Tensor, weight: Weight) -> torch.Tensor:
    """(n_rows, n_in) -> (n_rows, n_out) in float32; rows are rounded to what the weight's kernels take."""
    if isinstance(weight, torch.Tensor):
        rows = rows.to(weight.dtype)
        if SUMS_STAY and rows.device.type == CUDA and rows.dtype is torch.bfloat16:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return linear(rows, weight).float()
    if isinstance(weight, Int8):
        return multiply_int8(rows.bfloat16(), weight)
    return multiply_int4(rows.bfloat16(), weight)
