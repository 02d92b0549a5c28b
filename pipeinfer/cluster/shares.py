"""How several ranks of a host share what it has few of, such as GPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def share_of(things: Sequence[T], index: int, n_sharers: int) -> Sequence[T]:
    """Of so many sharers the things of one: whole ones in turn, as many for each as there are; where there are fewer
    than sharers, neighbours have one together."""
    first, last = index * len(things) // n_sharers, (index + 1) * len(things) // n_sharers
    return things[first : max(last, first + 1)]
