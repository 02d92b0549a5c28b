"""How trees grow: steps of the smallest draft, what larger drafts say of its guesses. Sends nothing to the target."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeinfer.core.flights import Part
from pipeinfer.core.interfaces import Clock, Drafter
from pipeinfer.core.levels import Level
from pipeinfer.core.opened import Opened
from pipeinfer.core.remote_draft import RemoteDraft
from pipeinfer.core.requests import Request
from pipeinfer.core.rota import Rota
from pipeinfer.core.runs import Guess
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


class Growth:
    """`drafts`: larger drafts, the smallest of them first; what `drafter` guesses they refine. That is a level where
    another rank than the head has the smallest draft.

    `opened`: the open requests by id. `grown`: is told that a tree has changed, so that its policy is asked again.
    `in_flight`: runs of a request that the target works on.
    """

    def __init__(
        self,
        drafter: Drafter | Level | None,
        drafts: Sequence[Level],
        clock: Clock,
        opened: Mapping[int, Opened],
        grown: Callable[[Opened], None],
        in_flight: Callable[[Request], int],
    ) -> None:
        self.drafter = None if isinstance(drafter, Level) else drafter
        self.drafts, self.clock = tuple(drafts), clock
        self._opened, self._grown, self._in_flight = opened, grown, in_flight
        self._drafters = Rota[Opened]()  # whom to ask for a step of the draft
        self._askers = [Rota[Opened]() for _ in self.drafts]  # and for nodes that a larger draft shall judge
        self.n_drafts = (drafter is not None) + len(self.drafts)
        self._step: _Step | None = None
        self._unsettled: dict[int, tuple[Request, list[Node]]] = {}  # what the drafter has yet to hear
        self._ended: list[tuple[Callable[[Request], None], Request]] = []
        self._steps_s: deque[float] = deque(maxlen=N_TIMED)
        self.remote = (
            RemoteDraft(drafter, clock, opened, self._take, grown, self._steps_s.append)
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

    def wake(self, job: Opened) -> None:
        """Something has changed for the request: ask its policy again."""
        if self.drafter:
            self._drafters.add(job.request.id, job)
        elif self.remote:
            self.remote.wake(job)
        for rota in self._askers:
            rota.add(job.request.id, job)

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
        for rota in (self._drafters, *self._askers):
            rota.discard(request.id)
        if self.remote:
            self.remote.discard(request)
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

    def draft(self, meanwhile: Callable[[], None]) -> bool:
        """One step for the request whose turn it is. `meanwhile` is called between the draft's layers."""
        drafter = self.drafter
        return drafter is not None and any(self._draft_for(drafter, job, meanwhile) for job in self._drafters)

    def _draft_for(self, drafter: Drafter, job: Opened, meanwhile: Callable[[], None]) -> bool:
        nodes, n_inflight = job.policy.draft(job.view), job.view.n_inflight
        if not nodes:
            self._drafters.discard(job.request.id)
            return False
        self._drafters.rotate(job.request.id)
        start_s = self.clock()
        self._step = _Step(job.request, nodes, start_s)
        try:
            guesses = drafter.expand(job.request, nodes, lambda: self._interrupted(nodes, meanwhile))
        finally:
            self._step = None
        end_s = self.clock()
        self._steps_s.append(end_s - start_s)
        job.observer.draft_stepped(start_s, end_s, len(nodes), n_inflight, guesses is None)
        if guesses is not None and job.request.id in self._opened:
            self._take(job, nodes, guesses)
        self._flush()
        return True

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

    def _take(self, job: Opened, nodes: Collection[Node], guesses: Sequence[list[Guess] | None]) -> None:
        for node, found in zip(nodes, guesses, strict=True):
            if found is not None and node.live and not node.expanded:
                kept = job.policy.keep(node, found)
                job.observer.grown(len(job.request.tree.grow(node, kept, _log_probs(kept))))
        if any(found is not None for found in guesses):
            self._grown(job)
            return
        # the draft has no room for any of them: more comes only with the next verdict
        self._drafters.discard(job.request.id)
        if self.remote:
            self.remote.discard(job.request)
        if not self._in_flight(job.request):
            for node in nodes:
                node.expanded = True
            self._grown(job)

    # -- drafts on other ranks

    def ask(self) -> bool:
        """Ask the smallest draft, where it is one, for more, and larger ones about what smaller ones have guessed."""
        if self.remote and self.remote.ask():
            return True
        if not self.drafts:
            return False
        return any(
            level.n_flights < N_ASKED_AHEAD and self._ask_about(job, draft, level)
            for draft, level in enumerate(self.drafts, start=1)
            for job in self._askers[draft - 1]
        )

    def _ask_about(self, job: Opened, draft: int, level: Level) -> bool:
        request, rota = job.request, self._askers[draft - 1]
        n_left = level.n_context_left(request)
        n_context = min(n_left, level.n_chunk, level.pool.n_free_cells)
        asked = {} if n_context else job.policy.refine(job.view, draft)
        nodes = [] if n_left else level.pool.unplaced(list(asked))[: level.n_rows]
        # nodes above them that the level has yet to see are asked about too: they are evaluated anyway
        width = max(asked.values(), default=0)
        widths = {node: asked.get(node, width) for node in nodes}
        if level.submit([Part(request, n_context, nodes, request.tree.root in nodes, widths=widths)]):
            rota.rotate(request.id)
            return True
        rota.discard(request.id)
        unknown = [] if level.n_inflight(request) else [node for node in asked if not level.pool.is_placed(node)]
        for node in unknown:
            node.passed_over = draft  # there is no room to ask about it, nor will there be before the root moves
        if unknown:
            self._grown(job)
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
            job = self._opened.get(part.request.id)
            if job is None:
                continue
            self._grown(job)
            for index, node in enumerate([] if verdict.cancelled else part.nodes, part.first):
                if node.live and node.refined < draft:
                    self._refine(job, node, verdict.guesses[index], draft)
        return True

    @staticmethod
    def _refine(job: Opened, node: Node, guesses: list[Guess], draft: int) -> None:
        kept = job.policy.keep(node, guesses, draft)
        job.observer.refined()
        job.observer.grown(len(job.request.tree.refine(node, kept, _log_probs(kept), draft)))


def _log_probs(guesses: Sequence[Guess]) -> list[float]:
    return [math.log(max(guess.probability, 1e-30)) for guess in guesses]
