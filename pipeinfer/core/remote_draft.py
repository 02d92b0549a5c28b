"""Steps of the smallest draft where another rank has it: asked one at a time, and heard when they come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeinfer.core.flights import Flight, Part
from pipeinfer.core.interfaces import Clock
from pipeinfer.core.levels import Level
from pipeinfer.core.opened import Opened
from pipeinfer.core.requests import Request
from pipeinfer.core.rota import Rota
from pipeinfer.core.runs import Guess, GuessVerdict
from pipeinfer.core.tree import Node

Take = Callable[[Opened, Collection[Node], Sequence[list[Guess] | None]], None]
"""What the draft found: of each of the nodes its guesses, or None where there was no room for it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A step that the draft is at. `n_inflight`: runs of the target when it began."""

    request: Request
    widths: Mapping[Node, int]
    n_inflight: int
    begun_s: float


class RemoteDraft:
    """`opened`: the open requests by id. `grown`: is told that a request may be asked again. `stepped`: hears how long
    a step took. As with a draft of the head's own, tokens that it has not seen come before nodes are asked about."""

    def __init__(
        self,
        level: Level,
        clock: Clock,
        opened: Mapping[int, Opened],
        take: Take,
        grown: Callable[[Opened], None],
        stepped: Callable[[float], None],
    ) -> None:
        self.level, self.clock = level, clock
        self._opened, self._take, self._grown, self._stepped = opened, take, grown, stepped
        self._rota = Rota[Opened]()
        self._asked: _Asked | None = None

    def wake(self, job: Opened) -> None:
        """Something has changed for the request: ask its policy again."""
        self._rota.add(job.request.id, job)

    def discard(self, request: Request) -> None:
        """Ask its policy no more, before something changes."""
        self._rota.discard(request.id)

    def at_work(self, request: Request) -> tuple[Collection[Node], float]:
        """What of the request it expands, and since when."""
        asked = self._asked
        return (asked.widths, asked.begun_s) if asked and asked.request is request else ((), 0.0)

    def ask(self) -> bool:
        """Ask for the next step of the request whose turn it is, once the one before is done."""
        return not self.level.n_flights and any(self._ask_for(job) for job in self._rota)

    def _ask_for(self, job: Opened) -> bool:
        request, level = job.request, self.level
        widths, n_inflight = job.policy.draft(job.view), job.view.n_inflight
        if not widths:
            self._rota.discard(request.id)
            return False
        self._rota.rotate(request.id)
        n_left = level.n_context_left(request)
        n_context = min(n_left, level.n_chunk, level.pool.n_free_cells)
        nodes = [] if n_left else level.pool.unplaced(list(widths))[: level.n_rows]
        # among them may be nodes that only a larger draft has expanded, and that are context here
        wanted = {node: widths.get(node, 0) for node in nodes}
        if level.submit([Part(request, n_context, nodes, request.tree.root in nodes, widths=wanted)]):
            self._asked = _Asked(request, widths, n_inflight, self.clock())
        else:
            self._take(job, widths, [None] * len(widths))
        return True

    def hear(self) -> bool:
        """Take in what the draft says, if it has said something."""
        landed = self.level.poll()
        if landed is None:
            return False
        asked, self._asked, (flight, verdict) = self._asked, None, landed
        assert asked
        part, job = flight.parts[0], self._opened.get(asked.request.id)
        if part.nodes:
            now_s = self.clock()
            self._stepped(now_s - asked.begun_s)
            if job:
                is_lost = verdict.cancelled
                job.observer.draft_stepped(asked.begun_s, now_s, len(part.nodes), asked.n_inflight, is_lost)
        if job is None:
            return True
        found = self._found(flight, verdict)
        if any(node in found for node in asked.widths):
            self._take(job, asked.widths, [found.get(node) for node in asked.widths])
        else:
            self._grown(job)
        return True

    @staticmethod
    def _found(flight: Flight, verdict: GuessVerdict) -> dict[Node, list[Guess]]:
        part = flight.parts[0]
        if verdict.cancelled:
            return {}
        answers = enumerate(part.nodes, part.first)
        return {node: list(verdict.guesses[row]) for row, node in answers if part.n_wanted(node) and node.live}
