"""The head's end of a pipeline: send runs and prunings, receive verdicts, wait. Knows ranks and messages; no trees."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pipeinfer.cluster.idle import NO_PROGRESS, Idle, Progress
from pipeinfer.cluster.stages.pace import REAL_CLOCK, Courier, JobClock
from pipeinfer.cluster.stages.runs import LocalPrunings
from pipeinfer.cluster.stages.stage import StageWorker, room_for
from pipeinfer.cluster.transport import Comm, Inbox, Outbox, Tag
from pipeinfer.cluster.wire import (
    Buffer,
    Kind,
    Transaction,
    WireType,
    encode,
    encode_last_prunings,
    encode_order,
    encode_prunings,
)
from pipeinfer.core.runs import GuessVerdict, Run, Verdict
from pipeinfer.errors import ModelFault, StopRequested, UserError
from pipeinfer.observe.trace import HeadLedger

A = TypeVar("A", Verdict, GuessVerdict)
N_POSTED = 4  # receives of verdicts that are posted ahead


@dataclass(eq=False)
class HeadPipeline(Generic[A]):
    """Rank 0's Pipeline to one level. If the head hosts the first stage, or the whole model, `work` evaluates the
    oldest run. `decode`: decodes a verdict's message; `n_bytes`: of a verdict, at most. `progress`: moves messages
    while `work` evaluates. `n_posted`: receives of verdicts that are posted ahead. `clock`: of the job's times."""

    comm: Comm
    stage_ranks: Sequence[int]
    worker: StageWorker | None
    n_bytes: int
    decode: Callable[[Buffer], A]
    courier: Courier | None = None
    wire_type: WireType = WireType.F32
    progress: Progress = NO_PROGRESS
    n_posted: int = N_POSTED
    clock: JobClock = REAL_CLOCK

    def __post_init__(self) -> None:
        self.n_stages = len(self.stage_ranks)
        self.remote_ranks = [rank for rank in self.stage_ranks if rank != 0]
        self.is_at_head = not self.remote_ranks
        self.outbox, self.idle = Outbox(self.comm, self.courier), Idle()
        self.ledger = HeadLedger()
        self.n_submitted = 0  # runs since the start
        self.n_out = 0  # runs whose verdicts have not been taken
        self._run_id = 0  # of the run that `work` evaluates
        # a verdict may cancel the run that `work` evaluates, and MPI moves messages only when it is called
        self._listen: Callable[[], object] = self.has_verdict
        self._check: Callable[[], object] = lambda: None
        self._failure: Exception | None = None  # what these raised during a run, which is sent on nevertheless
        self._prunings = LocalPrunings(self._listen_meanwhile)
        self._queue: deque[Run] = deque()
        self._verdicts: deque[A] = deque()
        if self.remote_ranks:
            sizes = self.n_bytes, self.n_posted
            self._inbox = Inbox(self.comm, self.remote_ranks[-1], Tag.VERDICT, *sizes, self.courier)

    def listen_by(self, listen: Callable[[], object]) -> None:
        """Call `listen` between the layers of the head's stage; it must poll for verdicts. `work` raises what it raises
        once the run is sent on: a run that got lost would be waited for."""
        self._listen = listen

    def _listen_meanwhile(self) -> None:
        if self._failure is None:
            try:
                self._check()
                self._listen()
            except Exception as error:
                self._failure = error
                if isinstance(error, StopRequested):
                    self._prunings.cancel([self._run_id])  # which may take long

    def submit(self, run: Run) -> None:
        self.ledger.submitted_s[run.id] = self.clock()
        self.n_submitted += 1
        self.n_out += 1
        if self.worker:
            self._queue.append(run)
        else:
            self.outbox.send_run(encode(run), self.remote_ranks[0])

    def poll(self) -> A | None:
        if not self.has_verdict():
            return None
        self.n_out -= 1
        return self._verdicts.popleft()

    def has_verdict(self) -> bool:
        """Whether `poll` would return one."""
        if not self._verdicts and self.remote_ranks and (message := self._inbox.poll()) is not None:
            verdict = self.decode(message)
            self._inbox.give_back(message)
            self.ledger.verdicts.append((self.clock(), verdict.run_id))
            self._verdicts.append(verdict)
        return bool(self._verdicts)

    @property
    def oldest_s(self) -> float:
        """The time of submission of the oldest run that waits for the head's stage; infinity if there is none."""
        return self.ledger.submitted_s[self._queue[0].id] if self._queue else math.inf

    def work(self, check: Callable[[], object] = lambda: None) -> None:
        """Evaluate the oldest run on the head's stage; send it on, or queue its verdict. `check` is called between
        layers; the run is cancelled when it raises StopRequested. Raises ModelFault."""
        assert self.worker
        run = self._queue.popleft()
        self._run_id, self._check = run.id, check
        start_s = self.clock()
        message, model = encode(run), self.worker.model
        if model.is_last and not self.worker.n_features:
            transaction = Transaction(message, model.n_embd, self.wire_type)
        else:
            transaction = room_for(message, model.n_embd, self.wire_type, self.worker.n_features)
        with self.progress.beside(transaction.n_bytes_full):
            try:
                verdict = self.worker.process(transaction, self._prunings)
            except UserError as error:  # there is no memory any more
                raise ModelFault(str(error)) from error
        self._prunings.forget_before(run.id + 1)
        if self.remote_ranks:
            self.outbox.send_run(transaction.message, self.remote_ranks[0], transaction.out_of_band_memory)
        else:
            self._verdicts.append(cast(A, verdict))
        if transaction.cancelled:
            self.ledger.cancelled.append((start_s, self.clock()))
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def cancel(self, run_ids: Sequence[int]) -> None:
        if self.worker:
            self._prunings.cancel(run_ids)
        self.ledger.cancels.append((self.clock(), len(run_ids)))
        self._tell(dict.fromkeys(run_ids))

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        if self.worker:
            self._prunings.prune(rows)
        self._tell(rows)

    def _tell(self, rows: Mapping[int, Sequence[int] | None]) -> None:
        for message in encode_prunings(rows):
            for rank in self.remote_ranks:
                self.outbox.send(message, rank, Tag.CANCEL)
                self.ledger.n_cancel_messages += 1

    def ask_reports(self) -> None:
        """Order a report of every remote stage, behind all runs so far."""
        if self.remote_ranks:
            self.outbox.send(encode_order(Kind.REPORT), self.remote_ranks[0], Tag.PIPELINE)

    def take_ledger(self) -> HeadLedger:
        """The ledger since the last call."""
        ledger, self.ledger = self.ledger, HeadLedger()
        self.ledger.submitted_s = {run.id: ledger.submitted_s[run.id] for run in self._queue}
        return ledger

    def shutdown(self) -> None:
        """Shut every remote stage down."""
        for rank in self.remote_ranks:
            self.outbox.send(encode_last_prunings(), rank, Tag.CANCEL)
        if self.remote_ranks:
            self.outbox.send(encode_order(Kind.SHUTDOWN), self.remote_ranks[0], Tag.PIPELINE)
            self.outbox.flush(self.idle)
            self._inbox.close(self.idle)


class HeadWaiter:
    """Waits of rank 0: it evaluates runs of its own stages, or sleeps until a verdict comes. Every wait calls `check`,
    which may raise `StopRequested`, and ends when `has_work` returns True. The ledger of `target` has all waits."""

    def __init__(
        self, check: Callable[[], None], target: HeadPipeline[Any], has_work: Callable[[], bool] = lambda: False
    ) -> None:
        self.check, self.target, self.has_work, self.idle = check, target, has_work, Idle()

    def wait(self, pipelines: Sequence[HeadPipeline[Any]], timeout_s: float | None = None) -> None:
        self.check()
        oldest = min(pipelines, key=lambda pipeline: pipeline.oldest_s)
        if oldest.oldest_s < math.inf:
            oldest.work(self.check)
            return

        def any_verdict() -> bool | None:
            self.check()
            return any(pipeline.has_verdict() for pipeline in pipelines) or self.has_work() or None

        start_s = self.target.clock()
        try:
            self.idle.within(any_verdict, math.inf if timeout_s is None else self.target.clock.real_s(timeout_s))
        finally:
            ledger, waits_for_runs = self.target.ledger, any(pipeline.n_out for pipeline in pipelines)
            (ledger.waits if waits_for_runs else ledger.idles).append((start_s, self.target.clock()))
