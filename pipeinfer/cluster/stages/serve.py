"""A stage's end of a pipeline: receive a run, evaluate it, send it on; receive prunings from the head.

Knows ranks and messages; the evaluation itself is in `stage`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.messages.activations import WireType, activation_bytes
from pipeinfer.cluster.messages.verdicts import encode_verdict
from pipeinfer.cluster.messages.wire import (
    ALL_ROWS,
    N_PRUNINGS_BYTES,
    Kind,
    Transaction,
    bytes_before_activations,
    decode_prunings,
    feature_bytes,
)
from pipeinfer.cluster.stages.pace import Courier
from pipeinfer.cluster.stages.pending_run import PendingRun
from pipeinfer.cluster.stages.progress import NO_PROGRESS, Progress
from pipeinfer.cluster.stages.prunings import LocalPrunings
from pipeinfer.cluster.stages.run_inbox import Arrival, RunInbox
from pipeinfer.cluster.stages.samplers import Samplers
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import Comm, Inbox, Outbox, Tag
from pipeinfer.cluster.watch.flow import Flow
from pipeinfer.core.interfaces import DeviceStage
from pipeinfer.core.runs import MAX_OPS
from pipeinfer.observe.ledger import StageLedger

N_EXTRA_MAX, N_OPENS_MAX = 8192, 256  # limits of a transaction, far above what 256 sequences need
N_TEXT_MAX = 1 << 20
"""Limit of `wire.text_bytes` of all open requests together."""

N_UNDER_WAY = 2
"""Runs that an AsyncStage may have begun: while it computes one, the next is prepared."""

N_POSTED = 2
"""Receives of runs that are posted ahead."""


class HeardPrunings(LocalPrunings):
    """Pruned, told by the head's messages."""

    def __init__(self, comm: Comm, courier: Courier | None, listen: Callable[[], object]) -> None:
        super().__init__(listen)
        self._inbox = Inbox(comm, 0, Tag.CANCEL, N_PRUNINGS_BYTES, courier=courier)
        self._ended = False

    def is_cancelled(self, run_id: int) -> bool:
        self._hear(run_id)
        return super().is_cancelled(run_id)

    def rows(self, run_id: int) -> Sequence[int]:
        self._hear(run_id)
        return super().rows(run_id)

    def _hear(self, run_id: int) -> None:
        while (message := self._inbox.poll()) is not None:
            self.forget_before(run_id)
            heard = decode_prunings(message)
            self._inbox.give_back(message)
            self._ended = not heard
            for dead in heard:
                if dead.row == ALL_ROWS:
                    self.cancel([dead.run_id])
                else:
                    self.prune({dead.run_id: [dead.row]})

    def close(self, idle: Idle) -> None:
        """Take every message of this pipeline: a late one must not cancel a run of the next."""
        idle.until(lambda: self.is_cancelled(0) or self._ended or None)
        self._inbox.close(idle)


@dataclass(frozen=True, slots=True)
class Pipe:
    """A stage's place in a pipeline, and the sizes of its messages.

    previous, following   ranks; None follows the last stage, which sends verdicts to the head
    n_rows                of a run, at most
    n_embd, wire_type     of the activations
    n_features            layers of all stages that drafts read
    comes_out_of_band     activations may come from another device's memory to that of this rank's model
    courier               in paced jobs
    n_samplers            threads that choose tokens on the last stage while it evaluates its next run
    n_under_way           runs that an AsyncStage may have begun, 1 or 2
    n_posted              receives of runs that are posted ahead
    """

    previous: int
    following: int | None
    n_rows: int
    n_embd: int
    wire_type: WireType = WireType.F32
    courier: Courier | None = None
    n_samplers: int = 0
    n_under_way: int = N_UNDER_WAY
    n_posted: int = N_POSTED
    comes_out_of_band: bool = False
    n_features: int = 0

    @property
    def is_last(self) -> bool:
        return self.following is None

    @property
    def n_bytes(self) -> int:
        """Of a message at most."""
        bare = bytes_before_activations(MAX_OPS, self.n_rows, N_EXTRA_MAX, N_OPENS_MAX, N_TEXT_MAX)
        features = feature_bytes(self.n_rows, self.n_embd, self.n_features)
        return bare + features + activation_bytes(self.n_rows, self.n_embd, self.wire_type)


def _run_inbox(comm: Comm, pipe: Pipe, worker: StageWorker | None) -> RunInbox:
    inbox = Inbox(comm, pipe.previous, Tag.PIPELINE, pipe.n_bytes, pipe.n_posted, pipe.courier)
    if not (worker and pipe.comes_out_of_band):
        return RunInbox(inbox, pipe.n_embd, pipe.wire_type)
    model, rounded = worker.model, pipe.wire_type is not WireType.F32
    assert isinstance(model, DeviceStage), "activations out of band need a device"
    n_bytes = activation_bytes(pipe.n_rows, pipe.n_embd, pipe.wire_type)
    out_of_band = Inbox(comm, pipe.previous, Tag.OUT_OF_BAND, n_bytes, pipe.n_posted, allocate=model.device_memory)
    return RunInbox(inbox, pipe.n_embd, pipe.wire_type, out_of_band, partial(model.device_rows, rounded=rounded))


class StageLoop:
    """Receive runs, evaluate them and send them on, until the shutdown, which is sent on too."""

    def __init__(
        self, comm: Comm, pipe: Pipe, worker: StageWorker | None, report: Callable[[Outbox, StageLedger], None],
        since_s: float | None = None, flow: Flow | None = None, progress: Progress = NO_PROGRESS,
    ) -> None:  # fmt: skip
        """`worker`: None if its model did not load; then the rank waits for the shutdown. `report`: called on the order
        to report, with what was sent and how time was spent since the last report. `since_s`: when the first wait
        began; None: now. `flow`: this rank's, for the watch. `progress`: moves messages during evaluation."""
        self.pipe, self.worker, self.report, self.progress = pipe, worker, report, progress
        self.flow = flow or Flow()
        self.flow.source, self.flow.dest = pipe.previous, -1 if pipe.following is None else pipe.following
        self._inbox = _run_inbox(comm, pipe, worker)
        self._outbox, self._idle, self._ledger = Outbox(comm, pipe.courier), Idle(), StageLedger()
        self._under_way: deque[tuple[Arrival, PendingRun, float]] = deque()
        self._samplers: Samplers | None = None
        if pipe.n_samplers and pipe.is_last:
            self._samplers = Samplers(pipe.n_samplers, lambda: bool(self._under_way) or self._inbox.holds())
        self._prunings = HeardPrunings(comm, pipe.courier, self._answer)
        if worker:
            worker.pruned, worker.samplers = self._prunings, self._samplers
        self._wait_s = time.monotonic() if since_s is None else since_s

    def run(self) -> None:
        while True:
            arrival = self._run_or_result() if self._under_way else self._wait()
            if arrival is None:
                self._finish_oldest()
                continue
            self.flow.n_taken += 1
            start_s = time.monotonic()
            if arrival.transaction.kind is Kind.RUN:
                self._begin(arrival, start_s)
            elif self._obey(arrival.transaction, start_s):
                break
        self._close()

    def _answer(self) -> None:
        """Send the verdicts that samplers have completed."""
        while self._samplers and (verdict := self._samplers.ready()) is not None:
            self._outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)

    def _next_run(self) -> Arrival | None:
        self._answer()
        return self._inbox.poll()

    def _run_or_result(self) -> Arrival | None:
        """The next run, or None once the oldest that is under way is done, whichever comes first: a device must not
        idle because this rank waits for a result only."""

        def look() -> tuple[Arrival | None] | None:
            arrival = self._next_run()
            return (arrival,) if arrival or self._under_way[0][1].is_done else None

        return self._idle.until(look)[0]

    def _wait(self) -> Arrival:
        self.flow.waits = True
        arrival = self._idle.until(self._next_run)
        self.flow.waits = False
        return arrival

    def _begin(self, arrival: Arrival, start_s: float) -> None:
        assert self.worker, "a run arrived at a rank whose model did not load"
        with self.progress.beside(arrival.transaction.n_bytes_full):
            begun = self.worker.begin(arrival.transaction)
        self._under_way.append((arrival, begun, start_s))
        if len(self._under_way) == self.pipe.n_under_way or self._under_way[0][1].is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest result and send it on; verdicts of samplers are sent meanwhile."""
        assert self.worker
        arrival, begun, start_s = self._under_way.popleft()

        def is_done() -> bool | None:
            self._answer()
            return begun.is_done or None

        self._idle.until(is_done)
        verdict, transaction = self.worker.finish(begun), begun.transaction
        end_s = time.monotonic()  # before the send: the receiver may be quicker than this rank
        if self.pipe.following is not None:
            sent = self._outbox.send_run(transaction.message, self.pipe.following, transaction.out_of_band_memory)
            self._inbox.give_back(arrival, sent)
            self.flow.n_passed += 1
        else:
            assert verdict or self._samplers, "the last stage has no verdict"
            if verdict:
                self._outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)
            self._inbox.give_back(arrival)
        self._note(transaction.run_id, start_s, end_s, transaction.cancelled)

    def _note(self, run_id: int, start_s: float, end_s: float, was_cancelled: bool) -> None:
        self._ledger.note(run_id, self._wait_s, max(start_s, self._wait_s), end_s, was_cancelled)
        self._wait_s = end_s

    def _obey(self, order: Transaction, start_s: float) -> bool:
        """Send an order on, after all runs before it. True for the shutdown."""
        while self._under_way:
            self._finish_oldest()
        start_s = max(start_s, self._wait_s)
        self._note(0, start_s, start_s, False)
        if self.pipe.following is not None:
            self._outbox.send(order.message, self.pipe.following, Tag.PIPELINE)
            self.flow.n_passed += 1
        if order.kind is Kind.SHUTDOWN:
            return True
        self.report(self._outbox, self._ledger)
        self._ledger, self._wait_s = StageLedger(), time.monotonic()
        return False

    def _close(self) -> None:
        if self._samplers:
            self._samplers.close()
            self._answer()
        self.flow.waits = True
        self._outbox.flush(self._idle)
        self._inbox.close(self._idle)
        self._prunings.close(self._idle)
