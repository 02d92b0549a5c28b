"""Cells of committed tokens that requests hold, alone or together, each counted once. Knows positions; no ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Cells:
    """Those at positions [start, end) of one or more texts, behind those `below`. Each request has a tip of its own,
    which alone grows; all below it may be other requests' too.

    `n_holders`: the request whose tip it is, or what is right above.
    """

    below: Cells | None = None
    start: int = 0
    end: int = 0
    n_holders: int = 1

    def path(self) -> Iterator[Cells]:
        """From here down to the first."""
        cells: Cells | None = self
        while cells:
            yield cells
            cells = cells.below


def fork(tip: Cells, end: int) -> Cells:
    """A further tip, behind the first `end` of the cells up to `tip`."""
    if not end:
        return Cells()
    shared = next(cells for cells in tip.path() if cells.start < end)
    if shared is tip or end < shared.end:
        shared.below = Cells(shared.below, shared.start, end)
        shared.start, shared = end, shared.below
    shared.n_holders += 1
    return Cells(shared, end, end)


def give_up(tip: Cells) -> int:
    """How many cells nobody holds any more, once this tip's request does not."""
    n_free = 0
    for cells in tip.path():
        cells.n_holders -= 1
        if cells.n_holders:
            break
        n_free += cells.end - cells.start
    return n_free


def n_held(tips: Iterable[tuple[Cells, int]]) -> int:
    """How many cells these are, each tip with how many of the positions up to it count."""
    found: dict[Cells, int] = {}
    for tip, end in tips:
        for cells in tip.path():
            found[cells] = max(found.get(cells, 0), min(cells.end, end) - cells.start)
    return sum(found.values())
