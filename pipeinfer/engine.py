"""The event loop that joins policy, tree, drafter and pipeline. No I/O of its own: tests drive it by hand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeinfer.blocks import chunk_end, rows_in_blocks
from pipeinfer.interfaces import Clock, Drafter, Guess, Pipeline, Refiner
from pipeinfer.metrics import RequestMetrics, why_no_guess
from pipeinfer.policies import Policy, View
from pipeinfer.requests import Finish, Request
from pipeinfer.run_cost import RunCost
from pipeinfer.runs import Row, Run
from pipeinfer.sequences import SequencePool
from pipeinfer.trace import NO_TRACE, Tracer
from pipeinfer.tree import Node, Settled

LOOKAHEAD = 0.5
"""A run is sent when the slowest stage has this much of a one-row run left to do: it must be there in time."""


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens of a request that the target has just settled."""

    request: Request
    tokens: list[int]


@dataclass(slots=True)
class _Flight:
    """A run between submission and verdict."""

    request: Request
    nodes: list[Node]
    n_context: int
    dead: bool = False  # no row can count any more
    cancelled: bool = False  # and the stages were told


@dataclass(slots=True)
class _Job:
    """An open request and how far its prompt has been sent."""

    request: Request
    policy: Policy
    metrics: RequestMetrics
    n_sent: int = 0
    n_heard: int = 0  # rows of the prompt that every stage has evaluated

    @property
    def n_prompt_left(self) -> int:
        return len(self.request.prompt) - 1 - self.n_sent


class Engine:
    """Asks, in this order: has a verdict or a larger draft's answer come? can a run go? can a larger draft be asked?
    can the draft step? and else waits.

    `pool` is the target's. `n_chunk`: prompt rows a run. `n_rows_max`: guesses a run may carry. `cancel`: tell the
    stages of runs that cannot count any more (off only for ablation studies). `run_cost`: what runs cost the slowest
    stage, learned further here; with it guesses are held back until a stage is about to want them, so that what goes is
    the best known then. `refiners`: larger drafts, the smallest of them first; what `drafter` guesses they refine.
    `blocks`: a prompt is cut where its length alone says, see there. `on_prompt` hears how many rows of a request's
    prompt have been evaluated.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pool: SequencePool,
        drafter: Drafter | None,
        clock: Clock,
        *,
        n_chunk: int = 128,
        n_rows_max: int = 64,
        cancel: bool = True,
        run_cost: RunCost | None = None,
        refiners: Sequence[Refiner] = (),
        tracer: Tracer = NO_TRACE,
        blocks: bool = False,
        on_prompt: Callable[[Request, int], None] | None = None,
    ) -> None:
        self.pipeline, self.pool, self.drafter, self.clock = pipeline, pool, drafter, clock
        self.n_chunk, self.n_rows_max, self.cancel, self.tracer = n_chunk, n_rows_max, cancel, tracer
        self.run_cost, self.refiners = run_cost, tuple(refiners)
        self.blocks, self.on_prompt = blocks, on_prompt
        self._free_s = -math.inf  # when the slowest stage will have done what was sent, by `run_cost`
        self._held_s: float | None = None  # when guesses may go that were held back
        self._jobs: dict[int, _Job] = {}
        self._flights: dict[int, _Flight] = {}
        self._next_run_id = 1
        self._emissions: deque[Emission] = deque()
        self._drafting: list[Node] | None = None
        self._unsettled: dict[int, tuple[Request, list[Node]]] = {}  # what the drafter has yet to hear

    # -- requests

    def add(self, request: Request, policy: Policy) -> RequestMetrics:
        """Take a request in; its tokens come out of `step`."""
        metrics = RequestMetrics(submitted_s=self.clock(), n_prompt=len(request.prompt))
        self.pool.open(request.id)
        self._jobs[request.id] = _Job(request, policy, metrics)
        return metrics

    def stop(self, request: Request, reason: Finish = Finish.STOPPED) -> None:
        """End a request now; what it emitted stays."""
        if request.id in self._jobs:
            request.finish = reason
            self._close(self._jobs[request.id])

    @property
    def busy(self) -> bool:
        """Whether a request is open, a run in flight, a draft asked or an emission to be taken."""
        return bool(self._jobs or self._flights or self._emissions) or any(refiner.busy for refiner in self.refiners)

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
            self.pipeline.wait(None if self._held_s is None else max(0.0, self._held_s - self.clock()))
        return self._emissions.popleft() if self._emissions else None

    def _hear(self) -> bool:
        """Take in what has come: a verdict, or else what a larger draft says."""
        return self._settle_next() or any(self._refine_next(draft) for draft in range(1, 1 + len(self.refiners)))

    # -- verdicts

    def _settle_next(self) -> bool:
        """Take the next verdict in, if one has come."""
        verdict = self.pipeline.poll()
        if verdict is None:
            return False
        flight = self._flights.pop(verdict.run_id)
        job = self._jobs.get(flight.request.id)
        if job is None:
            return True
        if verdict.cancelled:
            assert flight.cancelled, f"run {verdict.run_id} was cancelled by nobody"
            job.metrics.n_saved += 1
            return True
        if self.run_cost and verdict.slowest_s and not flight.n_context:
            self.run_cost.learn(len(flight.nodes), flight.nodes[0].position, verdict.slowest_s)
        self._note_prompt(job, flight.n_context)
        flight.request.tree.answer(flight.nodes, verdict.tokens[flight.n_context :])
        settled = flight.request.tree.settle()
        if len(settled.path) > 1:
            self._take(job, settled)
        return True

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
        self.pool.settle(request.id, settled.path)
        for refiner in self.refiners:
            refiner.settle(request, settled.path)
        self._tell_drafter(request, settled.path)
        notice = job.policy.settled(settled)
        if notice:
            job.metrics.notices.append(notice)
        if request.finish:
            self._close(job)
        else:
            self._cancel_dead(job)

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
            if request.finish:
                self.drafter.close(request)
        self._unsettled.clear()

    def _cancel_dead(self, job: _Job) -> None:
        """Cancel the request's runs of which no row can count any more."""
        doomed = [
            run_id
            for run_id, flight in self._flights.items()
            if flight.request is job.request and not flight.dead
            if flight.request.finish or not any(node.live for node in flight.nodes)
        ]
        for run_id in doomed:
            self._flights[run_id].dead = True
            self._free_s = -math.inf  # the stages are free as soon as they hear of it
        if doomed and self.cancel:
            for run_id in doomed:
                self._flights[run_id].cancelled = True
            job.metrics.n_cancelled += len(doomed)
            self.pipeline.cancel(doomed)

    def _close(self, job: _Job) -> None:
        request = job.request
        del self._jobs[request.id]
        job.metrics.finished_s = self.clock()
        notice = why_no_guess(job.metrics)
        if notice:
            job.metrics.notices.append(notice)
        self._cancel_dead(job)
        self.pool.close(request.id)
        for refiner in self.refiners:
            refiner.close(request)
        self._tell_drafter(request, [request.tree.root])

    # -- sending

    def _send(self) -> bool:
        self._held_s = None
        return any(
            self._send_prompt(job) if job.n_prompt_left else self._send_nodes(job) for job in self._jobs.values()
        )

    def _send_prompt(self, job: _Job) -> bool:
        """The next chunk of the prompt; the root, its last token, travels with or right behind the last chunk."""
        n_blocks = rows_in_blocks(len(job.request.prompt)) if self.blocks else 0
        n_rows = min(self.n_chunk, job.n_prompt_left)
        if n_blocks:
            n_rows = chunk_end(n_blocks, job.n_sent, self.n_chunk) - job.n_sent
        if self._n_live_flights(job.request) > 2 * self.pipeline.n_stages or not self._has_cells(n_rows + 1):
            return False
        start, job.n_sent = job.n_sent, job.n_sent + n_rows
        last = [] if job.n_prompt_left else [job.request.tree.root]
        self._submit(job, start, n_rows, [] if n_blocks else last, n_blocks)
        if n_blocks and last:
            self._submit(job, job.n_sent, 0, last)
        return True

    def _send_nodes(self, job: _Job) -> bool:
        view = self._view(job)
        root = job.request.tree.root
        if view.n_inflight and root.run_id is not None and self._is_early(root.position):
            return False
        nodes = self._fitting(job.policy.send(view))
        if nodes:
            self._submit(job, job.n_sent, 0, nodes)
        return bool(nodes)

    def _is_early(self, context: int) -> bool:
        """Whether a run sent now would only lie in a queue; then it is held."""
        if self.run_cost is None:
            return False
        due_s = self._free_s - LOOKAHEAD * self.run_cost.seconds(1, context)
        if self.clock() < due_s:
            self._held_s = due_s
            return True
        return False

    def _fitting(self, nodes: list[Node]) -> list[Node]:
        """As many of the nodes as cells, sequences and the batch allow: under pressure the tree gets narrower."""
        nodes = nodes[: self.n_rows_max]
        if nodes:
            self._has_cells(len(nodes))
        return self.pool.fitting(nodes)

    def _has_cells(self, n_rows: int) -> bool:
        """Whether `n_rows` cells are free, after compaction if it is possible and needed."""
        if n_rows > self.pool.n_free_cells and self.pool.can_compact:
            self.pool.compact()
        return n_rows <= self.pool.n_free_cells

    def _submit(self, job: _Job, start: int, n_context: int, nodes: list[Node], n_prompt: int = 0) -> None:
        request = job.request
        run_id, self._next_run_id = self._next_run_id, self._next_run_id + 1
        placement = self.pool.place(request.id, n_context, nodes)
        context_seqs = (placement.context_seq,)
        rows = [
            Row(request.id, request.prompt[position], position, context_seqs, wanted=False)
            for position in range(start, start + n_context)
        ]
        for node, seqs in zip(nodes, placement.node_seqs, strict=True):
            node.run_id = run_id
            rows.append(Row(request.id, node.token, node.position, seqs))
        opens = {request.id: request.sampling} if not job.metrics.n_runs else {}
        self._flights[run_id] = _Flight(request, nodes, n_context)
        n_inflight, has_root = self._n_live_flights(request), request.tree.root in nodes
        job.metrics.count_run(len(rows), len(nodes), has_root, len(placement.leased), n_inflight)
        if self.run_cost:
            self._free_s = max(self._free_s, self.clock()) + self.run_cost.seconds(len(rows), rows[0].position)
        self.pipeline.submit(Run(run_id, rows, placement.ops, opens, n_prompt))

    # -- drafting

    def _draft(self) -> bool:
        return self.drafter is not None and any(self._draft_for(self.drafter, job) for job in self._jobs.values())

    def _draft_for(self, drafter: Drafter, job: _Job) -> bool:
        view = self._view(job)
        nodes = job.policy.draft(view)
        if not nodes:
            return False
        start_s = self.clock()
        self._drafting = nodes
        try:
            guesses = drafter.expand(job.request, nodes, job.policy.width, self._meanwhile)
        finally:
            self._drafting = None
        job.metrics.count_draft_step(self.clock() - start_s, view.n_inflight, guesses is None)
        self.tracer.drafted(start_s, len(nodes), guesses is not None)
        for node, found in zip(nodes, guesses or [], strict=False):
            if node.live and not node.refined:
                self._grow(job, node, found)
        self._flush_drafter()
        return True

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

    # -- refining

    def _ask(self) -> bool:
        """Ask the larger drafts about what their smaller ones have guessed."""
        return any(
            refiner.has_room and self._ask_about(job, draft)
            for draft, refiner in enumerate(self.refiners, start=1)
            for job in self._jobs.values()
        )

    def _ask_about(self, job: _Job, draft: int) -> bool:
        nodes = job.policy.refine(self._view(job), draft)
        return bool(nodes) and self.refiners[draft - 1].ask(job.request, nodes)

    def _refine_next(self, draft: int) -> bool:
        """Take the draft's next answer into the tree, if one has come."""
        answers = self.refiners[draft - 1].poll()
        for request, node, guesses in answers or []:
            job = self._jobs.get(request.id)
            if guesses is None:
                node.passed_over = max(node.passed_over, draft)
            elif job and node.refined < draft:
                kept = job.policy.keep(node, guesses, draft)
                job.metrics.n_refined += 1
                job.metrics.n_drafted += len(request.tree.refine(node, kept, _log_probs(kept), draft))
        return answers is not None

    # -- what policies see

    def _n_live_flights(self, request: Request) -> int:
        return sum(flight.request is request and not flight.dead for flight in self._flights.values())

    def _view(self, job: _Job) -> View:
        return View(
            tree=job.request.tree,
            n_inflight=self._n_live_flights(job.request),
            n_stages=self.pipeline.n_stages,
            depth_left=job.request.depth_left,
            fitting=self.pool.fitting,
            n_cheap_rows=self.run_cost.n_cheap_rows(job.request.tree.root.position) if self.run_cost else 1,
            n_drafts=bool(self.drafter) + len(self.refiners),
        )

    def audit(self) -> None:
        """Raise AssertionError if a sequence leaks, a run is forgotten or a tree is not what it should be."""
        for job in self._jobs.values():
            job.request.tree.audit()
            flying = {id(node) for flight in self._flights.values() for node in flight.nodes}
            for node in job.request.tree.nodes:
                waiting = node.run_id is not None and node.verdict is None
                assert not waiting or id(node) in flying, f"run {node.run_id} is forgotten, its node waits for ever"
        live = {job.request.id: job.request.tree.nodes for job in self._jobs.values()}
        self.pool.audit(live)
        for refiner in self.refiners:
            refiner.audit(live)


def _log_probs(guesses: Sequence[Guess]) -> list[float]:
    return [math.log(max(guess.probability, 1e-30)) for guess in guesses]
