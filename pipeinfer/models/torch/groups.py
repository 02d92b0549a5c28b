"""Rows in groups of a fixed size, so that a row's bits do not depend on how many others there are. Knows no layer.

Kernels that multiply matrices sum in an order that follows from the number of rows; with one number of rows, the rest
filled up with zeros, there is one order. Whether a row's place in its group matters is found out for the matrices at
hand (`rows_together`): what a library does for a shape is nowhere said.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad, silu

from pipeinfer.models.torch.matrices import Weight, multiply

SIZES = (8, 4, 2)
"""Of groups, the first that computes every row alike is taken; else rows are computed one by one."""

THREADS = (1, 2, 3, 4, 8)
"""Numbers of threads that must compute alike."""

ONE_THREAD = 32768
"""Numbers that elementwise operations hand to one thread at least: beyond, where a thread begins depends on how many
there are, and its last numbers may be computed without vectors, with another rounding of exponentials."""


def in_groups(
    size: int, compute: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], *rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What `compute` makes of rows, (n_rows, …) each, in groups of `size`; all at once where that is 0."""
    n_rows = len(rows[0])
    if not size:
        return _tuple(compute(*rows))
    found = []
    for first in range(0, n_rows, size):
        own = [each[first : first + size] for each in rows]
        n_missing = size - len(own[0])
        filled = [pad(each, (*[0, 0] * (each.dim() - 1), 0, n_missing)) if n_missing else each for each in own]
        found.append(_tuple(compute(*filled)))
    return tuple(torch.cat(parts)[:n_rows] for parts in zip(*found, strict=True))


def _tuple(found: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def gated_apart(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, each row by itself and in pieces that no number of threads divides."""
    found = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    for row in range(len(gate)):
        for first in range(0, gate.shape[1], ONE_THREAD):
            piece = slice(first, first + ONE_THREAD)
            found[row, piece] = silu(gate[row, piece]) * up[row, piece]
    return found


def rows_together(matrices: Sequence[Weight], n_threads: int) -> int:
    """How many rows may be multiplied at once so that each row has the same bits in every place, beside any others and
    with any number of threads; 1 where there is no such number. There are `n_threads` afterwards."""
    try:
        return next((size for size in SIZES if all(_is_alike(each, size, n_threads) for each in matrices)), 1)
    finally:
        torch.set_num_threads(n_threads)


def _is_alike(matrix: Weight, size: int, n_threads: int) -> bool:
    """Whether each of `size` rows has one result: as they are, moved round, alone among zeros, and on more threads."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(size, matrix.shape[1], generator=generator).to(matrix.device)
    torch.set_num_threads(n_threads)
    expected, alone = multiply(rows, matrix), torch.zeros_like(rows)
    alone[size - 1] = rows[0]
    if not torch.equal(multiply(alone, matrix)[size - 1], expected[0]):
        return False
    if not all(torch.equal(multiply(rows.roll(shift, 0), matrix).roll(-shift, 0), expected) for shift in range(size)):
        return False
    for other in THREADS:  # the same on every rank, so that all come to one answer
        torch.set_num_threads(other)
        if not torch.equal(multiply(rows, matrix), expected):
            return False
    return True
