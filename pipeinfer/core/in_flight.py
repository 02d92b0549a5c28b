"""What a run carries of each request, and a run between its submission and its verdict. Sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from pipeinfer.core.blocks import Span
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import POSITION_END
from pipeinfer.core.tree import Node, State

NO_ROWS: Set[int] = frozenset()


@dataclass(slots=True, eq=False)
class RequestSlice:
    """What a run carries of one request: its next `n_context` committed tokens below the root, then nodes, parents
    before children.

    `first`: the index of its first node's row in the run; the rows of its context come right before.
    """

    request: Request
    n_context: int
    nodes: list[Node]
    has_root: bool  # as the first of its nodes
    span: Span | None = None  # the context is whole blocks of it, see `blocks`
    widths: Mapping[Node, int] | None = None  # guesses wanted after each node, of a draft
    first: int = 0
    start: int = 0  # the position of its context's first row
    n_branches: int = 0  # of its nodes, those that took a sequence of their own
    pruned: Set[int] = NO_ROWS  # rows of the run that the stages were told to leave out

    @property
    def n_rows(self) -> int:
        return self.n_context + len(self.nodes)

    @property
    def committed(self) -> bool:
        """Whether it carries committed tokens, the root among them: the request cannot go on without it."""
        return self.n_context > 0 or self.has_root

    @property
    def dead(self) -> bool:
        """Whether nobody needs its cells or its answers. What was accepted since is context of all that follows."""
        return len(self.dead_rows()) == self.n_rows

    def dead_rows(self) -> set[int]:
        """Rows of the run that nobody needs any more."""
        if self.request.finish:
            return set(range(self.first - self.n_context, self.first + len(self.nodes)))
        return {row for row, node in enumerate(self.nodes, self.first) if node.state is State.DEAD}

    @property
    def committed_start(self) -> int:
        """The position of the first of its rows that is a committed token's; POSITION_END if there is none."""
        if self.n_context:
            return self.start
        return min((node.position for node in self.nodes if node.state is State.RETIRED), default=POSITION_END)

    def n_wanted(self, node: Node) -> int:
        """Answers asked for after one of its nodes: one of the target."""
        return self.widths[node] if self.widths else 1

    def cut(self, n_context: int, n_nodes: int) -> RequestSlice:
        """The same with no more than so many committed tokens and nodes."""
        if n_context == self.n_context and n_nodes == len(self.nodes):
            return self
        return RequestSlice(self.request, n_context, self.nodes[:n_nodes], self.has_root and n_nodes > 0, self.span)


@dataclass(slots=True, eq=False)
class InFlightRun:
    """A run between submission and verdict."""

    run_id: int
    parts: list[RequestSlice]
    n_rows: int
    n_context: int
    context: int  # tokens before a request's first row, the mean over the rows
    sent_s: float = 0.0  # when, on the engine's clock
    cost_s: float = 0.0  # what it was thought to take the slowest stage
    dead: bool = False  # no row can count any more
    cancelled: bool = False  # and the stages were told
    whole: bool = True  # every stage evaluates all of its rows
