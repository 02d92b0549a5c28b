"""How trees grow: steps of the smallest draft, what larger drafts say of its guesses. Sends nothing to the target."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.in_flight import RequestSlice
from pipeinfer.core.interfaces import Clock, Drafter
from pipeinfer.core.levels import Level
from pipeinfer.core.remote_draft import RemoteDraft
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.scheduling.round_robin import RoundRobin
from pipeinfer.core.tree import Node

N_ASKED_AHEAD = 2
"""Runs on their way at a larger draft at most: one is worked on, one is there when it is done."""


N_TIMED = 9
"""Steps of the draft whose median is what a step takes: some read a prompt before, or are interrupted."""


class _Step(NamedTuple):
    """A step that the smallest draft is at: whose nodes it expands, and since when."""

    request: Request
    nodes: Collection[Node]
    begun_s: float


class Speculator:
    """`drafts`: larger drafts, the smallest of them first; what `drafter` guesses they refine. That is a level where
    another rank than the head has the smallest draft.

    `active`: the open requests by id. `grown`: is told that a tree has changed, so that its policy is asked again.
    `in_flight`: runs of a request that the target works on.
    """

    def __init__(
        self,
        drafter: Drafter | Level | None,
        drafts: Sequence[Level],
        clock: Clock,
        active: Mapping[int, ActiveRequest],
        grown: Callable[[ActiveRequest], None],
        in_flight: Callable[[Request], int],
    ) -> None:
        self.drafter = None if isinstance(drafter, Level) else drafter
        self.drafts, self.clock = tuple(drafts), clock
        self._active, self._grown, self._in_flight = active, grown, in_flight
        # whom to ask for a step of the draft, and for nodes that a larger draft shall judge: the open requests
        self._drafters = RoundRobin[ActiveRequest]()
        self._askers = [RoundRobin[ActiveRequest]() for _ in self.drafts]
        self._asked_to_draft = self._asked_to_ask = -1  # at which of the engine's versions that had no answer
        self.n_drafts = (drafter is not None) + len(self.drafts)
        self._step: _Step | None = None
        self._unsettled: dict[int, tuple[Request, list[Node]]] = {}  # what the drafter has yet to hear
        self._ended: list[tuple[Callable[[Request], None], Request]] = []
        self._steps_s: deque[float] = deque(maxlen=N_TIMED)
        self.remote = (
            RemoteDraft(drafter, clock, active, self._take, self._steps_s.append)
            if isinstance(drafter, Level)
            else None
        )

    # -- requests

    @property
    def can_open(self) -> bool:
        return self.drafter is None or self.drafter.can_open

    @property
    def has_heard(self) -> bool:
        """Whether the drafter knows of all requests that have ended."""
        return not self._ended

    def open(self, request: Request) -> None:
        if self.drafter:
            self.drafter.open(request)

    def add(self, active: ActiveRequest) -> None:
        """The request is open: its policy is asked for steps from now on."""
        if active.policy.drafts:
            for turns in (self._drafters, *self._askers):
                turns.add(active.request.id, active)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The root moved. The drafter hears of it between its steps, never in the middle of one."""
        if self.drafter is None:
            return
        if request.id in self._unsettled:
            self._unsettled[request.id][1].extend(path[1:])
        else:
            self._unsettled[request.id] = (request, list(path))
        self._flush()

    def close(self, request: Request) -> None:
        """The request is open no longer. Until the drafter has heard of it there is no more room than before."""
        for turns in (self._drafters, *self._askers):
            turns.discard(request.id)
        if self.drafter:
            self._ended.append((self.drafter.close, request))
            self._flush()

    def forget(self, request: Request) -> None:
        """What a finished request has left is given up."""
        if self.drafter:
            self._ended.append((self.drafter.forget, request))
            self._flush()

    def _flush(self) -> None:
        if self.drafter is None or self._step:
            return
        for request, path in self._unsettled.values():
            self.drafter.settle(request, path)
        for end, request in self._ended:
            end(request)
        self._unsettled.clear()
        self._ended.clear()

    # -- the smallest draft

    def draft(self, version: int, meanwhile: Callable[[], None]) -> bool:
        """One step for the request whose turn it is. `meanwhile` is called between the draft's layers. `version`: as in
        the engine; nobody is asked twice at one where nobody had something to expand."""
        drafter = self.drafter
        if drafter is None or self._asked_to_draft == version:
            return False
        drafts = any(self._draft_for(drafter, active, meanwhile) for active in self._drafters)
        if not drafts:
            self._asked_to_draft = version
        return drafts

    def _draft_for(self, drafter: Drafter, active: ActiveRequest, meanwhile: Callable[[], None]) -> bool:
        nodes, n_inflight = active.policy.draft(active.context), active.context.n_inflight
        if not nodes:
            return False
        self._drafters.rotate(active.request.id)
        start_s = self.clock()
        self._step = _Step(active.request, nodes, start_s)
        try:
            guesses = drafter.expand(active.request, nodes, lambda: self._interrupted(nodes, meanwhile))
        finally:
            self._step = None
        end_s, is_open = self.clock(), active.request.id in self._active
        steps = guesses is None or self._take(active, nodes, guesses) if is_open else True
        if steps:
            self._steps_s.append(end_s - start_s)
            active.observer.draft_stepped(start_s, end_s, len(nodes), n_inflight, guesses is None)
        has_ended = bool(self._ended)
        self._flush()
        return steps or has_ended

    @property
    def step_s(self) -> float:
        """What a step of the smallest draft takes; 0 before the first one."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def at_work(self, request: Request) -> tuple[Collection[Node], float]:
        """What of the request the smallest draft expands at the moment, and how long its step still takes."""
        if self.remote:
            nodes, begun_s = self.remote.at_work(request)
        elif self._step and self._step.request is request:
            nodes, begun_s = self._step.nodes, self._step.begun_s
        else:
            nodes, begun_s = (), 0.0
        return nodes, max(0.0, begun_s + self.step_s - self.clock()) if nodes else 0.0

    @staticmethod
    def _interrupted(nodes: Iterable[Node], meanwhile: Callable[[], None]) -> bool:
        """The draft gives up only if nothing it works on can count any more; else its work is kept."""
        meanwhile()
        return not any(node.live for node in nodes)

    def _take(self, active: ActiveRequest, nodes: Collection[Node], guesses: Sequence[list[Guess] | None]) -> bool:
        """Take the guesses after each node in; whether that changed anything."""
        for node, found in zip(nodes, guesses, strict=True):
            if found is not None and node.live and not node.expanded:
                kept = active.policy.keep(node, found)
                active.observer.grown(len(active.request.tree.grow(node, kept, _log_probs(kept))))
        has_room = any(found is not None for found in guesses)
        if not has_room:  # more comes only with the next verdict
            if self._in_flight(active.request):
                return False
            for node in nodes:
                node.expanded = True
        self._grown(active)
        return True

    def awaited(self, active: ActiveRequest) -> bool:
        """Take the request's next step first; whether there is one, of any draft."""
        if not active.context.drafting[0] and not self._has_step(active):
            return False
        self._drafters.prefer(active.request.id)
        return True

    def _has_step(self, active: ActiveRequest) -> bool:
        has_first = self.drafter is not None or self.remote is not None
        return bool(has_first and active.policy.draft(active.context)) or any(
            level.n_inflight(active.request) or active.policy.refine(active.context, draft)
            for draft, level in enumerate(self.drafts, start=1)
        )

    # -- drafts on other ranks

    def ask(self, version: int) -> bool:
        """Ask the smallest draft, where it is one, for more, and larger ones about what smaller ones have guessed.
        `version`: as in `draft`."""
        if self._asked_to_ask == version or not (self.remote or self.drafts):
            return False
        asked = bool(self.remote and self.remote.ask(self._drafters)) or any(
            level.n_flights < N_ASKED_AHEAD and self._ask_about(active, draft, level)
            for draft, level in enumerate(self.drafts, start=1)
            for active in self._askers[draft - 1]
        )
        if not asked:
            self._asked_to_ask = version
        return asked

    def _ask_about(self, active: ActiveRequest, draft: int, level: Level) -> bool:
        request = active.request
        n_left = level.n_context_left(request)
        n_context = min(n_left, level.n_chunk, level.pool.n_free_cells)
        asked = {} if n_context else active.policy.refine(active.context, draft)
        nodes = [] if n_left else level.pool.unplaced(list(asked))[: level.n_rows]
        # nodes above them that the level has yet to see are asked about too: they are evaluated anyway
        width = max(asked.values(), default=0)
        widths = {node: asked.get(node, width) for node in nodes}
        if level.submit([RequestSlice(request, n_context, nodes, request.tree.root in nodes, widths=widths)]):
            self._askers[draft - 1].rotate(request.id)
            return True
        unknown = [] if level.n_inflight(request) else [node for node in asked if not level.pool.is_placed(node)]
        for node in unknown:
            node.passed_over = draft  # there is no room to ask about it, nor will there be before the root moves
        return bool(unknown)

    def hear(self) -> bool:
        """Take the next answer into the trees, if one has come."""
        if self.remote and self.remote.hear():
            return True
        if not self.drafts:
            return False
        return any(self._refine_next(draft, level) for draft, level in enumerate(self.drafts, start=1))

    def _refine_next(self, draft: int, level: Level) -> bool:
        landed = level.poll()
        if landed is None:
            return False
        flight, verdict = landed
        for part in flight.parts:
            active = self._active[part.request.id]
            for index, node in enumerate([] if verdict.cancelled else part.nodes, part.first):
                if node.live and node.refined < draft:
                    self._refine(active, node, verdict.guesses[index], draft)
        return True

    def _refine(self, active: ActiveRequest, node: Node, guesses: list[Guess], draft: int) -> None:
        kept = active.policy.keep(node, guesses, draft)
        active.observer.refined()
        active.observer.grown(len(active.request.tree.refine(node, kept, _log_probs(kept), draft)))
        self._grown(active)


def _log_probs(guesses: Sequence[Guess]) -> list[float]:
    return [math.log(max(guess.probability, 1e-30)) for guess in guesses]
