"""The head's end of a pipeline: send runs and prunings, receive verdicts; and how the head waits.

Knows ranks and messages; neither trees nor policies.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.messages.activations import Buffer, WireType
from pipeinfer.cluster.messages.wire import (
    Kind,
    Transaction,
    encode,
    encode_last_prunings,
    encode_order,
    encode_prunings,
)
from pipeinfer.cluster.stages.pace import Courier
from pipeinfer.cluster.stages.progress import NO_PROGRESS, Progress
from pipeinfer.cluster.stages.prunings import LocalPrunings
from pipeinfer.cluster.stages.stage import StageWorker, room_for
from pipeinfer.cluster.transport import Comm, Inbox, Outbox, Tag
from pipeinfer.core.runs import GuessVerdict, Run, Verdict
from pipeinfer.observe.ledger import HeadLedger

A = TypeVar("A", Verdict, GuessVerdict)

N_POSTED = 4
"""Receives of verdicts that are posted ahead."""


class HeadPipeline(Generic[A]):
    """Rank 0's Pipeline to one level. If the head hosts the first stage, or the whole model, `work` evaluates the
    oldest run. `decode`: decodes a verdict's message; `n_bytes`: of a verdict, at most. `progress`: moves messages
    while `work` evaluates. `n_posted`: receives of verdicts that are posted ahead."""

    def __init__(
        self, comm: Comm, stage_ranks: Sequence[int], worker: StageWorker | None, n_bytes: int,
        decode: Callable[[Buffer], A], courier: Courier | None = None, wire_type: WireType = WireType.F32,
        progress: Progress = NO_PROGRESS, n_posted: int = N_POSTED,
    ) -> None:  # fmt: skip
        self.comm, self.worker, self.wire_type, self.progress = comm, worker, wire_type, progress
        self.decode: Callable[[Buffer], A] = decode
        self.n_stages = len(stage_ranks)
        self.remote_ranks = [rank for rank in stage_ranks if rank != 0]
        self.is_at_head = not self.remote_ranks
        self.outbox, self.idle = Outbox(comm, courier), Idle()
        self.ledger = HeadLedger()
        self.n_submitted = 0  # runs since the start
        self.n_out = 0  # runs whose verdicts have not been taken
        # what has come may spare it the rest, and MPI moves messages only while somebody calls it
        self._prunings = LocalPrunings(self.has_verdict)
        self._queue: deque[Run] = deque()
        self._verdicts: deque[A] = deque()
        if worker:
            worker.pruned = self._prunings
        if self.remote_ranks:
            self._inbox = Inbox(comm, self.remote_ranks[-1], Tag.VERDICT, n_bytes, n_posted, courier)

    def listen_by(self, listen: Callable[[], object]) -> None:
        """Set what is called between the layers of the head's own stage; it must poll for verdicts."""
        self._prunings.listen = listen

    def submit(self, run: Run) -> None:
        self.ledger.submitted_s[run.id] = time.monotonic()
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
            self.ledger.verdicts.append((time.monotonic(), verdict.run_id))
            self._verdicts.append(verdict)
        return bool(self._verdicts)

    @property
    def oldest_s(self) -> float:
        """When the oldest run was submitted that waits for the head's own stage; infinity if there is none."""
        return self.ledger.submitted_s[self._queue[0].id] if self._queue else math.inf

    def work(self) -> None:
        """Evaluate the oldest run on the head's own stage; send it on, or keep its verdict."""
        assert self.worker
        run = self._queue.popleft()
        start_s = time.monotonic()
        message, model = encode(run), self.worker.model
        if model.is_last and not self.worker.n_features:
            transaction = Transaction(message, model.n_embd, self.wire_type)
        else:
            transaction = room_for(message, model.n_embd, self.wire_type, self.worker.n_features)
        with self.progress.beside(transaction.n_bytes_full):
            verdict = self.worker.process(transaction)
        self._prunings.forget_before(run.id + 1)
        if self.remote_ranks:
            self.outbox.send_run(transaction.message, self.remote_ranks[0], transaction.out_of_band_memory)
        else:
            self._verdicts.append(cast(A, verdict))
        if transaction.cancelled:
            self.ledger.cancelled.append((start_s, time.monotonic()))

    def cancel(self, run_ids: Sequence[int]) -> None:
        if self.worker:
            self._prunings.cancel(run_ids)
        self.ledger.cancels.append((time.monotonic(), len(run_ids)))
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
        """Order a report of every remote stage, after all runs so far."""
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
    """How rank 0 waits: by its own stages' work, or for a verdict. Every wait calls `check`, which may raise
    `StopRequested`, and `called`, which ends the wait if it returns True. Waits are noted in the ledger of `target`."""

    def __init__(
        self, check: Callable[[], None], target: HeadPipeline[Any], called: Callable[[], bool] = lambda: False
    ) -> None:
        self.check, self.target, self.called, self.idle = check, target, called, Idle()

    def wait(self, pipelines: Sequence[HeadPipeline[Any]], timeout_s: float | None = None) -> None:
        self.check()
        oldest = min(pipelines, key=lambda pipeline: pipeline.oldest_s)
        if oldest.oldest_s < math.inf:
            oldest.work()
            return

        def any_verdict() -> bool | None:
            self.check()
            return any(pipeline.has_verdict() for pipeline in pipelines) or self.called() or None

        start_s = time.monotonic()
        try:
            self.idle.within(any_verdict, math.inf if timeout_s is None else timeout_s)
        finally:
            ledger, waits_for_runs = self.target.ledger, any(pipeline.n_out for pipeline in pipelines)
            (ledger.waits if waits_for_runs else ledger.idles).append((start_s, time.monotonic()))
