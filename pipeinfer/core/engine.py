"""The event loop that joins requests, policies, drafts and levels. No I/O of its own: tests drive it by hand."""

import math
from collections.abc import Callable, Sequence

from pipeinfer.core.admission import UNLIMITED, Admission, OpenLimits
from pipeinfer.core.batch_planner import BatchPlanner
from pipeinfer.core.interfaces import Drafter, Waiter
from pipeinfer.core.levels import InFlightRun, Level, RequestSlice
from pipeinfer.core.policy import ActiveRequest, AwaitDraft, HoldUntil, Policy, Send
from pipeinfer.core.policy_context import PolicyContext
from pipeinfer.core.requests import Emission, Finish, Observer, Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.speculator import Speculator
from pipeinfer.core.tree import Node, Settled
from pipeinfer.core.types import Clock, RoundRobin


class Engine:
    """Does the first of these that it can: hear a verdict, open a request, send a run, ask a draft on another rank, do
    a draft step here; else it waits for the next verdict of any level.

    `version` advances with every event: each of these, the end of a wait, a request that is added or stopped. What
    could not be done is tried again at the next version, so nothing has to know what it depends on.

    `drafter`: the smallest draft, a Level where another rank has it. `on_tokens`: called with the new tokens of all
    requests in one run; it may add and stop requests. `drafts`: larger drafts, which refine its guesses, the smallest
    first. `run_cost`: with it a run is held back until the slowest stage is about to want it. `max_delay_s`: as in
    `BatchPlanner`. `draft_s`: as in `Speculator`."""

    def __init__(
        self,
        target: Level,
        drafter: Drafter | Level | None,
        waiter: Waiter,
        clock: Clock,
        on_tokens: Callable[[Sequence[Emission]], object] = lambda emissions: None,
        *,
        drafts: Sequence[Level] = (),
        run_cost: RunCost | None = None,
        limits: OpenLimits = UNLIMITED,
        max_delay_s: float = math.inf,
        draft_s: float = 0.0,
    ) -> None:
        remote = [drafter] if isinstance(drafter, Level) else []
        self.target, self.levels = target, (target, *remote, *drafts)
        self.waiter, self.clock, self.on_tokens, self.version = waiter, clock, on_tokens, 0
        self._tried: dict[str, int] = {}  # the version at which something was last tried
        self._hold_s = math.inf  # when a run is due that was held back
        self._drains = False  # nothing is sent until cells are freed
        self._active: dict[int, ActiveRequest] = {}
        self._senders = RoundRobin[ActiveRequest]()  # open requests that may have something unsent
        self._emissions: list[Emission] = []
        self.batches = BatchPlanner(target, run_cost, clock, self._active, max_delay_s)
        self._pacer = self.batches.pacer
        self.speculator = Speculator(
            drafter, drafts, clock, self._active, lambda: self.version, self._senders.add, draft_s
        )
        self.admission = Admission(self.levels, self.speculator, self._active, run_cost, limits)

    # -- requests

    def add(self, request: Request, policy: Policy, observer: Observer | None = None) -> None:
        """Take a request in; the observer is told what happens to it."""
        context = PolicyContext(request, self.target, self.speculator, self.batches, self.clock)
        active = ActiveRequest(request, policy, observer or Observer(), context)
        active.observer.submitted(self.clock(), len(request.prompt))
        self.admission.wait(active)
        self.version += 1
        self._admit()

    def stop(self, request: Request, reason: Finish = Finish.STOPPED) -> None:
        """End a request now. What it emitted stays."""
        self.version += 1
        request.finish = request.finish or reason
        if request.id in self._active:
            self._close(self._active[request.id])
        elif active := self.admission.withdraw(request):
            active.observer.finished(self.clock())

    def forget(self) -> None:
        """Free all that finished requests have retained."""
        while self.admission.forget_oldest():
            pass

    def _admit(self) -> bool:
        """Open the waiting requests that there is room for; whether there was one."""
        n_waiting = len(self.admission.waiting)
        if not n_waiting or not self._is_new("open"):
            return False
        for active in self.admission.ready():
            self._open(active)
        return len(self.admission.waiting) < n_waiting

    def _open(self, active: ActiveRequest) -> None:
        request, prefix = active.request, active.request.prefix_hit
        if prefix:
            self.admission.prefixes.take(prefix)
        for level in self.levels:
            level.open(request)
            # attention looks at all cells from the first to the last in use; packing moves the committed ones
            if not self._active and level.pool.can_compact and level.pool.n_parked > level.pool.n_committed:
                level.pool.compact()
        self.speculator.open(request)
        request.prefix_hit = None  # it would keep the source alive, and that one's source
        active.n_heard = prefix.n_tokens if prefix else 0
        if not active.was_open:
            active.observer.opened(active.n_heard)
        active.was_open = True
        self._active[request.id] = active
        self._senders.add(active)
        self.speculator.add(active)

    @property
    def busy(self) -> bool:
        """Whether a request is open or waits, a run is in flight, or new tokens have not been handed out."""
        has_requests = bool(self._active or self.admission.waiting)
        return has_requests or bool(self._emissions) or any(level.busy for level in self.levels)

    def complete(self) -> None:
        """Step until all requests have finished and nothing is in flight."""
        while self.busy:
            self.step()

    # -- the loop

    def step(self) -> None:
        """Do the first thing that can be done, or wait; then hand out new tokens."""
        version = self.version
        if not (self._emissions or self._react() or self._draft()) and self.version == version:
            self._wait()
        self._hand_out()

    def _is_new(self, action: str) -> bool:
        """Whether an event came since the action was last tried, which is noted."""
        if self._tried.get(action) == self.version:
            return False
        self._tried[action] = self.version
        return True

    def _react(self) -> bool:
        """Do the first thing that does not take this rank's time."""
        reacted = self._hear() or self._admit() or self._send() or self._ask()
        self.version += reacted
        return reacted

    def _draft(self) -> bool:
        """Do a draft step, and between its layers whatever can be done."""
        drafted = self._is_new("draft") and self.speculator.draft(self._meanwhile)
        self.version += drafted
        return drafted

    def _meanwhile(self) -> None:
        while self._react() or self._hand_out():
            pass

    def listen(self) -> None:
        """Hear verdicts and ask drafts; called between the layers of a stage on this rank, where nothing is sent."""
        while self._hear() or self._ask() or self._hand_out():
            self.version += 1

    def _ask(self) -> bool:
        return self._is_new("ask") and self.speculator.ask()

    def _wait(self) -> None:
        timeout_s = self.timeout_s()
        if timeout_s is None and self._active and not (self.target.busy or any(level.busy for level in self.levels)):
            stalled = next(iter(self._active.values()))
            raise RuntimeError(
                f"request {stalled.request.id} waits for ever: {stalled.policy.name} neither sends nor drafts for it, "
                "and nothing is in flight"
            )
        self.waiter.wait([level.pipeline for level in self.levels], timeout_s)
        self.version += 1

    def timeout_s(self) -> float | None:
        """Seconds until a run is due that was held back; None if there is none."""
        return None if self._hold_s == math.inf else max(0.0, self._hold_s - self.clock())

    def _hear(self) -> bool:
        return self._settle_next() or self.speculator.hear()

    def _hand_out(self) -> bool:
        """Hand out the new tokens of settled runs. Returns whether requests were added or stopped thereby."""
        if not self._emissions:
            return False
        version, emissions, self._emissions = self.version, self._emissions, []
        self.on_tokens(emissions)
        return self.version != version

    # -- verdicts

    def _settle_next(self) -> bool:
        """Take in the target's next verdict, if one has come."""
        if (answered := self.target.poll()) is None:
            return False
        (flight, verdict), stored = answered, self.admission.stored
        if stored and stored.hear(flight, verdict):
            return True
        left_s = sum([flight.cost_s for flight in self.target.useful_flights]) if self.target.busy else 0.0
        now_s = self._pacer.landed(flight, verdict.slowest_s, left_s)
        for part in flight.parts:
            active = self._active[part.request.id]
            if verdict.cancelled:
                active.observer.run_spared()
                continue
            active.observer.run_answered(verdict.slowest_s)
            if part.n_context and not part.request.n_generated:
                active.n_heard += part.n_context
                active.observer.prompt_evaluated(active.n_heard)
            if part.scored:
                part.note_scores(verdict.tokens)
            if verdict.features is not None:
                self.speculator.read(part, verdict.features)
            tree = part.request.tree
            tree.answer(part.nodes, verdict.tokens, part.first)
            if tree.root.verdict is not None:
                self._take(active, tree.settle(), now_s)
        return True

    def _take(self, active: ActiveRequest, settled: Settled, now_s: float) -> None:
        """Emit what was settled; free and cancel what was refuted."""
        request = active.request
        self._senders.add(active)  # the new root may be unsent
        tokens = request.take(settled.tokens)
        self._emissions.append(Emission(request, tokens))
        active.observer.settled(now_s, len(tokens), settled)
        for level in self.levels:
            self._note_dead(level, level.settle(request, settled.path, active.policy.prunes))
        if self.speculator.n_drafts:
            self.speculator.settle(request, settled.path)
        if notice := active.policy.settled(settled, active.context):
            active.observer.noticed(notice)
        if request.finish:
            self._close(active)
        else:
            self.speculator.look_up(active)

    def _close(self, active: ActiveRequest) -> None:
        request = active.request
        active.observer.finished(self.clock())
        request.n_retained = self.admission.prefixes.n_to_retain(request, self.target.n_settled(request))
        self._release(active)
        if request.n_retained:
            self.admission.retain(request)

    def _preempt(self, active: ActiveRequest) -> None:
        """Give its cells to others. It waits, and its text is evaluated again in the same blocks."""
        self._release(active)
        active.observer.preempted()
        self.admission.wait(active)

    def _release(self, active: ActiveRequest) -> None:
        self.admission.closes(active.request)
        for level in self.levels:
            self._note_dead(level, level.close(active.request))
        del self._active[active.request.id]
        self._senders.discard(active)
        self.speculator.close(active)

    def _note_dead(self, level: Level, flights: Sequence[InFlightRun]) -> None:
        if level is not self.target or not flights:  # runs of drafts are not paced
            return
        self._pacer.given_up()
        for part in [part for flight in flights if flight.cancelled for part in flight.parts]:
            if active := self._active.get(part.request.id):
                active.observer.run_cancelled()

    # -- sending

    def _send(self) -> bool:
        """Send the next run to the target, if one should go now."""
        is_due = self._hold_s < math.inf and self.clock() >= self._hold_s
        return (self._is_new("send") or is_due) and self._send_next()

    def _send_next(self) -> bool:
        if self._hold_s < math.inf and (late_s := self.clock() - self._hold_s) >= 0:
            self._pacer.asked_late(late_s)
        self._hold_s = math.inf
        if not self._senders or (self._drains and not self._drain()):
            return False
        alone = len(self._active) == 1
        if not alone and self.clock() < (due_s := self._pacer.due_s(0)):
            self._hold_s = due_s
            return False
        wants = [part for active in self._senders if (part := self._next_slice(active))]
        chosen = self.batches.choose(wants, alone) if wants else []
        return bool(chosen) and self._submit(chosen)

    def _next_slice(self, active: ActiveRequest) -> RequestSlice | None:
        request, root, target = active.request, active.request.tree.root, self.target
        if n_left := target.n_context_left(request):
            if target.n_inflight(request) <= 2 * target.pipeline.n_stages:
                n_context, span = target.next_context(request, self.batches.n_chunk(root.position - n_left))
                is_last = not span and n_context == n_left and not self.admission.is_awaited(request)
                return RequestSlice(request, n_context, [root] * is_last, is_last, span, scored=request.is_scored)
        elif root.run_id is None and 1 < len(request.prompt) == root.position + 1:
            if not (target.n_inflight(request) and self.admission.is_awaited(request)):
                return RequestSlice(request, 0, [root], True)  # right behind the prompt
        else:
            answer = active.policy.send(active.context)
            if nodes := answer.nodes if isinstance(answer, Send) else self._held_back(active, answer):
                return RequestSlice(request, 0, nodes, nodes[0] is root)
        return None

    def _held_back(self, active: ActiveRequest, answer: HoldUntil | AwaitDraft) -> Sequence[Node]:
        """Note what its policy waits for. Returns the root if it would wait in vain."""
        root = active.request.tree.root
        if isinstance(answer, HoldUntil):
            self._hold_s = min(self._hold_s, answer.when_s)
        elif not self.speculator.prefer(active) and root.run_id is None and not self.target.n_inflight(active.request):
            return [root]
        return ()

    def _submit(self, parts: Sequence[RequestSlice]) -> bool:
        flight = self.target.submit(parts)
        sent = flight.parts if flight else []
        if len(sent) < len(parts):  # guesses may be left out for want of cells, committed tokens may not
            n_lacking = sum(max(1, part.n_rows) for part in parts if part.committed and part not in sent)
            self._drains = n_lacking > (0 if self.target.pool.n_parked else self.target.pool.n_free_cells)
        if flight is None:  # no run will come back that frees cells: free them now
            return self._drains and not self.target.pool.has_nodes and self._send_next()
        self._pacer.sent(flight)
        self.admission.sent(flight)
        for part in sent:
            self._note_sent(self._active[part.request.id], part, flight)
        return True

    def _note_sent(self, active: ActiveRequest, part: RequestSlice, flight: InFlightRun) -> None:
        for node in part.nodes:
            node.run_id = flight.run_id
        n_nodes, n_inflight = len(part.nodes), self.target.n_inflight(active.request)
        active.observer.run_sent(flight.sent_s, part.n_rows, n_nodes, part.has_root, part.n_branches, n_inflight)
        if part.has_root and len(active.request.tree.nodes) == n_nodes:
            self._senders.discard(active)  # nothing is left to send before a verdict or a guess
        else:
            self._senders.rotate(active)

    def _drain(self) -> bool:
        """Once no node is in flight, free cells: parked ones, then the youngest requests'. Whether that was done."""
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
