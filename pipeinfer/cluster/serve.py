"""A stage's end of a pipeline: receive a run, evaluate it, pass it on; hear from the head what need not be evaluated.

Knows ranks and messages; what is done with a run is `stage`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from pipeinfer.cluster.activations import WireType, activation_bytes
from pipeinfer.cluster.begun import BegunTransaction
from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.pace import Courier
from pipeinfer.cluster.progress import NO_PROGRESS, Progress
from pipeinfer.cluster.records import Buffer
from pipeinfer.cluster.samplers import Samplers
from pipeinfer.cluster.stage import LocalPrunings, StageWorker
from pipeinfer.cluster.transport import Comm, Inbox, Outbox, Tag
from pipeinfer.cluster.watch.flow import Flow
from pipeinfer.cluster.wire import (
    N_PRUNINGS_BYTES,
    Kind,
    Transaction,
    bytes_before_activations,
    decode_prunings,
    encode_verdict,
)
from pipeinfer.observe.ledger import StageLedger

N_OPS_MAX, N_EXTRA_MAX, N_OPENS_MAX = 2048, 8192, 256  # room in a transaction, far above what 256 sequences need
N_TEXT_MAX = 1 << 20
"""Bytes of what requests that are open at a time say of sampling in texts, see `wire.text_bytes`."""


N_UNDER_WAY = 2
"""Runs that a model which `RunsAhead` may have begun: while it computes one, the next is prepared."""

N_POSTED = 2
"""Receives of runs that are posted ahead."""


class HeardPrunings:
    """What this stage need not evaluate, as the head's messages have it."""

    def __init__(self, comm: Comm, courier: Courier | None, listen: Callable[[], object]) -> None:
        """`listen` is called between layers too."""
        self.listen = listen
        self._inbox = Inbox(comm, 0, Tag.CANCEL, N_PRUNINGS_BYTES, courier=courier)
        self._known = LocalPrunings()
        self._ended = False

    def is_cancelled(self, run_id: int) -> bool:
        self.listen()
        self._hear(run_id)
        return self._known.is_cancelled(run_id)

    def rows(self, run_id: int) -> Sequence[int]:
        self._hear(run_id)
        return self._known.rows(run_id)

    def _hear(self, run_id: int) -> None:
        while (message := self._inbox.poll()) is not None:
            self._known.forget_before(run_id)
            heard = decode_prunings(message)
            self._inbox.give_back(message)
            self._ended = heard.is_last
            for dead_id, rows in heard.runs:
                if rows is None:
                    self._known.cancel([dead_id])
                else:
                    self._known.prune({dead_id: rows})

    def close(self, idle: Idle) -> None:
        """Take every message meant for this pipeline: a late one must not cancel a run of the next."""
        idle.until(lambda: self.is_cancelled(0) or self._ended or None)
        self._inbox.close(idle)


def serve(
    comm: Comm,
    worker: StageWorker | None,
    previous: int,
    following: int | None,
    n_rows_max: int,
    n_embd: int,
    report: Callable[[Outbox, StageLedger], None],
    since_s: float | None = None,
    courier: Courier | None = None,
    n_samplers: int = 0,
    wire_type: WireType = WireType.F32,
    flow: Flow | None = None,
    progress: Progress = NO_PROGRESS,
    n_under_way: int = N_UNDER_WAY,
    n_posted: int = N_POSTED,
) -> None:
    """A stage's loop: receive a run, evaluate, pass on; until the shutdown, which it passes on too.

    `following` is None on the last stage, which answers the head instead. Without a worker (its model did not load) the
    rank only waits for the shutdown. `report` is called, once the order to do so has been passed on, with what was sent
    and how the time was spent since the last time. The ledger's first wait begins at `since_s`, or now. `n_samplers`:
    threads that answer for the last stage while it evaluates its next run. `flow`: of this rank, for the watch.
    `progress`: of messages while it evaluates. `n_under_way`: runs that a model which `RunsAhead` has begun at most, 1
    or 2. `n_posted`: receives of runs that are posted ahead.
    """
    flow = flow or Flow()
    flow.source, flow.dest = previous, -1 if following is None else following
    bare = bytes_before_activations(N_OPS_MAX, n_rows_max, N_EXTRA_MAX, N_OPENS_MAX, N_TEXT_MAX)
    n_bytes = bare + activation_bytes(n_rows_max, n_embd, wire_type)
    inbox = Inbox(comm, previous, Tag.PIPELINE, n_bytes, n_posted, courier)
    outbox, idle, ledger = Outbox(comm, courier), Idle(), StageLedger()
    under_way: deque[tuple[Buffer, BegunTransaction, float]] = deque()
    samplers = (
        Samplers(n_samplers, lambda: bool(under_way) or inbox.holds()) if n_samplers and following is None else None
    )
    wait_s = time.monotonic() if since_s is None else since_s

    def answer() -> None:
        while samplers and (verdict := samplers.ready()) is not None:
            outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)

    def next_run() -> Buffer | None:
        answer()
        return inbox.poll()

    def wait() -> Buffer:
        flow.waits = True
        buffer = idle.until(next_run)
        flow.waits = False
        return buffer

    def finish_oldest() -> None:
        """Wait for its result and pass that on."""
        nonlocal wait_s
        assert worker
        buffer, begun, start_s = under_way.popleft()
        verdict, transaction = worker.finish(begun), begun.transaction
        end_s = time.monotonic()  # before it is sent: whoever gets it may be quicker than this rank
        if following is not None:
            inbox.give_back(buffer, outbox.send_run(transaction.message, following))
            flow.n_passed += 1
        else:
            assert verdict or samplers, "the last stage has no verdict"
            if verdict:
                outbox.send(encode_verdict(verdict), 0, Tag.VERDICT)
            inbox.give_back(buffer)
        ledger.note(transaction.run_id, wait_s, max(start_s, wait_s), end_s, transaction.cancelled)
        wait_s = end_s

    prunings = HeardPrunings(comm, courier, answer)
    if worker:
        worker.pruned, worker.samplers = prunings, samplers

    while True:
        next_here = next_run() if under_way else wait()
        if next_here is None:
            finish_oldest()
            continue
        buffer = next_here
        flow.n_taken += 1
        start_s = time.monotonic()
        transaction = Transaction(buffer, n_embd, wire_type)
        if transaction.kind is not Kind.RUN:
            while under_way:
                finish_oldest()
            ledger.note(0, wait_s, max(start_s, wait_s), max(start_s, wait_s), False)
            if following is not None:
                outbox.send(transaction.message, following, Tag.PIPELINE)
                flow.n_passed += 1
            if transaction.kind is Kind.SHUTDOWN:
                break
            report(outbox, ledger)
            ledger, wait_s = StageLedger(), time.monotonic()
            continue
        assert worker, "a run arrived at a rank whose model did not load"
        with progress.beside(transaction.n_bytes_full):
            begun = worker.begin(transaction)
        under_way.append((buffer, begun, start_s))
        if len(under_way) == n_under_way or under_way[0][1].is_done:
            finish_oldest()
    if samplers:
        samplers.close()
        answer()
    flow.waits = True
    outbox.flush(idle)
    inbox.close(idle)
    prunings.close(idle)
