"""How ranks of a host share its GPUs."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def share_of(things: Sequence[T], index: int, n_sharers: int) -> Sequence[T]:
    """The consecutive things of one of `n_sharers`, equally many for each. If there are fewer things than sharers,
    neighbours share one."""
    first, last = index * len(things) // n_sharers, (index + 1) * len(things) // n_sharers
    return things[first : max(last, first + 1)]
