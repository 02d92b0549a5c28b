"""The event loop that joins requests, policies, drafter and levels. No I/O of its own: tests drive it by hand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.in_flight import InFlightRun, RequestSlice
from pipeinfer.core.interfaces import Clock, Drafter, Waiter
from pipeinfer.core.levels import Level
from pipeinfer.core.observer import Observer
from pipeinfer.core.policy import HoldUntil, Policy, PolicyContext, Send
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.scheduling.admission import Admission
from pipeinfer.core.scheduling.batch_planner import BatchPlanner
from pipeinfer.core.scheduling.pacer import Pacer
from pipeinfer.core.scheduling.round_robin import RoundRobin
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.core.speculator import Speculator
from pipeinfer.core.tree import Node, Settled


class Engine:
    """Asks, in this order: has a verdict come? may a request begin? can a run go? can a draft elsewhere be asked? can
    the head's step? and else waits, for whatever comes first of any level.

    `version` advances with everything that happens: an answer to one of these questions, the end of a wait, a request
    that is added or stopped. A question is left out only while nothing has happened since it had no answer, so that
    nobody has to know on what an answer depends.

    `drafter`: the smallest draft, a level where another rank has it. `drafts`: larger ones, the smallest of them first;
    what it guesses they refine. `run_cost`: what runs cost the slowest stage, learned further here; with it a run is
    held back until a stage is about to want it, so that what goes is the best known then. Requests for which there are
    no cells or sequences wait, the youngest again when cells run out. `n_prompts`: requests whose prompts are read in
    blocks at a time at most. `max_delay_s`: as in `batches`.

    `taker`: whom emissions are given that come while a step is still at work, with the draft or a stage of the head's
    own; they wait for the end of the step where there is none. It may add and stop requests.
    """

    def __init__(
        self,
        target: Level,
        drafter: Drafter | Level | None,
        waiter: Waiter,
        clock: Clock,
        *,
        drafts: Sequence[Level] = (),
        run_cost: RunCost | None = None,
        n_prompts: int = 1 << 30,
        max_delay_s: float = math.inf,
    ) -> None:
        remote = [drafter] if isinstance(drafter, Level) else []
        self.target, self.levels = target, (target, *remote, *drafts)
        self.waiter, self.clock, self.run_cost = waiter, clock, run_cost
        self._pacer = Pacer(run_cost, clock)
        self.version = 0
        self._asked_to_send = self._asked_to_begin = -1  # at which version that was last asked
        self._hold_s = math.inf  # when a run is due that was held back when it was asked for last
        self._drains = False  # nothing is sent until cells can be won back
        self._active: dict[int, ActiveRequest] = {}
        self._batches = BatchPlanner(target, run_cost, self._active, max_delay_s)
        self.speculator = Speculator(drafter, drafts, clock, self._active, self._grown, target.n_inflight)
        self.admission = Admission(self.levels, self.speculator, self._active, run_cost, n_prompts)
        self._senders = RoundRobin[ActiveRequest]()  # the open requests that have something unsent
        self._emissions = deque[Emission]()
        self.taker: Callable[[Sequence[Emission]], object] | None = None

    # -- requests

    def add(self, request: Request, policy: Policy, observer: Observer | None = None) -> None:
        """Take a request in; its tokens come out of `step`, and the observer hears what becomes of it."""
        context = PolicyContext(
            request, self.target, self.speculator, self._batches, self._pacer, self.run_cost, self.clock
        )
        active = ActiveRequest(request, policy, observer or Observer(), context)
        active.observer.submitted(self.clock(), len(request.prompt))
        self.admission.wait(active)
        self.version += 1
        self._admit()

    def stop(self, request: Request, reason: Finish = Finish.STOPPED) -> None:
        """End a request now; what it emitted stays."""
        self.version += 1
        if request.finish is None:
            request.finish = reason
        if request.id in self._active:
            self._close(self._active[request.id])
        elif active := self.admission.withdraw(request):
            active.observer.finished(self.clock())

    def forget(self) -> None:
        """Give up all that finished requests have left."""
        while self.admission.forget_oldest():
            pass

    def _admit(self) -> bool:
        """Open those that wait and may begin now; whether there was one."""
        if not self.admission.waiting or self._asked_to_begin == self.version:
            return False
        self._asked_to_begin, n_waiting = self.version, len(self.admission.waiting)
        for active in self.admission.ready():
            self._open(active)
        return len(self.admission.waiting) < n_waiting

    def _open(self, active: ActiveRequest) -> None:
        request, prefix = active.request, active.request.prefix_hit
        if prefix:
            self.admission.prefixes.take(prefix)
        for level in self.levels:
            level.open(request)
            # attention costs what the cells between the first and the last in use do, packing what those do
            if not self._active and level.pool.can_compact and level.pool.n_parked > level.pool.n_committed:
                level.pool.compact()
        self.speculator.open(request)
        request.prefix_hit = None  # or it would keep the other, and so on
        active.n_heard = prefix.n_tokens if prefix else 0
        if not active.was_open:
            active.observer.opened(active.n_heard)
        active.was_open = True
        self._active[request.id] = active
        self._senders.add(request.id, active)
        self.speculator.add(active)

    @property
    def busy(self) -> bool:
        """Whether a request is open or waits, a run in flight or an emission to be taken."""
        has_requests = bool(self._active or self.admission.waiting)
        return has_requests or bool(self._emissions) or any(level.busy for level in self.levels)

    def generate(self) -> Iterator[Emission]:
        """Run until all requests are finished and nothing is in flight."""
        while self.busy:
            if emission := self.step():
                yield emission
                yield from self.rest()

    def rest(self) -> Iterator[Emission]:
        """Of other requests with rows in the same run as the one whose emission `step` has returned."""
        while self._emissions:
            yield self._emissions.popleft()

    # -- the loop

    def step(self) -> Emission | None:
        """Answer the first of the questions that has an answer; wait if none has, and nothing happened."""
        version = self.version
        if not (self._emissions or self._react() or self._draft()) and self.version == version:
            self._wait()
        return self._emissions.popleft() if self._emissions else None

    def _react(self) -> bool:
        """Answer the first of the questions but the last, which takes the head's time."""
        answered = self._hear() or self._admit() or self._send() or self.speculator.ask(self.version)
        self.version += answered
        return answered

    def _draft(self) -> bool:
        """Let the draft take a step; what comes meanwhile is taken in, and what it frees is sent at once."""
        drafted = self.speculator.draft(self.version, self._meanwhile)
        self.version += drafted
        return drafted

    def _wait(self) -> None:
        timeout_s = self.timeout_s()
        if timeout_s is None and self._active and not any([level.busy for level in self.levels]):
            stalled = next(iter(self._active.values()))
            raise RuntimeError(
                f"request {stalled.request.id} waits for ever: {stalled.policy.name} neither sends nor drafts for it, "
                "and nothing is in flight"
            )
        self.waiter.wait([level.pipeline for level in self.levels], timeout_s)
        self.version += 1

    def timeout_s(self) -> float | None:
        """How long until a run is due that was held back when it was asked for last; None if none was."""
        return None if self._hold_s == math.inf else max(0.0, self._hold_s - self.clock())

    def _grown(self, active: ActiveRequest) -> None:
        """Its tree has changed: there may be something to send."""
        self._senders.add(active.request.id, active)

    def _hear(self) -> bool:
        """Take in what has come: a verdict of the target, or else what a larger draft says."""
        return self._settle_next() or self.speculator.hear()

    def _meanwhile(self) -> None:
        while self._react() or self._hand_out():
            pass

    def listen(self) -> None:
        """To be called while `step` waits for a stage of the head's own: what has come is taken in and handed out."""
        while self._hear() or self.speculator.ask(self.version) or self._hand_out():
            self.version += 1

    def _hand_out(self) -> bool:
        if not self.taker or not self._emissions:
            return False
        self.taker(list(self.rest()))
        return True

    # -- verdicts

    def _settle_next(self) -> bool:
        """Take the target's next verdict in, if one has come."""
        landed = self.target.poll()
        if landed is None:
            return False
        flight, verdict = landed
        self._pacer.landed(sum([flight.cost_s for flight in self.target.useful_flights]))
        now_s = self.clock()
        if flight.whole and not flight.n_context:
            self._pacer.answered(now_s - flight.sent_s)
            if verdict.slowest_s:
                self._pacer.reported(flight.cost_s, verdict.slowest_s)
                self._pacer.came(now_s - flight.sent_s - verdict.slowest_s)
        if flight.whole and self.run_cost and verdict.slowest_s:
            learn = self.run_cost.learn_chunk if flight.n_context else self.run_cost.learn
            learn(flight.n_rows, flight.context, verdict.slowest_s)
        for part in flight.parts:
            active = self._active[part.request.id]
            if verdict.cancelled:
                active.observer.run_spared()
                continue
            if part.n_context and not part.request.n_generated:
                active.n_heard += part.n_context
                active.observer.prompt_evaluated(active.n_heard)
            tree = part.request.tree
            tree.answer(part.nodes, verdict.tokens, part.first)
            if tree.root.verdict is not None:
                self._take(active, tree.settle(), now_s)
        return True

    def _take(self, active: ActiveRequest, settled: Settled, now_s: float) -> None:
        """Emit what the target settled, and free and cancel what it refuted."""
        request = active.request
        self._senders.add(request.id, active)  # the new root, unless it was sent as a guess
        tokens = request.take(settled.tokens)
        self._emissions.append(Emission(request, tokens))
        active.observer.settled(now_s, len(tokens), settled)
        for level in self.levels:
            if given_up := level.settle(request, settled.path):
                self._count_given_up(level, given_up)
        if self.speculator.n_drafts:
            self.speculator.settle(request, settled.path)
        if notice := active.policy.settled(settled, active.context):
            active.observer.noticed(notice)
        if request.finish:
            self._close(active)

    def _close(self, active: ActiveRequest) -> None:
        request = active.request
        active.observer.finished(self.clock())
        request.n_retained = self.admission.prefixes.n_to_retain(request, self.target.n_settled(request))
        self._give_back(request)
        if request.n_retained:
            self.admission.prefixes.retain(request)

    def _preempt(self, active: ActiveRequest) -> None:
        """Others need its cells: it waits, and is evaluated anew, each row in the way it was."""
        self._give_back(active.request)
        active.observer.preempted()
        self.admission.wait(active)

    def _give_back(self, request: Request) -> None:
        for level in self.levels:
            self._count_given_up(level, level.close(request))
        del self._active[request.id]
        self._senders.discard(request.id)
        self.speculator.close(request)

    def _count_given_up(self, level: Level, flights: Sequence[InFlightRun]) -> None:
        if level is not self.target or not flights:  # nobody waits for a larger draft to be free
            return
        self._pacer.given_up()
        for flight in flights:
            for part in flight.parts:
                if flight.cancelled and (active := self._active.get(part.request.id)):
                    active.observer.run_cancelled()

    # -- sending

    def _send(self) -> bool:
        """Send the next run to the target, if one shall go now."""
        if self._asked_to_send == self.version and (self._hold_s == math.inf or self.clock() < self._hold_s):
            return False
        self._asked_to_send = self.version
        return self._send_next()

    def _send_next(self) -> bool:
        if self._hold_s < math.inf and (late_s := self.clock() - self._hold_s) >= 0:
            self._pacer.was_late(late_s)
        self._hold_s = math.inf
        if not self._senders or (self._drains and not self._drained()):
            return False
        alone = len(self._active) == 1
        if not alone and self.clock() < (due_s := self._pacer.due_s(0)):
            self._hold_s = due_s
            return False
        wants = [part for active in self._senders if (part := self._wanted(active))]
        chosen = self._batches.choose(wants, alone)
        return bool(chosen) and self._submit(chosen)

    def _wanted(self, active: ActiveRequest) -> RequestSlice | None:
        """What the request would send now."""
        request, root, target = active.request, active.request.tree.root, self.target
        if n_left := target.n_context_left(request):
            if target.n_inflight(request) <= 2 * target.pipeline.n_stages:
                n_context, span = target.next_context(request, self._batches.n_chunk(root.position - n_left))
                is_last = not span and n_context == n_left and not self.admission.is_awaited(request)
                return RequestSlice(request, n_context, [root] if is_last else [], is_last, span)
        elif root.run_id is None and 1 < len(request.prompt) == root.position + 1:
            if not (target.n_inflight(request) and self.admission.is_awaited(request)):
                return RequestSlice(request, 0, [root], True)  # right behind the prompt
        elif nodes := self._nodes_to_send(active):
            return RequestSlice(request, 0, nodes, nodes[0] is root)
        return None

    def _nodes_to_send(self, active: ActiveRequest) -> list[Node]:
        """What its policy answers."""
        answer, root = active.policy.send(active.context), active.request.tree.root
        if isinstance(answer, Send):
            return list(answer.nodes)
        if isinstance(answer, HoldUntil):
            self._hold_s = min(self._hold_s, answer.when_s)
        elif not self.speculator.prefer(active) and root.run_id is None and not self.target.n_inflight(active.request):
            return [root]  # nothing would come that is worth the wait
        return []

    def _submit(self, parts: Sequence[RequestSlice]) -> bool:
        flight = self.target.submit(parts)
        sent = flight.parts if flight else []
        if len(sent) < len(parts):  # guesses can do without cells, committed tokens cannot
            n_lacking = sum(max(1, part.n_rows) for part in parts if part.committed and part not in sent)
            self._drains = n_lacking > (0 if self.target.pool.n_parked else self.target.pool.n_free_cells)
        if flight is None:  # where nothing will come back that frees cells, others give them up now
            return self._drains and not self.target.pool.has_nodes and self._send_next()
        flight.cost_s, flight.sent_s = self._pacer.sent(flight.n_rows, flight.context), self.clock()
        for part in sent:
            self._note_sent(self._active[part.request.id], part, flight)
        return True

    def _note_sent(self, active: ActiveRequest, part: RequestSlice, flight: InFlightRun) -> None:
        for node in part.nodes:
            node.run_id = flight.run_id
        n_nodes, n_inflight = len(part.nodes), self.target.n_inflight(active.request)
        active.observer.run_sent(flight.sent_s, part.n_rows, n_nodes, part.has_root, part.n_branches, n_inflight)
        if part.has_root and len(active.request.tree.nodes) == n_nodes:
            self._senders.discard(active.request.id)  # there is nothing more to send before a verdict or a guess
        else:
            self._senders.rotate(active.request.id)

    def _drained(self) -> bool:
        """Whether cells have been won back, while no node is in flight: parked ones, and the youngest requests'."""
        pool = self.target.pool
        if pool.has_nodes:
            return False
        while active := self.admission.next_to_preempt():
            self._preempt(active)
        if pool.can_compact:
            pool.compact()
        self._drains = False
        self.version += 1  # there may be room for others now
        return True

    @property
    def delay_too_short(self) -> str:
        """As in `batches`."""
        return self._batches.too_short

    def audit(self) -> None:
        """Raise AssertionError if a sequence leaks, a run is forgotten or a tree is not what it should be."""
        for active in self._active.values():
            active.request.tree.audit()
            assert active.request.id in self._senders or not any(active.request.tree.unsent()), (
                f"request {active.request.id} has something to send and is not asked for it"
            )
            for node in active.request.tree.nodes:
                waiting = node.run_id is not None and node.verdict is None
                assert not waiting or self.target.is_inflight(node.run_id), (
                    f"run {node.run_id} is forgotten, its node waits for ever"
                )
        live = {active.request.id: active.request.tree.nodes for active in self._active.values()}
        for level in self.levels:
            level.audit(live)
