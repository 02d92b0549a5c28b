"""A pipeline in virtual time: the same runs, order and cancellations, with modelled durations. Deterministic. As on
ranks (`cluster/stages/serve.py`), a stage takes runs in order and checks for cancellation before a run and between
layers; cancelled runs go on without activations. Nothing here sleeps, computes a model or imports MPI."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.verdicts import verdict_bytes
from pipeinfer.cluster.wire import activation_bytes, bytes_before_activations
from pipeinfer.core.runs import Run, Verdict
from pipeinfer.core.types import NO_TOKEN
from pipeinfer.observe.trace import HeadLedger, StageLedger
from pipeinfer.virtual.choices import Choices
from pipeinfer.virtual.costs import LinkCost, ModelCost, Profile

NEVER = math.inf


class VirtualClock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True, eq=False)
class _Flight:
    """A run on its way through the stages."""

    run_id: int
    n_rows: int
    n_wanted: int
    n_before: int  # as in Run
    bare_bytes: int
    full_bytes: int
    tokens: tuple[int, ...]
    begins: bool = False  # it carries the first blocks of a prompt
    pruned: list[tuple[float, set[int]]] = field(default_factory=list)  # when stages hear of dead rows, and these
    slowest_s: float = 0.0  # of the stages that evaluated it
    cancelled: bool = False  # a stage has noticed
    cancel_s: float = NEVER  # when the cancellation is at the stages
    answered_s: float = NEVER  # when its verdict is at the head
    known_s: float = 0.0  # when its rows came to the first stage
    n_dropped: int = 0

    def leave_out(self, now_s: float) -> None:
        """Leave out dead rows in the stage that begins now and in those after it."""
        dead = {row for arrival_s, rows in self.pruned if arrival_s <= now_s for row in rows}
        self.n_rows, self.n_dropped = self.n_rows + self.n_dropped - len(dead), len(dead)


@dataclass(slots=True)
class _Hop:
    """A link in one direction; messages are sent one after the other."""

    cost: LinkCost
    free_s: float = 0.0
    n_messages: int = 0
    n_bytes: int = 0

    def arrival(self, now_s: float, n_bytes: int) -> float:
        self.n_messages += 1
        self.n_bytes += n_bytes
        self.free_s = max(now_s, self.free_s) + self.cost.transfer_s(n_bytes)
        return self.free_s + self.cost.latency_s


@dataclass(slots=True)
class SimStage:
    """The state of a rank that evaluates."""

    cost: ModelCost
    out: _Hop
    queue: deque[_Flight] = field(default_factory=deque)
    current: _Flight | None = None
    start_s: float = 0.0
    idle_since_s: float = 0.0
    last_wait_s: float = 0.0
    n_rows_before: int = 0
    layers_s: float = 0.0  # when the layers of the current run begin
    slowdown: float = 1.0  # of the current run by other ranks of the host
    unsent: _Flight | None = None  # waits until the next stage is ready to receive it
    receives: bool = False  # an unexpected run is being sent to it
    samplers_free_s: float = 0.0
    begun_s: float = 0.0  # when the evaluation of the current run began
    evaluated_s: float = 0.0  # sum of the evaluations of runs that count
    version: int = 0  # of the end of the current run: a cancellation moves it
    ledger: StageLedger = field(default_factory=StageLedger)
    n_skipped: int = 0
    n_stopped: int = 0


class SimWaiter:
    """Moves the clock to the next event."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._last_s = 0.0  # the last wait

    def wait(self, pipelines: "Sequence[SimPipeline]", timeout_s: float | None = None) -> None:
        """Raises RuntimeError if nothing is in flight: the engine would wait for ever."""
        target, now_s = pipelines[0], self.clock.now
        until_s = soonest_s(pipelines, NEVER if timeout_s is None else now_s + timeout_s)
        if until_s == NEVER:
            raise RuntimeError("the engine waits, but nothing is in flight")
        if until_s > now_s:
            until_s += target.late_s(until_s - now_s, self._last_s)
            self._last_s = until_s - now_s
            target.ledger.waits.append((now_s, until_s))
            self.clock.now = until_s


def soonest_s(pipelines: "Sequence[SimPipeline]", end_s: float) -> float:
    """The time of the next verdict at the head, or `end_s` if that is earlier. The head must do nothing until then."""
    for pipeline in reversed(pipelines):
        end_s = pipeline.next_verdict_s(end_s)
    return end_s


class SimPipeline:
    """The Pipeline of a `Profile` on a virtual clock. `choices`: by request id."""

    def __init__(self, profile: Profile, choices: Sequence[Choices], clock: VirtualClock) -> None:
        self.profile, self.choices, self.clock = profile, choices, clock
        self.n_stages = profile.n_stages
        self.is_at_head = profile.head_is_first and self.n_stages == 1
        near = LinkCost(0.0, math.inf)
        self.first_hop = _Hop(near if profile.head_is_first else profile.link)
        self.stages = [SimStage(cost, _Hop(near if self.is_at_head else profile.link)) for cost in profile.stages]
        self.ledger = HeadLedger()
        self._idle = Idle() if profile.sleeps else None
        self.drafting = False  # the head computes
        self.neighbours: tuple[SimPipeline, ...] = (self,)  # of the target and the larger drafts: they may share hosts
        self._flying: dict[int, _Flight] = {}
        # (time, tie breaker, stage, run, version): without a version it arrives there, else its evaluation ends
        self._events: list[tuple[float, int, int, _Flight, int | None]] = []
        self._n_events = 0
        self._verdicts: deque[_Flight] = deque()

    # -- the Pipeline protocol

    def submit(self, run: Run) -> None:
        self.ledger.submitted_s[run.id] = self.clock.now
        self.clock.advance(self.profile.head.run_s)
        n_extra = sum(len(row.seqs) - 1 for row in run.rows)
        bare_bytes = bytes_before_activations(len(run.ops), len(run.rows), n_extra, len(run.opens))
        full_bytes = bare_bytes + activation_bytes(len(run.rows), self.profile.n_embd, self.profile.wire_type)
        tokens = tuple(
            self.choices[row.request].target(row.position + 1) if row.n_wanted else NO_TOKEN for row in run.rows
        )
        n_wanted = sum(row.n_wanted > 0 for row in run.rows)
        flight = _Flight(
            run.id, len(run.rows), n_wanted, run.n_before, bare_bytes, full_bytes, tokens, run.begins_blocks
        )
        self._flying[run.id] = flight
        self._schedule(self.first_hop.arrival(self.clock.now, bare_bytes), 0, flight, None)

    def poll(self) -> Verdict | None:
        flight = self._next_verdict(self.clock.now)
        if flight is None:
            return None
        self._verdicts.popleft()
        del self._flying[flight.run_id]
        self.clock.advance(self.profile.head.verdict_s)
        return Verdict(flight.run_id, () if flight.cancelled else flight.tokens, flight.cancelled, flight.slowest_s)

    def cancel(self, run_ids: Sequence[int]) -> None:
        self.ledger.n_cancel_messages += self.profile.n_ranks - 1
        self.ledger.cancels.append((self.clock.now, len(run_ids)))
        # events up to now come first; then current runs are cut short
        self._run_until(self.clock.now)
        arrival_s = self.clock.now + self.profile.link.latency_s
        for run_id in run_ids:
            flight = self._flying[run_id]
            flight.cancel_s = min(flight.cancel_s, arrival_s)
            for index, stage in enumerate(self.stages):
                if stage.current is flight and not flight.cancelled:
                    self._cut_short(index, stage, flight)

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        self.ledger.n_cancel_messages += self.profile.n_ranks - 1
        self._run_until(self.clock.now)
        arrival_s = self.clock.now + self.profile.link.latency_s
        for run_id, dead in rows.items():
            self._flying[run_id].pruned.append((arrival_s, set(dead)))

    def next_verdict_s(self, end_s: float) -> float:
        """The time of the oldest verdict at the head; `end_s` if there is none by then."""
        flight = self._next_verdict(end_s)
        return min(end_s, flight.answered_s) if flight else end_s

    def _next_verdict(self, end_s: float) -> _Flight | None:
        """The oldest verdict at the head by `end_s`."""
        if not self._verdicts:
            self._run_until(end_s)
        return self._verdicts[0] if self._verdicts and self._verdicts[0].answered_s <= end_s else None

    def slowdown_at(self, n_rows: int) -> float:
        """The slowdown of a run that begins now by other ranks that compute on its host."""
        return self.profile.slowdown_at(sum(each.n_busy() for each in self.neighbours), n_rows)

    def n_busy(self) -> int:
        return int(self.drafting) + sum(stage.current is not None for stage in self.stages)

    def late_s(self, waited_s: float, last_s: float) -> float:
        """The mean delay of a rank that sleeps between polls: half a sleep. `last_s`: the wait before."""
        return 0.5 * self._idle.pause_s(waited_s, last_s) if self._idle else 0.0

    # -- events

    def _schedule(self, when_s: float, stage: int, flight: _Flight, version: int | None) -> None:
        self._n_events += 1
        heappush(self._events, (when_s, self._n_events, stage, flight, version))

    def _run_until(self, end_s: float) -> None:
        """Process events up to `end_s`, or up to the next verdict if that comes first."""
        events = self._events
        while events and events[0][0] <= end_s and not self._verdicts:
            when_s, _, index, flight, version = heappop(events)
            if index == self.n_stages:
                flight.answered_s = when_s
                self.ledger.verdicts.append((when_s, flight.run_id))
                self._verdicts.append(flight)
                continue
            stage = self.stages[index]
            if version is None:
                flight.known_s = flight.known_s if index else when_s
                stage.queue.append(flight)
                stage.receives = False
                if stage.current is None and stage.unsent is None:
                    self._start(index, stage, when_s)
            elif stage.current is flight and version == stage.version:
                self._finish(index, stage, flight, when_s)

    def _start(self, index: int, stage: SimStage, now_s: float) -> None:
        flight = stage.current = stage.queue.popleft()
        now_s += self.late_s(now_s - stage.idle_since_s, stage.last_wait_s)
        stage.start_s, stage.last_wait_s = now_s, now_s - stage.idle_since_s
        stage.version += 1
        if flight.cancelled or flight.cancel_s <= now_s:
            flight.cancelled = True
            stage.n_skipped += 1
            end_s = now_s + stage.cost.run_s
        else:
            flight.leave_out(now_s)
            now_s = self._prepared_s(flight, now_s)
            stage.slowdown = self.slowdown_at(flight.n_rows)
            reshapes, stage.n_rows_before = flight.n_rows != stage.n_rows_before, flight.n_rows
            rested = now_s > stage.idle_since_s
            stage.layers_s = now_s + stage.slowdown * stage.cost.before_layers_s(reshapes, rested, flight.begins)
            took_s = stage.cost.seconds(flight.n_rows, flight.n_before, reshapes, rested, flight.begins)
            stage.begun_s = now_s
            end_s = now_s + stage.slowdown * took_s + self._sampling_s(index, flight)
        self._schedule(end_s, index, flight, stage.version)
        if flight.cancel_s < end_s:
            self._cut_short(index, stage, flight)

    def _cut_short(self, index: int, stage: SimStage, flight: _Flight) -> None:
        """Stop the run after the layer in which the cancellation arrives, if work is left then."""
        cost = stage.cost
        layer_s = stage.slowdown * cost.layer_s(flight.n_rows, flight.n_before)
        n_layers = max(1, math.ceil((flight.cancel_s - stage.layers_s) / layer_s)) if layer_s else cost.layers
        if not flight.cancelled and n_layers <= cost.n_stops:
            flight.cancelled = True
            stage.n_stopped += 1
            stage.version += 1
            self._schedule(stage.layers_s + n_layers * layer_s, index, flight, stage.version)

    def _finish(self, index: int, stage: SimStage, flight: _Flight, now_s: float) -> None:
        stage.ledger.note(flight.run_id, stage.idle_since_s, stage.start_s, now_s, flight.cancelled)
        flight.slowest_s = max(flight.slowest_s, now_s - stage.start_s)
        if not flight.cancelled:
            stage.evaluated_s += now_s - stage.begun_s - self._sampling_s(index, flight)
        stage.current, stage.idle_since_s = None, now_s
        if index + 1 < self.n_stages and not self.profile.host.posted:
            stage.unsent = flight
            self._meet(index, now_s)
            return
        sent_s = self._sampled_s(stage, flight, now_s) if index + 1 == self.n_stages else now_s
        self._pass_on(index, stage, flight, sent_s)
        self._go_on(index, stage, now_s)

    def _pass_on(self, index: int, stage: SimStage, flight: _Flight, now_s: float) -> None:
        """Send the run to the next stage, or its verdict to the head."""
        if index + 1 == self.n_stages:
            n_bytes = verdict_bytes(0 if flight.cancelled else flight.n_rows)
        else:
            n_bytes = flight.bare_bytes if flight.cancelled else flight.full_bytes
        self._schedule(stage.out.arrival(now_s, n_bytes), index + 1, flight, None)

    def _go_on(self, index: int, stage: SimStage, now_s: float) -> None:
        """Begin the next run, or receive the one that the stage before holds."""
        if stage.queue:
            self._start(index, stage, now_s)
        elif index and not self.profile.host.posted:
            self._meet(index - 1, now_s)

    # -- work of the hosts

    def _prepared_s(self, flight: _Flight, now_s: float) -> float:
        """When a free stage can begin to evaluate. `ahead`: all stages prepare a run's input as soon as its rows are
        known, while they evaluate others (SiPipe, section 5.2)."""
        host = self.profile.host
        before_s = host.before_s(flight.n_rows)
        return max(now_s, flight.known_s + before_s) if host.ahead else now_s + before_s

    def _sampling_s(self, index: int, flight: _Flight) -> float:
        """Seconds that the last stage samples itself."""
        host = self.profile.host
        return host.sample_s * flight.n_wanted if index + 1 == self.n_stages and not host.samplers else 0.0

    def _sampled_s(self, stage: SimStage, flight: _Flight, now_s: float) -> float:
        """The time when all tokens are sampled; samplers share a run's rows."""
        host = self.profile.host
        if not host.samplers or flight.cancelled:
            return now_s
        share = -(-flight.n_wanted // host.samplers)
        stage.samplers_free_s = max(stage.samplers_free_s, now_s) + host.sample_s * share
        return stage.samplers_free_s

    def _meet(self, index: int, now_s: float) -> None:
        """Send an unexpected run once the next stage is ready to receive it. That stage waits for its arrival, and this
        one goes on (SiPipe, sections 3.1 and 7.5)."""
        stage, following = self.stages[index], self.stages[index + 1]
        if stage.unsent is None or following.current or following.unsent or following.receives:
            return
        following.receives, flight, stage.unsent = True, stage.unsent, None
        self._pass_on(index, stage, flight, now_s + self.profile.host.meet_s)
        self._go_on(index, stage, now_s)
