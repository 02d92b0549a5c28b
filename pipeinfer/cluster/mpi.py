"""The wire: transactions between ranks, in order. The only file that imports mpi4py.

One message per run and hop on the PIPELINE tag, whose order MPI keeps; verdicts from the last stage to the head;
cancellations out of band, from the head straight to every stage.
"""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar, cast

import mpi4py
import numpy as np

mpi4py.rc(initialize=False, finalize=False)  # `Link` does both, without holding the interpreter's lock
from mpi4py import MPI

from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.pace import N_STAMP, Courier
from pipeinfer.cluster.stage import LocalPrunings, StageWorker, room_for
from pipeinfer.cluster.wire import (
    N_VERDICT,
    Buffer,
    Kind,
    Transaction,
    encode,
    encode_shutdown,
    encode_verdict,
    halves,
    joined,
    words_before_activations,
)
from pipeinfer.interfaces import IntArray
from pipeinfer.ledger import HeadLedger, StageLedger
from pipeinfer.runs import GuessVerdict, Run, Verdict

T = TypeVar("T")
A = TypeVar("A", Verdict, GuessVerdict)
NOTHING: frozenset[int] = frozenset()


class Tag(IntEnum):
    PIPELINE = 1  # runs and the shutdown: what must keep its order shares this tag
    VERDICT = 2
    CANCEL = 3
    REPORT = 4  # a rank's progress while loading, its statistics at the end
    CLOCK = 5
    SHARED = 6  # what rank 0 tells all others


N_OPS_MAX, N_EXTRA_MAX, N_OPENS_MAX = 2048, 8192, 64  # room in a transaction, far above what 256 sequences need
NO_MORE_PRUNINGS = -1  # in place of the words in use: the last message of a pipeline
ALL_ROWS = -1  # in place of the number of rows: the run is cancelled
N_PRUNE_WORDS = 128


class Outbox:
    """Sends that never block: each buffer is kept until its message is out. `courier`: stamps them, in paced jobs."""

    def __init__(self, comm: MPI.Comm, courier: Courier | None = None) -> None:
        self.comm, self.courier = comm, courier
        self._pending: deque[tuple[MPI.Request, Any]] = deque()
        self.n_runs = 0  # messages that carried a run, and their bytes
        self.n_run_bytes = 0

    def send_run(self, message: Buffer, dest: int) -> MPI.Request:
        self.n_runs += 1
        self.n_run_bytes += message.nbytes
        return self.send(message, dest, Tag.PIPELINE)

    def send(self, message: np.ndarray, dest: int, tag: Tag) -> MPI.Request:
        while self._pending and self._pending[0][0].Test():
            self._pending.popleft()
        if self.courier:
            message = self.courier.stamp(message, dest, tag is Tag.PIPELINE)
        request = self.comm.Isend([message, MPI.BYTE], dest, tag)
        self._pending.append((request, message))
        return request

    def flush(self, idle: Idle) -> None:
        """Return when everything is out."""
        while self._pending:
            idle.until(lambda: self._pending[0][0].Test() or None)
            self._pending.popleft()


class Inbox:
    """Receives posted ahead, so that the next message arrives while this one is worked on.

    With a `courier`, in paced jobs, a message has not come before it is due.
    """

    def __init__(
        self, comm: MPI.Comm, source: int, tag: Tag, n_bytes: int, n_ahead: int = 2, courier: Courier | None = None
    ) -> None:
        self.comm, self.source, self.tag = comm, source, tag
        self.n_bytes = n_bytes + (N_STAMP if courier else 0)
        self.courier = courier
        self._due_s: float | None = None  # of the oldest message, which is here
        self._posted: deque[tuple[MPI.Request, Buffer]] = deque()
        self._resting: deque[tuple[MPI.Request, Buffer]] = deque()
        for _ in range(n_ahead):
            self._post(np.empty(self.n_bytes, np.uint8))

    def _post(self, buffer: Buffer) -> None:
        self._posted.append((self.comm.Irecv([buffer, MPI.BYTE], self.source, self.tag), buffer))

    def poll(self) -> Buffer | None:
        """The next message in a buffer that is the caller's until it is handed to `give_back`."""
        request, buffer = self._posted[0]
        if not (request.Test() if self.courier is None else self._is_due(self.courier, request, buffer)):
            return None
        self._posted.popleft()
        if self._resting and self._resting[0][0].Test():
            self._post(self._resting.popleft()[1])
        else:
            self._post(np.empty(self.n_bytes, np.uint8))
        return buffer

    def _is_due(self, courier: Courier, request: MPI.Request, buffer: Buffer) -> bool:
        if self._due_s is None:
            status = MPI.Status()
            if not request.Test(status):
                return False
            self._due_s = courier.due_s(buffer[: status.Get_count(MPI.BYTE)])
        if courier.clock() < self._due_s:
            return False
        self._due_s = None
        return True

    def give_back(self, buffer: Buffer, sent: MPI.Request) -> None:
        """Use the buffer again once the message that is being sent from it is out."""
        if len(self._resting) < 4:
            self._resting.append((sent, buffer))

    def close(self) -> None:
        for request, _ in self._posted:
            request.Cancel()
            request.Wait()
        self._posted.clear()


class Prunings:
    """What this stage need not evaluate. Runs come in the order of their ids: what concerns older ones is forgotten."""

    def __init__(self, comm: MPI.Comm, courier: Courier | None = None) -> None:
        self._inbox = Inbox(comm, 0, Tag.CANCEL, 4 * N_PRUNE_WORDS, courier=courier)
        self._known: dict[int, set[int] | None] = {}  # run id -> rows; None: all of it
        self._ended = False

    def is_cancelled(self, run_id: int) -> bool:
        self._hear(run_id)
        return self._known.get(run_id, NOTHING) is None

    def rows(self, run_id: int) -> list[int]:
        self._hear(run_id)
        return sorted(self._known.get(run_id) or ())

    def _hear(self, run_id: int) -> None:
        while (message := self._inbox.poll()) is not None:
            self._known = {known: rows for known, rows in self._known.items() if known >= run_id}
            self._ended = not self._take(message[: 4 * N_PRUNE_WORDS].view(np.int32).tolist())
            self._inbox.give_back(message, MPI.REQUEST_NULL)

    def _take(self, words: list[int]) -> bool:
        """False for a pipeline's last message."""
        at, end = 1, words[0]
        while at < end:
            low, high, n_rows = words[at : at + 3]
            run_id, at = joined(low, high), at + 3
            if n_rows == ALL_ROWS:
                self._known[run_id] = None
                continue
            known = self._known.setdefault(run_id, set())
            if known is not None:
                known.update(words[at : at + n_rows])
            at += n_rows
        return end != NO_MORE_PRUNINGS

    def close(self, idle: Idle) -> None:
        """Take every message meant for this pipeline: a late one must not cancel a run of the next."""
        idle.until(lambda: self.is_cancelled(0) or self._ended or None)
        self._inbox.close()


def prune_messages(rows: Mapping[int, Sequence[int] | None]) -> list[IntArray]:
    """The rows of runs (None: all of a run's) as messages of one size: the words in use, then for each run its id, how
    many rows, and those."""
    entries = []
    for run_id, dead in rows.items():
        chunks: list[Sequence[int]] = [()] if dead is None else [dead[at : at + 32] for at in range(0, len(dead), 32)]
        entries += [[*halves(run_id), ALL_ROWS if dead is None else len(chunk), *chunk] for chunk in chunks]
    messages, words = [], [1]
    for entry in entries:
        if len(words) + len(entry) > N_PRUNE_WORDS:
            messages.append(words)
            words = [1]
        words += entry
    return [
        np.array([len(used), *used[1:], *[0] * (N_PRUNE_WORDS - len(used))], np.int32) for used in [*messages, words]
    ]


class HeadPipeline(Generic[A]):
    """The Pipeline of rank 0 to one level. If the head hosts its first stage, `work` evaluates the oldest run; a lone
    rank does so for the whole model. `decode`: what the last stage's messages mean. `n_words`: of a verdict at most."""

    def __init__(
        self,
        comm: MPI.Comm,
        stage_ranks: Sequence[int],
        worker: StageWorker | None,
        n_words: int,
        decode: Callable[[Buffer], A],
        courier: Courier | None = None,
    ) -> None:
        self.comm, self.worker = comm, worker
        self.decode: Callable[[Buffer], A] = decode
        self.n_stages = len(stage_ranks)
        self.remote_ranks = [rank for rank in stage_ranks if rank != 0]
        self.outbox, self.idle = Outbox(comm, courier), Idle()
        self.ledger = HeadLedger()
        self.n_cancel_messages = 0
        self._prunings = LocalPrunings()
        self._queue: deque[Run] = deque()
        self._verdicts: deque[A] = deque()
        if worker:
            worker.pruned = self._prunings
        if self.remote_ranks:
            n_bytes = 4 * (N_VERDICT + n_words)
            self._inbox = Inbox(comm, self.remote_ranks[-1], Tag.VERDICT, n_bytes, n_ahead=4, courier=courier)

    def submit(self, run: Run) -> None:
        self.ledger.submitted_s[run.id] = time.monotonic()
        if self.worker:
            self._queue.append(run)
        else:
            self.outbox.send_run(encode(run), self.remote_ranks[0])

    def poll(self) -> A | None:
        return self._verdicts.popleft() if self.has_verdict() else None

    def has_verdict(self) -> bool:
        """Whether `poll` would return one."""
        if not self._verdicts and self.remote_ranks and (message := self._inbox.poll()) is not None:
            verdict = self.decode(message)
            self._inbox.give_back(message, MPI.REQUEST_NULL)
            self.ledger.verdicts.append((time.monotonic(), verdict.run_id))
            self._verdicts.append(verdict)
        return bool(self._verdicts)

    @property
    def oldest_s(self) -> float:
        """When the oldest run was submitted that the head's own stage has yet to evaluate; infinity if none."""
        return self.ledger.submitted_s[self._queue[0].id] if self._queue else math.inf

    def work(self) -> None:
        """The head's own stage: evaluate the oldest run and pass it on, or keep its verdict."""
        assert self.worker
        run = self._queue.popleft()
        start_s = time.monotonic()
        transaction = room_for(encode(run), self.worker.model.n_embd)
        verdict = self.worker.process(transaction)
        self._prunings.forget(run.id)
        if self.remote_ranks:
            self.outbox.send_run(transaction.message, self.remote_ranks[0])
        else:
            self._verdicts.append(cast(A, verdict))
        if transaction.cancelled:
            self.ledger.cancelled.append((start_s, time.monotonic()))

    def cancel(self, run_ids: Sequence[int]) -> None:
        self._prunings.cancelled.update(run_ids if self.worker else ())
        self.ledger.cancels.append((time.monotonic(), len(run_ids)))
        self._tell(dict.fromkeys(run_ids))

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        if self.worker:
            for run_id, dead in rows.items():
                self._prunings.pruned.setdefault(run_id, set()).update(dead)
        self._tell(rows)

    def _tell(self, rows: Mapping[int, Sequence[int] | None]) -> None:
        for message in prune_messages(rows):
            for rank in self.remote_ranks:
                self.outbox.send(message, rank, Tag.CANCEL)
                self.n_cancel_messages += 1

    def shutdown(self, kind: Kind = Kind.SHUTDOWN) -> None:
        """Send every remote stage home, or (PAUSE) let it report and wait for another pipeline of this head."""
        for rank in self.remote_ranks:
            self.outbox.send(np.full(N_PRUNE_WORDS, NO_MORE_PRUNINGS, np.int32), rank, Tag.CANCEL)
        if self.remote_ranks:
            self.outbox.send(encode_shutdown(kind), self.remote_ranks[0], Tag.PIPELINE)
            self.outbox.flush(self.idle)
            self._inbox.close()


class HeadWaiter:
    """How rank 0 waits: by its own stages' work, or for a verdict. `check` is asked in every wait and may raise
    `StopRequested`; `ledger`: where waits are noted."""

    def __init__(self, check: Callable[[], None], ledger: HeadLedger) -> None:
        self.check, self.ledger, self.idle = check, ledger, Idle()

    def wait(self, pipelines: Sequence[HeadPipeline[Any]], timeout_s: float | None = None) -> None:
        self.check()
        oldest = min(pipelines, key=lambda pipeline: pipeline.oldest_s)
        if oldest.oldest_s < math.inf:
            oldest.work()
            return

        def any_verdict() -> bool | None:
            self.check()
            return any(pipeline.has_verdict() for pipeline in pipelines) or None

        start_s = time.monotonic()
        try:
            self.idle.within(any_verdict, math.inf if timeout_s is None else timeout_s)
        finally:
            self.ledger.waits.append((start_s, time.monotonic()))


@dataclass(frozen=True, slots=True)
class Served:
    """How a stage's loop ended (PAUSE or SHUTDOWN), what it sent and how it spent its time."""

    end: Kind
    outbox: Outbox
    ledger: StageLedger


def serve(
    comm: MPI.Comm,
    worker: StageWorker | None,
    previous: int,
    following: int | None,
    n_rows_max: int,
    n_embd: int,
    since_s: float | None = None,
    courier: Courier | None = None,
) -> Served:
    """A stage's loop: receive a run, evaluate, pass on; until the shutdown or pause, which it passes on too.

    `following` is None on the last stage, which answers the head instead. Without a worker (its model did not load) the
    rank only waits for the shutdown. The ledger's first wait begins at `since_s`, or now.
    """
    n_words = words_before_activations(N_OPS_MAX, n_rows_max, N_EXTRA_MAX, N_OPENS_MAX)
    inbox = Inbox(comm, previous, Tag.PIPELINE, 4 * (n_words + n_rows_max * n_embd), courier=courier)
    prunings = Prunings(comm, courier)
    outbox, idle, ledger = Outbox(comm, courier), Idle(), StageLedger()
    wait_s = time.monotonic() if since_s is None else since_s
    if worker:
        worker.pruned = prunings

    while True:
        buffer = idle.until(inbox.poll)
        start_s = time.monotonic()
        transaction = Transaction(buffer, n_embd)
        if transaction.kind is not Kind.RUN:
            ledger.note(0, wait_s, start_s, start_s, False)
            if following is not None:
                outbox.send(transaction.message, following, Tag.PIPELINE)
            break
        assert worker, "a run arrived at a rank whose model did not load"
        verdict = worker.process(transaction)
        if following is not None:
            sent = outbox.send_run(transaction.message, following)
        else:
            assert verdict, "the last stage has no verdict"
            outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)
            sent = MPI.REQUEST_NULL
        inbox.give_back(buffer, sent)
        end_s = time.monotonic()
        ledger.note(transaction.run_id, wait_s, start_s, end_s, transaction.cancelled)
        wait_s = end_s
    outbox.flush(idle)
    inbox.close()
    prunings.close(idle)
    return Served(transaction.kind, outbox, ledger)


def abort(code: int) -> None:
    """End the other ranks at once, if MPI runs and there are any: MPI says so, and may crash in exit handlers."""
    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        MPI.COMM_WORLD.Abort(code)


class Link:
    """This rank's connection to the others, and the collective steps before and after the pipeline runs."""

    def __init__(self) -> None:
        """Start MPI: returns when every rank has come here."""
        # mpi4py would hold the interpreter's lock, so that a signal could do nothing against a rank that never comes
        self._mpi = ctypes.CDLL(MPI.__file__)
        if not MPI.Is_initialized():
            self._mpi.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm: MPI.Comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._outgoing: list[MPI.Request] = []

    def all_gather(self, value: T) -> list[T]:
        return self.comm.allgather(value)

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank. The others leave their cores to rank 0 while they wait, as MPI's would not."""
        if self.rank:
            (shared,) = Idle().until(self._next_shared)
            return shared
        for rank in range(1, self.size):
            self._outgoing.append(self.comm.isend((value,), rank, Tag.SHARED))
        return value  # type: ignore[return-value]

    def _next_shared(self) -> tuple[Any] | None:
        message = self.comm.improbe(0, Tag.SHARED)
        return None if message is None else message.recv()

    def report(self, value: object) -> None:
        """Send a value to rank 0 without waiting for it to be taken."""
        self._outgoing = [request for request in self._outgoing if not request.Test()]
        self._outgoing.append(self.comm.isend(value, 0, Tag.REPORT))

    def next_report(self) -> tuple[int, Any] | None:
        """On rank 0: (rank, value) of a report, if one has come."""
        status = MPI.Status()
        message = self.comm.improbe(MPI.ANY_SOURCE, Tag.REPORT, status)
        return None if message is None else (status.Get_source(), message.recv())

    def clock_offset_s(self, clock: Callable[[], float], n_rounds: int = 8) -> float:
        """Seconds to add to this rank's clock to get rank 0's. Collective; the round with the least delay counts."""
        offset_s = 0.0
        for rank in range(1, self.size):
            if self.rank == 0:
                for _ in range(n_rounds):
                    self.comm.recv(source=rank, tag=Tag.CLOCK)
                    self.comm.send(clock(), rank, Tag.CLOCK)
            elif self.rank == rank:
                offset_s = min(self._ask_clock(clock) for _ in range(n_rounds))[1]
        return offset_s

    def bandwidth_gbit(self, n_bytes: int = 1 << 22, n_rounds: int = 4) -> float:
        """What the slowest link between neighbouring ranks carries, in Gbit/s. Collective; needs two ranks."""
        buffer, slowest_s = np.zeros(n_bytes, np.uint8), 0.0
        for rank in range(1, self.size):
            if self.rank == rank - 1:
                slowest_s = max(slowest_s, min(self._round_trip_s(buffer, rank) for _ in range(n_rounds)))
            elif self.rank == rank:
                for _ in range(n_rounds):
                    self.comm.Recv(buffer, rank - 1, Tag.CLOCK)
                    self.comm.Send(buffer, rank - 1, Tag.CLOCK)
        slowest_s = max(self.comm.allgather(slowest_s))
        return 8e-9 * 2 * n_bytes / slowest_s

    def _round_trip_s(self, buffer: Buffer, rank: int) -> float:
        start_s = time.perf_counter()
        self.comm.Send(buffer, rank, Tag.CLOCK)
        self.comm.Recv(buffer, rank, Tag.CLOCK)
        return time.perf_counter() - start_s

    def _ask_clock(self, clock: Callable[[], float]) -> tuple[float, float]:
        """(delay, offset) of one question to rank 0."""
        start_s = clock()
        self.comm.send(None, 0, Tag.CLOCK)
        theirs_s = self.comm.recv(source=0, tag=Tag.CLOCK)
        delay_s = clock() - start_s
        return delay_s, theirs_s - (start_s + delay_s / 2)

    def finalize(self) -> None:
        """Leave in order with the others, so that the launcher sees no failure but the exit code."""
        for request in self._outgoing:
            Idle().until(lambda request=request: request.Test() or None)  # type: ignore[misc]
        self._mpi.MPI_Finalize()
