"""Numbers with which a plan fits. Pure functions of whether it does."""

from collections.abc import Callable, Sequence


def largest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` for which it holds, as it does for all below; 0 if it never does."""
    if least > most or not holds(least):
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def fewest_moved(lacks: Callable[[Sequence[int]], bool], n_layer: int, n_ranks: int) -> tuple[int, ...]:
    """As few as it takes of the first layers of each rank, whose experts the CPU has, one number or one a rank; empty:
    no number is enough. `lacks`: whether a GPU is too small with such numbers, as it is without."""
    if lacks([n_layer]):
        return ()
    counts = [1 + largest(lambda n: lacks([n]), 0, n_layer)] * n_ranks
    for rank in range(n_ranks if n_ranks > 1 else 0):

        def lacks_there(n: int, rank: int = rank) -> bool:
            return lacks([*counts[:rank], n, *counts[rank + 1 :]])

        if counts[rank]:
            counts[rank] = 1 + largest(lacks_there, 0, counts[rank] - 1) if lacks_there(0) else 0
    return tuple(counts if len(set(counts)) > 1 else counts[:1])
