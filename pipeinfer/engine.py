"""The event loop that joins requests, policies, drafter and levels. No I/O of its own: tests drive it by hand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeinfer.interfaces import Clock, Drafter, Waiter
from pipeinfer.levels import Flight, Level, Part
from pipeinfer.metrics import RequestMetrics, why_no_guess
from pipeinfer.policies import Policy, View
from pipeinfer.requests import Finish, Request
from pipeinfer.rota import Rota
from pipeinfer.run_cost import RunCost
from pipeinfer.runs import Guess
from pipeinfer.scheduler import Room, Share, Want, choose
from pipeinfer.trace import NO_TRACE, Tracer
from pipeinfer.tree import Node, Settled

LOOKAHEAD = 0.5
"""A run is sent when the slowest stage has this much of a one-row run left to do: it must be there in time."""

N_ASKED_AHEAD = 2
"""Runs on their way at a larger draft at most: one is worked on, one is there when it is done."""


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of a request that the target has just settled."""

    request: Request
    tokens: list[int]


@dataclass(slots=True, eq=False)
class _Job:
    """An open request, or one that waits to be admitted."""

    request: Request
    policy: Policy
    metrics: RequestMetrics
    n_heard: int = 0  # rows of the prompt that every stage has evaluated


class Engine:
    """Asks, in this order: has a verdict come? can a run go? can a larger draft be asked? can the draft step? and else
    waits, for whatever comes first of any level.

    `drafts`: larger drafts, the smallest of them first; what `drafter` guesses they refine. `run_cost`: what runs cost
    the slowest stage, learned further here; with it a run is held back until a stage is about to want it, so that what
    goes is the best known then. Requests beyond what cells and sequences allow wait for their turn. `on_prompt` hears
    how many rows of a request's prompt have been evaluated.
    """

    def __init__(
        self,
        target: Level,
        drafter: Drafter | None,
        waiter: Waiter,
        clock: Clock,
        *,
        drafts: Sequence[Level] = (),
        run_cost: RunCost | None = None,
        tracer: Tracer = NO_TRACE,
        on_prompt: Callable[[Request, int], None] | None = None,
    ) -> None:
        self.target, self.drafts, self.levels = target, tuple(drafts), (target, *drafts)
        self.drafter, self.waiter, self.clock, self.run_cost, self.tracer = drafter, waiter, clock, run_cost, tracer
        self.on_prompt = on_prompt
        self._free_s = -math.inf  # when the slowest stage will have done what was sent, by `run_cost`
        self._held_s: float | None = None  # when a run may go that was held back
        self._room = Room.for_load(1, target.pipeline.n_stages, 1, target.n_rows, target.n_chunk)
        self._drains = False  # nothing is sent until the parked cells can be won back
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        # whom to ask for a run, for a step of the draft, for nodes that a larger draft shall judge
        self._senders, self._drafters = Rota[_Job](), Rota[_Job]()
        self._askers = [Rota[_Job]() for _ in self.drafts]
        self._emissions: deque[Emission] = deque()
        self._drafting: list[Node] | None = None
        self._unsettled: dict[int, tuple[Request, list[Node]]] = {}  # what the drafter has yet to hear
        self._ended: list[Request] = []

    # -- requests

    def add(self, request: Request, policy: Policy) -> RequestMetrics:
        """Take a request in; its tokens come out of `step`."""
        metrics = RequestMetrics(submitted_s=self.clock(), n_prompt=len(request.prompt))
        self._waiting.append(_Job(request, policy, metrics))
        self._admit()
        return metrics

    def stop(self, request: Request, reason: Finish = Finish.STOPPED) -> None:
        """End a request now; what it emitted stays."""
        if request.finish is None:
            request.finish = reason
        if request.id in self._jobs:
            self._close(self._jobs[request.id])
        for job in [job for job in self._waiting if job.request is request]:
            self._waiting.remove(job)
            job.metrics.finished_s = self.clock()

    def _admit(self) -> None:
        """Open the requests that have waited longest, while their whole texts have cells and there is a sequence."""
        while self._waiting and self._has_room_for(self._waiting[0].request):
            job = self._waiting.popleft()
            for level in self.levels:
                level.open(job.request)
            if self.drafter:
                self.drafter.open(job.request)
            self._jobs[job.request.id] = job
            self._wake(job)

    def _has_room_for(self, request: Request) -> bool:
        n_reserved = sum(job.request.n_cells_most for job in self._jobs.values())
        n_cells = min(level.pool.n_cells for level in self.levels)
        fits = not self._jobs or n_reserved + request.n_cells_most <= n_cells
        return fits and all(level.pool.n_free for level in self.levels) and (not self.drafter or self.drafter.can_open)

    @property
    def busy(self) -> bool:
        """Whether a request is open or waits, a run in flight or an emission to be taken."""
        return bool(self._jobs or self._waiting or self._emissions) or any(level.busy for level in self.levels)

    def generate(self) -> Iterator[Emission]:
        """Run until all requests are finished and nothing is in flight."""
        while self.busy:
            emission = self.step()
            if emission:
                yield emission

    # -- the loop

    def step(self) -> Emission | None:
        """Answer the first of the questions that has an answer; wait if none has."""
        answered = self._emissions or self._hear() or self._send() or self._ask() or self._draft()
        if not answered:
            timeout_s = None if self._held_s is None else max(0.0, self._held_s - self.clock())
            self.waiter.wait([level.pipeline for level in self.levels], timeout_s)
        return self._emissions.popleft() if self._emissions else None

    def _wake(self, job: _Job) -> None:
        """Something has changed for the request: ask its policy again."""
        self._senders.add(job.request.id, job)
        if self.drafter:
            self._drafters.add(job.request.id, job)
        for rota in self._askers:
            rota.add(job.request.id, job)

    def _hear(self) -> bool:
        """Take in what has come: a verdict of the target, or else what a larger draft says."""
        return self._settle_next() or any(self._refine_next(draft) for draft in range(1, 1 + len(self.drafts)))

    # -- verdicts

    def _settle_next(self) -> bool:
        """Take the target's next verdict in, if one has come."""
        landed = self.target.poll()
        if landed is None:
            return False
        flight, verdict = landed
        # the stages are through with all that was sent before it, however long that was thought to take
        self._free_s = min(self._free_s, self.clock() + self.target.cost_in_flight_s)
        if self.run_cost and verdict.slowest_s and flight.whole and not flight.n_context:
            self.run_cost.learn(flight.n_rows, flight.context, verdict.slowest_s)
        for job, part in self._parts_of(flight):
            if verdict.cancelled:
                job.metrics.n_saved += 1
                continue
            self._note_prompt(job, part.n_context)
            part.request.tree.answer(part.nodes, part.of(verdict.tokens))
            settled = part.request.tree.settle()
            if len(settled.path) > 1:
                self._take(job, settled)
        return True

    def _parts_of(self, flight: Flight) -> Iterator[tuple[_Job, Part]]:
        """What the run carried of requests that are still open; they are asked again."""
        for part in flight.parts:
            if job := self._jobs.get(part.request.id):
                self._wake(job)
                yield job, part

    def _note_prompt(self, job: _Job, n_rows: int) -> None:
        job.n_heard += n_rows
        if n_rows and self.on_prompt:
            self.on_prompt(job.request, job.n_heard)

    def _take(self, job: _Job, settled: Settled) -> None:
        """Emit what the target settled, and free and cancel what it refuted."""
        request = job.request
        tokens = request.take(settled.tokens)
        self._emissions.append(Emission(request, tokens))
        job.metrics.count_settled(self.clock(), len(tokens), settled)
        self.tracer.settled(len(tokens))
        for level in self.levels:
            self._count_given_up(level, level.settle(request, settled.path))
        self._tell_drafter(request, settled.path)
        notice = job.policy.settled(settled)
        if notice:
            job.metrics.notices.append(notice)
        if request.finish:
            self._close(job)

    def _close(self, job: _Job) -> None:
        request = job.request
        job.metrics.finished_s = self.clock()
        if notice := why_no_guess(job.metrics):
            job.metrics.notices.append(notice)
        for level in self.levels:
            self._count_given_up(level, level.close(request))
        del self._jobs[request.id]
        for rota in (self._senders, self._drafters, *self._askers):
            rota.discard(request.id)
        if self.drafter:
            self._ended.append(request)
            self._flush_drafter()
        self._admit()

    def _count_given_up(self, level: Level, flights: Sequence[Flight]) -> None:
        if level is not self.target or not flights:
            return
        self._free_s = -math.inf  # the stages are free as soon as they hear of it
        for flight in flights:
            for part in flight.parts:
                if flight.cancelled and part.request.id in self._jobs:
                    self._jobs[part.request.id].metrics.n_cancelled += 1

    def _tell_drafter(self, request: Request, path: list[Node]) -> None:
        """The drafter hears of settled paths between its steps, never in the middle of one."""
        if self.drafter is None:
            return
        if request.id in self._unsettled:
            self._unsettled[request.id][1].extend(path[1:])
        else:
            self._unsettled[request.id] = (request, list(path))
        self._flush_drafter()

    def _flush_drafter(self) -> None:
        if self.drafter is None or self._drafting is not None:
            return
        for request, path in self._unsettled.values():
            self.drafter.settle(request, path)
        for request in self._ended:
            self.drafter.close(request)
        self._unsettled.clear()
        if self._ended:
            self._ended.clear()
            self._admit()

    # -- sending

    def _send(self) -> bool:
        """Send the next run to the target, if one shall go now."""
        self._held_s = None
        if not self._senders or (self._drains and not self._drained()):
            return False
        alone = len(self._jobs) == 1
        if not alone and self._is_early(0):
            return False
        self._room = self._measure_room()
        parts = {job.request.id: part for job in self._senders if (part := self._wanted(job, alone))}
        wants = [_as_want(part) for part in parts.values()]
        chosen = [_cut(parts[share.request_id], share) for share in choose(wants, self._room, alone)]
        return bool(chosen) and self._submit(chosen)

    def _wanted(self, job: _Job, alone: bool) -> Part | None:
        """What the request would send now; it is not asked again until something changes if that is nothing."""
        request, root, target = job.request, job.request.tree.root, self.target
        n_inflight = target.n_inflight(request)
        n_context, n_prompt = target.next_context(request)
        if n_context:
            if n_inflight <= 2 * target.pipeline.n_stages:
                return Part(request, n_context, [] if n_prompt else [root], n_prompt)
        elif root.run_id is None and not request.n_generated and len(request.prompt) > 1:
            return Part(request, 0, [root])  # right behind the prompt
        elif alone and n_inflight and root.run_id is not None and self._is_early(root.position):
            return None  # held: to be asked again then
        elif nodes := job.policy.send(self._view(job)):
            return Part(request, 0, nodes)
        if n_inflight:
            self._senders.discard(request.id)
        return None

    def _submit(self, parts: Sequence[Part]) -> bool:
        flight = self.target.submit(parts)
        sent = flight.parts if flight else []
        # guesses can do without cells, certain tokens cannot
        self._drains = any(part.certain and part not in sent for part in parts) and self.target.pool.n_parked > 0
        if flight is None:
            return False
        for part in sent:
            self._note_sent(self._jobs[part.request.id], part, flight)
        if self.run_cost:
            flight.cost_s = self.run_cost.seconds(flight.n_rows, flight.context)
            self._free_s = max(self._free_s, self.clock()) + flight.cost_s
        return True

    def _note_sent(self, job: _Job, part: Part, flight: Flight) -> None:
        for node in part.nodes:
            node.run_id = flight.run_id
        n_inflight, has_root = self.target.n_inflight(job.request), job.request.tree.root in part.nodes
        job.metrics.count_run(part.n_rows, len(part.nodes), has_root, part.n_branches, n_inflight)
        self._wake(job)
        self._senders.rotate(job.request.id)

    def _drained(self) -> bool:
        """Whether the parked cells have been won back, for which nothing may be in flight."""
        if self.target.pool.can_compact:
            self.target.pool.compact()
            self._drains = False
        return not self._drains

    def _is_early(self, context: int) -> bool:
        """Whether a run sent now would only lie in a queue; then it is held."""
        if self.run_cost is None:
            return False
        due_s = self._free_s - LOOKAHEAD * self.run_cost.seconds(1, context)
        if self.clock() < due_s:
            self._held_s = due_s
            return True
        return False

    def _measure_room(self) -> Room:
        target, n_open = self.target, len(self._jobs)
        n_cheap = self.run_cost.n_cheap_rows(0) if self.run_cost else target.n_rows
        return Room.for_load(n_open, target.pipeline.n_stages, n_cheap, target.n_rows, target.n_chunk)

    # -- drafting

    def _draft(self) -> bool:
        return self.drafter is not None and any(self._draft_for(self.drafter, job) for job in self._drafters)

    def _draft_for(self, drafter: Drafter, job: _Job) -> bool:
        view = self._view(job)
        nodes = job.policy.draft(view)
        if not nodes:
            self._drafters.discard(job.request.id)
            return False
        self._drafters.rotate(job.request.id)
        start_s = self.clock()
        self._drafting = nodes
        try:
            guesses = drafter.expand(job.request, nodes, job.policy.width, self._meanwhile)
        finally:
            self._drafting = None
        job.metrics.count_draft_step(self.clock() - start_s, view.n_inflight, guesses is None)
        self.tracer.drafted(start_s, len(nodes), guesses is not None)
        if guesses is not None and job.request.finish is None:
            self._take_guesses(job, nodes, guesses)
        self._flush_drafter()
        return True

    def _take_guesses(self, job: _Job, nodes: Sequence[Node], guesses: Sequence[list[Guess] | None]) -> None:
        for node, found in zip(nodes, guesses, strict=True):
            if found is not None and node.live and not node.expanded:
                self._grow(job, node, found)
        if any(found is not None for found in guesses):
            self._wake(job)
            return
        # the draft has no room for any of them: more comes only with the next verdict
        self._drafters.discard(job.request.id)
        if not self.target.n_inflight(job.request):
            for node in nodes:
                node.expanded = True
            self._wake(job)

    def _meanwhile(self) -> bool:
        """What the draft asks between its layers: what came is taken in and what it frees is sent at once.

        True, so that the draft gives up, only if nothing it works on can count any more; else its work is kept.
        """
        while self._hear():
            while self._send() or self._ask():
                pass
        return self._drafting is not None and not any(node.live for node in self._drafting)

    def _grow(self, job: _Job, node: Node, guesses: list[Guess]) -> None:
        kept = job.policy.keep(node, guesses)
        job.metrics.n_drafted += len(job.request.tree.grow(node, kept, _log_probs(kept)))

    # -- larger drafts

    def _ask(self) -> bool:
        """Ask the larger drafts about what their smaller ones have guessed."""
        return any(
            level.n_flights < N_ASKED_AHEAD and self._ask_about(job, draft, level)
            for draft, level in enumerate(self.drafts, start=1)
            for job in self._askers[draft - 1]
        )

    def _ask_about(self, job: _Job, draft: int, level: Level) -> bool:
        request, rota = job.request, self._askers[draft - 1]
        n_context = min(level.n_context_left(request), level.n_chunk, level.pool.n_free_cells)
        nodes = [] if level.n_context_left(request) else job.policy.refine(self._view(job), draft)
        if level.submit([Part(request, n_context, level.pool.unplaced(nodes)[: level.n_rows])]):
            rota.rotate(request.id)
            return True
        rota.discard(request.id)
        unknown = [] if level.n_inflight(request) else [node for node in nodes if not level.pool.is_placed(node)]
        for node in unknown:
            node.passed_over = draft  # there is no room to ask about it, nor will there be before the root moves
        if unknown:
            self._wake(job)
        return bool(unknown)

    def _refine_next(self, draft: int) -> bool:
        """Take the larger draft's next answer into the trees, if one has come."""
        landed = self.drafts[draft - 1].poll()
        if landed is None:
            return False
        flight, verdict = landed
        for job, part in self._parts_of(flight):
            answers = [] if verdict.cancelled else zip(part.nodes, part.of(verdict.guesses), strict=True)
            for node, guesses in answers:
                if node.live and node.refined < draft:
                    self._refine(job, node, guesses, draft)
        return True

    def _refine(self, job: _Job, node: Node, guesses: list[Guess], draft: int) -> None:
        kept = job.policy.keep(node, guesses, draft)
        job.metrics.n_refined += 1
        job.metrics.n_drafted += len(job.request.tree.refine(node, kept, _log_probs(kept), draft))

    # -- what policies see

    def _view(self, job: _Job) -> View:
        tree = job.request.tree
        return View(
            tree=tree,
            n_inflight=self.target.n_inflight(job.request),
            n_stages=self.target.pipeline.n_stages,
            depth_left=job.request.depth_left,
            fitting=self.target.pool.fitting,
            n_cheap_rows=self._n_rows_for_guesses(tree.root.position),
            n_drafts=bool(self.drafter) + len(self.drafts),
        )

    def _n_rows_for_guesses(self, context: int) -> int:
        """Rows of a run that cost hardly more than one and that other requests' roots leave."""
        if self.run_cost is None:
            return 1
        return self.run_cost.n_cheap_rows(context) if len(self._jobs) == 1 else self._room.n_guesses

    def audit(self) -> None:
        """Raise AssertionError if a sequence leaks, a run is forgotten or a tree is not what it should be."""
        for job in self._jobs.values():
            job.request.tree.audit()
            assert self.target.n_inflight(job.request) or job.request.id in self._senders, (
                f"request {job.request.id} has nothing in flight and is not asked for more"
            )
            for node in job.request.tree.nodes:
                waiting = node.run_id is not None and node.verdict is None
                assert not waiting or self.target.is_inflight(node.run_id), (
                    f"run {node.run_id} is forgotten, its node waits for ever"
                )
        live = {job.request.id: job.request.tree.nodes for job in self._jobs.values()}
        for level in self.levels:
            level.audit(live)


def _as_want(part: Part) -> Want:
    has_root = part.certain and not part.n_context
    return Want(part.request.id, part.n_context, len(part.nodes), has_root, in_blocks=part.n_prompt > 0)


def _cut(part: Part, share: Share) -> Part:
    return Part(part.request, share.n_context, part.nodes[: share.n_nodes], part.n_prompt)


def _log_probs(guesses: Sequence[Guess]) -> list[float]:
    return [math.log(max(guess.probability, 1e-30)) for guess in guesses]
