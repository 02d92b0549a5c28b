"""Rotary positions: the angles of each position, and queries and keys turned by them. Knows no layer.

Pairs are always half a head apart. Where a model has them side by side, its rows of queries and keys are put into that
order when they are loaded, which changes no product of the two.
"""

import numpy as np
import numpy.typing as npt
import torch

from pipeinfer.models.torch.hyperparameters import Hyperparameters

BLOCK = 256
"""Positions computed at a time, whichever of them are wanted: an angle's bits do not depend on who asks."""


class RopeTable:
    """Cosines and sines of all positions that were asked for, and those near them. `factors`: (n_rot / 2,) divisors."""

    def __init__(self, numbers: Hyperparameters, factors: npt.NDArray[np.float32] | None) -> None:
        pairs = np.arange(numbers.n_rot // 2, dtype=np.float64)
        frequencies = numbers.rope_scale * numbers.rope_base ** (-2.0 * pairs / numbers.n_rot)
        self._frequencies = frequencies if factors is None else frequencies / factors.astype(np.float64)
        self._table = np.empty((2, 0, 2 * len(pairs)), np.float32)

    def at(self, positions: npt.NDArray[np.int32]) -> torch.Tensor:
        """(2, n_rows, 1, n_rot): cosines and sines, as `rotate` takes them."""
        while int(positions.max()) >= self._table.shape[1]:
            first = self._table.shape[1]
            angles = np.arange(first, first + BLOCK)[:, None] * self._frequencies
            cos, sin = np.cos(angles), np.sin(angles)
            further = np.stack([np.concatenate([cos, cos], 1), np.concatenate([-sin, sin], 1)])
            self._table = np.concatenate([self._table, further], axis=1, dtype="f4")
        return torch.from_numpy(self._table[:, positions, None])


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the first n_rot numbers of each head, (n_rows, n_heads, head_dim), by their rows' angles, in place. `sin`
    has the sign with it: of the first of each pair it is minus the sine."""
    turned = heads[..., : cos.shape[-1]]
    first, second = turned.chunk(2, -1)
    crossed = torch.cat([second, first], -1).mul_(sin)
    turned.mul_(cos).add_(crossed)


def deinterleaved_order(n_heads: int, head_dim: int, n_rot: int) -> torch.Tensor:
    """Of the rows of queries or keys with pairs side by side, the order in which pairs are half of n_rot apart."""
    own = torch.cat([torch.arange(0, n_rot, 2), torch.arange(1, n_rot, 2), torch.arange(n_rot, head_dim)])
    return (torch.arange(n_heads)[:, None] * head_dim + own).flatten()
