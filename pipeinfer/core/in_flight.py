"""What a run carries of each request, and a run between its submission and its verdict. Sends nothing."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.requests import Request
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import POSITION_END

NO_ROWS: Set[int] = frozenset()


@dataclass(slots=True, eq=False)
class RequestSlice:
    """What a run carries of one request: its next `n_context` committed tokens below the root, then nodes, parents
    before children."""

    request: Request
    n_context: int
    nodes: Sequence[Node]
    has_root: bool  # as the first of its nodes
    span: Span | None = None  # the context is whole blocks of it, see `blocks`
    widths: Mapping[Node, int] | None = None  # of a draft: how many guesses are wanted after each node
    first: int = 0  # the first node's row in the run, right after those of the context
    start: int = 0  # the position of its context's first row
    n_branches: int = 0  # nodes that got a new sequence
    pruned: Set[int] = NO_ROWS  # rows of the run that the stages were told to leave out

    @property
    def n_rows(self) -> int:
        return self.n_context + len(self.nodes)

    @property
    def committed(self) -> bool:
        """Whether it carries committed tokens, without which the request cannot go on; the root is one."""
        return self.n_context > 0 or self.has_root

    @property
    def dead(self) -> bool:
        """Whether nobody needs its cells or answers. Nodes accepted since are context of what follows."""
        return len(self.dead_rows()) == self.n_rows

    def dead_rows(self) -> set[int]:
        """Rows of the run that nobody needs any more."""
        if self.request.finish:
            return set(range(self.first - self.n_context, self.first + len(self.nodes)))
        return {row for row, node in enumerate(self.nodes, self.first) if node.state is State.DEAD}

    @property
    def committed_start(self) -> int:
        """The first position of a committed token among its rows; POSITION_END if there is none."""
        if self.n_context:
            return self.start
        return min((node.position for node in self.nodes if node.state is State.RETIRED), default=POSITION_END)

    def n_wanted(self, node: Node) -> int:
        """Answers wanted after one of its nodes: one of the target."""
        return self.widths[node] if self.widths else 1

    def cut(self, n_context: int, n_nodes: int) -> "RequestSlice":
        """At most so many of its committed tokens and nodes."""
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
    sent_s: float = 0.0  # on the engine's clock
    cost_s: float = 0.0  # expected seconds in the slowest stage
    queued: bool = False  # behind a prompt, as its last token is
    dead: bool = False  # nobody needs any of its rows
    cancelled: bool = False  # and the stages were told
    whole: bool = True  # every stage evaluates all of its rows
