"""What a pool of sequences notes: of each that is leased, of each request, of each placement. Does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeinfer.core.runs import KvOp
from pipeinfer.core.shared import Cells
from pipeinfer.core.tree import Node


@dataclass(slots=True)
class Path:
    """One leased sequence: cells [0, end), the last of them those of `chain`, the nodes that were placed on it."""

    request_id: int
    end: int = 0
    chain: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Base:
    """A request's committed tokens below the root: cells [0, end) of `seq`, which is the root's once it is placed.

    `lost_at`: where it ended when cells that layers with a window see no longer were last given up; 0 if none were.
    """

    seq: int
    cells: Cells = field(default_factory=Cells)
    lost_at: int = 0

    @property
    def end(self) -> int:
        return self.cells.end


class Placement(NamedTuple):
    """Operations to apply first; the sequence of all context rows; the sequences of each node. Undone as a whole."""

    request_id: int
    ops: list[KvOp]
    n_context: int
    context_seq: int
    nodes: Sequence[Node]
    node_seqs: list[tuple[int, ...]]
    leased: list[int]
