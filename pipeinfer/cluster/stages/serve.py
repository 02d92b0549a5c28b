"""A stage's end of a pipeline: receive a run, evaluate it, send it on; receive prunings from the head. Knows ranks and
messages; the evaluation itself is in `stage`."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeinfer.cluster.idle import NO_PROGRESS, Idle, Progress
from pipeinfer.cluster.stages.pace import REAL_CLOCK, Courier, JobClock
from pipeinfer.cluster.stages.runs import LocalPrunings, PendingRun, Samplers
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import NOT_SENT, Comm, Inbox, MpiRequest, Outbox, Tag
from pipeinfer.cluster.verdicts import encode_verdict
from pipeinfer.cluster.watch.protocol import Flow
from pipeinfer.cluster.wire import (
    ALL_ROWS,
    N_PRUNINGS_BYTES,
    Kind,
    Transaction,
    WireType,
    activation_bytes,
    bytes_before_activations,
    decode_prunings,
    feature_bytes,
)
from pipeinfer.core.interfaces import DeviceStage
from pipeinfer.core.runs import MAX_OPS
from pipeinfer.observe.trace import StageLedger

N_EXTRA_MAX, N_OPENS_MAX = 8192, 256  # limits of a transaction, far above what 256 sequences need
N_TEXT_MAX = 1 << 20  # limit of `wire.text_bytes` of all open requests together
N_UNDER_WAY = 2  # runs that an AsyncStage may compute: while it computes one, the next is prepared
N_POSTED = 2  # receives of runs that are posted ahead


class RemotePrunings(LocalPrunings):
    """Pruned by the head's messages."""

    def __init__(self, comm: Comm, courier: Courier | None, listen: Callable[[], object]) -> None:
        super().__init__(listen)
        self._inbox = Inbox(comm, 0, Tag.CANCEL, N_PRUNINGS_BYTES, courier=courier)
        self._ended = False

    def is_cancelled(self, run_id: int) -> bool:
        self._receive(run_id)
        return super().is_cancelled(run_id)

    def rows(self, run_id: int) -> Sequence[int]:
        self._receive(run_id)
        return super().rows(run_id)

    def _receive(self, run_id: int) -> None:
        while (message := self._inbox.poll()) is not None:
            self.forget_before(run_id)
            rows = decode_prunings(message)
            self._inbox.give_back(message)
            self._ended = not rows
            for dead in rows:
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
    clock                 of the job's times"""

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
    clock: JobClock = REAL_CLOCK

    @property
    def is_last(self) -> bool:
        return self.following is None

    @property
    def n_bytes(self) -> int:
        """Of a message at most."""
        bare = bytes_before_activations(MAX_OPS, self.n_rows, N_EXTRA_MAX, N_OPENS_MAX, N_TEXT_MAX)
        features = feature_bytes(self.n_rows, self.n_embd, self.n_features)
        return bare + features + activation_bytes(self.n_rows, self.n_embd, self.wire_type)


class RunInbox:
    """Receives runs, whose activations are in the same message or, from a device, in a second one."""

    def __init__(self, comm: Comm, pipe: Pipe, worker: StageWorker | None) -> None:
        self._pipe = pipe
        self._out_of_band: Inbox | None = None
        self._inbox = Inbox(comm, pipe.previous, Tag.PIPELINE, pipe.n_bytes, pipe.n_posted, pipe.courier)
        self._waiting: Transaction | None = None  # for its activations
        if worker and pipe.comes_out_of_band:
            assert isinstance(worker.model, DeviceStage), "activations out of band need a device"
            self._model, n_bytes = worker.model, activation_bytes(pipe.n_rows, pipe.n_embd, pipe.wire_type)
            allocate = worker.model.device_memory
            self._out_of_band = Inbox(comm, pipe.previous, Tag.OUT_OF_BAND, n_bytes, pipe.n_posted, allocate=allocate)

    def poll(self) -> Transaction | None:
        """The next run, if it is complete, in memory that is the caller's until it is given back."""
        if self._waiting is None:
            buffer = self._inbox.poll()
            if buffer is None:
                return None
            self._waiting = Transaction(buffer, self._pipe.n_embd, self._pipe.wire_type)
        transaction = self._waiting
        if transaction.comes_out_of_band:
            assert self._out_of_band, "activations out of band need memory for them"
            memory = self._out_of_band.poll()
            if memory is None:
                return None
            is_rounded = self._pipe.wire_type is not WireType.F32
            transaction.received_memory = memory
            transaction.out_of_band = self._model.device_rows(memory, transaction.n_rows, is_rounded)
        self._waiting = None
        return transaction

    def holds(self) -> bool:
        """Whether a run has come, or its first message."""
        return self._waiting is not None or self._inbox.holds()

    def give_back(self, transaction: Transaction, sent: MpiRequest = NOT_SENT) -> None:
        """Reuse the run's memory, once its message, if that is being sent on, is sent."""
        self._inbox.give_back(transaction.buffer, sent)
        if self._out_of_band and transaction.received_memory is not None:
            self._out_of_band.give_back(transaction.received_memory)

    def close(self, idle: Idle) -> None:
        """Cancel the receives that are still posted."""
        for inbox in filter(None, (self._inbox, self._out_of_band)):
            inbox.close(idle)


@dataclass(eq=False)
class StageLoop:
    """Receive runs, evaluate them and send them on, until the shutdown, which is sent on too.

    worker    None if its model did not load; then the rank waits for the shutdown
    report    called on the order to report, with the messages and the ledger since the last report
    since_s   when the first wait began; None: now
    flow      this rank's, for the watch
    progress  moves messages during evaluation"""

    comm: Comm
    pipe: Pipe
    worker: StageWorker | None
    report: Callable[[Outbox, StageLedger], None]
    since_s: float | None = None
    flow: Flow = field(default_factory=Flow)
    progress: Progress = NO_PROGRESS

    def __post_init__(self) -> None:
        comm, pipe = self.comm, self.pipe
        self.flow.source, self.flow.dest = pipe.previous, -1 if pipe.following is None else pipe.following
        self._inbox = RunInbox(comm, pipe, self.worker)
        self._outbox, self._idle, self._ledger = Outbox(comm, pipe.courier), Idle(), StageLedger()
        self._under_way: deque[tuple[PendingRun, float]] = deque()
        self._samplers: Samplers | None = None
        if pipe.n_samplers and pipe.is_last:
            self._samplers = Samplers(pipe.n_samplers, lambda: bool(self._under_way) or self._inbox.holds())
        self._prunings = RemotePrunings(comm, pipe.courier, self._answer)
        self._wait_s = pipe.clock() if self.since_s is None else self.since_s

    def run(self) -> None:
        while True:
            transaction = self._run_or_result() if self._under_way else self._wait()
            if transaction is None:
                self._finish_oldest()
                continue
            self.flow.n_taken += 1
            start_s = self.pipe.clock()
            if transaction.kind is Kind.RUN:
                self._begin(transaction, start_s)
            elif self._obey(transaction, start_s):
                break
        self._close()

    def _answer(self) -> None:
        """Send the verdicts that samplers have completed."""
        while self._samplers and (verdict := self._samplers.ready()) is not None:
            self._outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)

    def _next_run(self) -> Transaction | None:
        self._answer()
        return self._inbox.poll()

    def _run_or_result(self) -> Transaction | None:
        """The next run, or None once the oldest that is under way is done, whichever comes first: a device must not
        idle because this rank waits for a result only."""

        def look() -> tuple[Transaction | None] | None:
            transaction = self._next_run()
            return (transaction,) if transaction or self._under_way[0][0].is_done else None

        return self._idle.until(look)[0]

    def _wait(self) -> Transaction:
        self.flow.waits = True
        transaction = self._idle.until(self._next_run)
        self.flow.waits = False
        return transaction

    def _begin(self, transaction: Transaction, start_s: float) -> None:
        assert self.worker, "a run arrived at a rank whose model did not load"
        with self.progress.beside(transaction.n_bytes_full):
            pending = self.worker.begin(transaction, self._prunings)
        self._under_way.append((pending, start_s))
        if len(self._under_way) == self.pipe.n_under_way or self._under_way[0][0].is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest result and send it on; verdicts of samplers are sent meanwhile."""
        assert self.worker
        pending, start_s = self._under_way.popleft()

        def is_done() -> bool | None:
            self._answer()
            return pending.is_done or None

        self._idle.until(is_done)
        verdict, transaction = self.worker.finish(pending, self._samplers), pending.transaction
        end_s = self.pipe.clock()  # before the send: the receiver may be quicker than this rank
        if self.pipe.following is not None:
            sent = self._outbox.send_run(transaction.message, self.pipe.following, transaction.out_of_band_memory)
            self._inbox.give_back(transaction, sent)
            self.flow.n_passed += 1
        else:
            assert verdict or self._samplers, "the last stage has no verdict"
            if verdict:
                self._outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)
            self._inbox.give_back(transaction)
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
        self._ledger, self._wait_s = StageLedger(), self.pipe.clock()
        return False

    def _close(self) -> None:
        if self._samplers:
            self._samplers.close()
            self._answer()
        self.flow.waits = True
        self._outbox.flush(self._idle)
        self._inbox.close(self._idle)
        self._prunings.close(self._idle)
