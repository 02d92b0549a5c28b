"""KV cells of committed tokens: each request's text, of which several may share a prefix. Knows positions, no nodes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Cells:
    """Positions [start, end) of one or more texts, after those `below`. Each text has a tip of its own, the only part
    that grows; what is below may be shared. `n_holders`: texts of which it is the tip, and parts right above it."""

    below: "Cells | None" = None
    start: int = 0
    end: int = 0
    n_holders: int = 1

    def path(self) -> "Iterator[Cells]":
        """From here down to the first."""
        cells: Cells | None = self
        while cells:
            yield cells
            cells = cells.below


def fork(tip: Cells, end: int) -> Cells:
    """A new tip that shares the first `end` positions."""
    if not end:
        return Cells()
    shared = next(cells for cells in tip.path() if cells.start < end)
    if shared is tip or end < shared.end:
        shared.below = Cells(shared.below, shared.start, end)
        shared.start, shared = end, shared.below
    shared.n_holders += 1
    return Cells(shared, end, end)


def give_up(tip: Cells) -> int:
    """Drop a tip; returns how many cells nobody holds any more."""
    n_free = 0
    for cells in tip.path():
        cells.n_holders -= 1
        if cells.n_holders:
            break
        n_free += cells.end - cells.start
    return n_free


def n_held(tips: Iterable[tuple[Cells, int]]) -> int:
    """Distinct cells up to each (tip, position)."""
    held: dict[Cells, int] = {}
    for tip, end in tips:
        for cells in tip.path():
            held[cells] = max(held.get(cells, 0), min(cells.end, end) - cells.start)
    return sum(held.values())


@dataclass(slots=True)
class Text:
    """A request's committed tokens below the root: cells [0, end) of `seq`, which becomes that of the root."""

    seq: int
    cells: Cells = field(default_factory=Cells)

    @property
    def end(self) -> int:
        return self.cells.end
