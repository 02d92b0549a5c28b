"""Piecewise linear interpolation. Knows numbers only."""

from bisect import bisect_left
from functools import lru_cache


@lru_cache(maxsize=1 << 14)
def interpolate(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    """The value at `x`: the first before all points, the last line continued after them. `xs` ascend."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    if xs[right] == xs[left]:
        return ys[right]
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])
