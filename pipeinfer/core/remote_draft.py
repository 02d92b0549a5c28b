"""Steps of the smallest draft where another rank has it: asked one at a time, and heard when they come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.in_flight import InFlightRun, RequestSlice
from pipeinfer.core.interfaces import Clock
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.round_robin import RoundRobin
from pipeinfer.core.runs import Guess, GuessVerdict
from pipeinfer.core.tree import Node

Take = Callable[[ActiveRequest, Collection[Node], Sequence[list[Guess] | None]], bool]
"""Takes what the draft found: of each of the nodes its guesses, or None where there was no room for it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step that the draft is at. `n_inflight`: runs of the target when it began."""

    request: Request
    widths: Mapping[Node, int]
    n_inflight: int
    begun_s: float


class RemoteDraft:
    """`active`: the open requests by id. `stepped`: hears how long a step took. Tokens that the draft has not seen come
    before nodes are asked about, as with a draft of the head's own."""

    def __init__(
        self,
        level: Level,
        clock: Clock,
        active: Mapping[int, ActiveRequest],
        take: Take,
        stepped: Callable[[float], None],
    ) -> None:
        self.level, self.clock = level, clock
        self._active, self._take, self._stepped = active, take, stepped
        self._asked: _Asked | None = None

    def at_work(self, request: Request) -> tuple[Collection[Node], float]:
        """What of the request it expands, and since when."""
        asked = self._asked
        return (asked.widths, asked.begun_s) if asked and asked.request is request else ((), 0.0)

    def ask(self, turns: RoundRobin[ActiveRequest]) -> bool:
        """Ask for the next step of the request whose turn it is, once the one before is done."""
        return not self.level.n_flights and any(self._ask_for(active, turns) for active in turns)

    def _ask_for(self, active: ActiveRequest, turns: RoundRobin[ActiveRequest]) -> bool:
        request, level = active.request, self.level
        widths, n_inflight = active.policy.draft(active.context), active.context.n_inflight
        if not widths:
            return False
        n_left = level.n_context_left(request)
        n_context = min(n_left, level.n_chunk, level.pool.n_free_cells)
        nodes = [] if n_left else level.pool.unplaced(list(widths))[: level.n_rows]
        # among them may be nodes that only a larger draft has expanded, and that are context here
        wanted = {node: widths.get(node, 0) for node in nodes}
        if not level.submit([RequestSlice(request, n_context, nodes, request.tree.root in nodes, widths=wanted)]):
            return self._take(active, widths, [None] * len(widths))
        turns.rotate(request.id)
        self._asked = _Asked(request, widths, n_inflight, self.clock())
        return True

    def hear(self) -> bool:
        """Take in what the draft says, if it has said something."""
        landed = self.level.poll()
        if landed is None:
            return False
        asked, self._asked, (flight, verdict) = self._asked, None, landed
        assert asked
        if not flight.parts:
            return True  # the request is not open any more
        part, active = flight.parts[0], self._active[asked.request.id]
        if part.nodes:
            now_s = self.clock()
            self._stepped(now_s - asked.begun_s)
            active.observer.draft_stepped(asked.begun_s, now_s, len(part.nodes), asked.n_inflight, verdict.cancelled)
        found = self._found(flight, verdict)
        if any(node in found for node in asked.widths):
            self._take(active, asked.widths, [found.get(node) for node in asked.widths])
        return True

    @staticmethod
    def _found(flight: InFlightRun, verdict: GuessVerdict) -> dict[Node, list[Guess]]:
        part = flight.parts[0]
        if verdict.cancelled:
            return {}
        answers = enumerate(part.nodes, part.first)
        return {node: list(verdict.guesses[row]) for row, node in answers if part.n_wanted(node) and node.live}
