"""A stage whose model computes while the host goes on: it begins its next run before the last result is there, and what
it sends is the same, in the same order."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from pipeinfer.cluster import transport
from pipeinfer.cluster.stages.serve import Pipe, StageLoop
from pipeinfer.cluster.stages.stage import StageWorker, room_for
from pipeinfer.cluster.transport import Comm, Inbox, Tag
from pipeinfer.cluster.verdicts import decode_verdict
from pipeinfer.cluster.wire import Kind, Transaction, encode, encode_last_prunings, encode_order, encode_prunings
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, Opening, Row, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import FloatArray
from pipeinfer.observe.trace import StageLedger

N_EMBD, N_VOCAB = 4, 50


def a_while() -> Callable[[int], bool]:
    """Whether a run of this number is done: when that was asked some times."""
    asked: Counter[int] = Counter()

    def is_done(number: int) -> bool:
        asked[number] += 1
        return asked[number] > 3

    return is_done


@dataclass
class LateRun:
    model: LateModel
    number: int
    rows: FloatArray

    @property
    def is_done(self) -> bool:
        assert time.monotonic() < self.model.ends_s, "what it waits for does not come"
        return self.model.is_done(self.number)

    def result(self) -> FloatArray:
        assert self.is_done, "whoever waits here hears nobody"
        self.model.heard.append(f"result {self.number}")
        return self.rows


@dataclass
class LateModel:
    """Tokens of a row follow from its position. `is_done`: of the run of a number."""

    is_last: bool
    n_embd: int = N_EMBD
    heard: list[str] = field(default_factory=list)
    end: int = 0
    n_begun: int = 0
    is_done: Callable[[int], bool] = field(default_factory=a_while)
    sent: list[tuple[int, Tag, np.ndarray]] = field(default_factory=list)
    ends_s: float = field(default_factory=lambda: time.monotonic() + 60)

    def apply(self, ops: Sequence[KvOp]) -> None: ...

    def next_position(self, seq: int) -> int:
        return self.end

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        raise AssertionError("begin is there")

    def begin(self, batch: Batch, stop: Callable[[], bool]) -> LateRun | None:
        self.n_begun += 1
        self.heard.append(f"begin {self.n_begun}")
        if stop():
            return None
        self.end += len(batch.positions)
        if not self.is_last:
            return LateRun(self, self.n_begun, np.repeat(batch.positions[:, None], N_EMBD, 1).astype(np.float32))
        logits = np.zeros((int(batch.wanted.sum()), N_VOCAB), np.float32)
        logits[np.arange(len(logits)), batch.positions[batch.wanted] % N_VOCAB] = 5.0
        return LateRun(self, self.n_begun, logits)


class Delivered:
    """A request of MPI's. Of a receive without a message for it none ever comes; others come when it was asked `n_late`
    times."""

    def __init__(
        self, buffer: np.ndarray | None = None, queue: deque[np.ndarray] | None = None, n_late: int = 0
    ) -> None:
        self.buffer, self.queue, self.n_late, self.is_over = buffer, queue, n_late, False

    def Test(self, status: object = None) -> bool:
        self.n_late -= 1
        if self.n_late < 0 and not self.is_over and self.buffer is not None and self.queue:
            message = self.queue.popleft()
            self.buffer[: len(message)] = message
            self.is_over = True
        return self.is_over or self.queue is None

    def Cancel(self) -> None:
        self.is_over = True


class Told:
    """MPI's status of a message that has been found."""

    n_bytes = 0

    def Get_count(self, kind: object) -> int:
        return self.n_bytes


class Found(NamedTuple):
    """A message of MPI's that has been found, and is the oldest."""

    queue: deque[np.ndarray]

    def Irecv(self, buffer: Sequence[Any]) -> Delivered:
        assert len(buffer[0]) == len(self.queue[0]), "its length is known"
        return Delivered(buffer[0], self.queue)


class AllHere:
    """Every message that will come has come, or comes `n_late` looks later; what is sent is kept."""

    def __init__(self, coming: dict[Tag, list[np.ndarray]], n_late: int = 0) -> None:
        self.n_late = n_late
        self.coming = {tag: deque(messages) for tag, messages in coming.items()}
        self.sent: list[tuple[int, Tag, np.ndarray]] = []
        self.n_probed = 0

    def Irecv(self, buffer: Sequence[Any], source: int, tag: int) -> Delivered:
        return Delivered(buffer[0], self.coming[Tag(tag)], self.n_late)

    def Improbe(self, source: int, tag: int, status: Any) -> Found | None:
        waiting = self.coming[Tag(tag)]
        if not waiting:
            return None
        self.n_probed += 1
        status.n_bytes = len(waiting[0])
        return Found(waiting)

    def Isend(self, message: Sequence[Any], dest: int, tag: int) -> Delivered:
        self.sent.append((dest, Tag(tag), message[0].copy()))
        return Delivered()


def make_runs(n_runs: int) -> list[Run]:
    found, position = [], 0
    for number in range(1, n_runs + 1):
        rows = [Row(1, 3, position + index, (0,), n_wanted=1) for index in range(1 + number % 3)]
        found.append(Run(number, rows, opens={1: Opening(SamplingParams(temp=0.0), 1)} if number == 1 else {}))
        position += len(rows)
    return found


def arrived(run: Run) -> np.ndarray:
    """As the stage before sends it."""
    transaction = room_for(encode(run), N_EMBD)
    transaction.activations = np.ones((len(run.rows), N_EMBD), np.float32)
    return transaction.message


def serve_runs(
    model: LateModel, runs: Sequence[Run], cancelled: Sequence[int] = (), n_late: int = 0, **switches: Any
) -> tuple[AllHere, StageLedger]:
    """What is sent, and how the time was spent."""
    orders = [encode_order(Kind.REPORT), encode_order(Kind.SHUTDOWN)]
    prunings = [*encode_prunings(dict.fromkeys(cancelled)), encode_last_prunings()]
    coming = {Tag.PIPELINE: [*map(arrived, runs), *orders], Tag.CANCEL: prunings}
    comm, ledgers = AllHere(coming, n_late), list[StageLedger]()
    model.sent = comm.sent
    worker = StageWorker(model, time.monotonic, is_first=False, n_layers=3)
    following = None if model.is_last else 2
    pipe = Pipe(0, following, 16, N_EMBD, **switches)
    StageLoop(cast(Comm, comm), pipe, worker, lambda outbox, ledger: ledgers.append(ledger)).run()
    return comm, ledgers[0]


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody can ask whether a buffer is free again: each message gets a new one."""
    monkeypatch.setattr(Inbox, "give_back", lambda *buffer_and_request: None)


def test_the_next_run_is_begun_while_one_is_computed() -> None:
    model, runs = LateModel(is_last=False), make_runs(4)
    comm, ledger = serve_runs(model, runs)
    assert model.heard == ["begin 1", "begin 2", "result 1", "begin 3", "result 2", "begin 4", "result 3", "result 4"]
    passed_on = [Transaction(message, N_EMBD) for dest, tag, message in comm.sent if tag is Tag.PIPELINE]
    assert [each.kind for each in passed_on] == [Kind.RUN] * 4 + [Kind.REPORT, Kind.SHUTDOWN]
    for transaction, run in zip(passed_on[:4], runs, strict=True):
        assert transaction.run_id == run.id
        assert transaction.activations[:, 0].tolist() == [row.position for row in run.rows]
    spans = [(start_s, end_s) for _, _, start_s, end_s, _ in ledger.moved(0.0)]
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), "a moment counts once"


def test_a_run_that_comes_while_one_is_computed_is_begun_then() -> None:
    """Nobody waits for the device alone: here a run is not done before the next one has begun."""
    model = LateModel(is_last=False)
    model.is_done = lambda number: model.n_begun > number or number == 4
    serve_runs(model, make_runs(4), n_late=200)
    assert model.heard == ["begin 1", "begin 2", "result 1", "begin 3", "result 2", "begin 4", "result 3", "result 4"]


def test_what_samplers_have_chosen_goes_out_while_a_run_is_computed() -> None:
    """A run is not done before the verdict of the one before it was sent."""
    model, runs = LateModel(is_last=True), make_runs(4)
    runs[0].opens[1] = Opening(SamplingParams(temp=0.8, seed=1), 1)
    model.is_done = lambda number: number - 1 <= sum(tag is Tag.VERDICT for _, tag, _ in model.sent)
    comm, _ = serve_runs(model, runs, n_samplers=1)
    assert [decode_verdict(message).run_id for _, tag, message in comm.sent if tag is Tag.VERDICT] == [1, 2, 3, 4]


def test_switched_off_a_run_is_begun_when_the_one_before_is_done() -> None:
    model = LateModel(is_last=False)
    comm, _ = serve_runs(model, make_runs(3), n_under_way=1)
    assert model.heard == ["begin 1", "result 1", "begin 2", "result 2", "begin 3", "result 3"]
    assert not comm.n_probed


def test_switched_off_a_message_is_received_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MPI", SimpleNamespace(Status=Told, BYTE=None))
    model, runs = LateModel(is_last=True), make_runs(3)
    comm, _ = serve_runs(model, runs, n_posted=0)
    verdicts = [decode_verdict(message) for _, tag, message in comm.sent if tag is Tag.VERDICT]
    assert [verdict.run_id for verdict in verdicts] == [1, 2, 3]
    assert comm.n_probed == len(runs) + 2, "and the orders"


def test_verdicts_are_those_of_each_run() -> None:
    """What is asked about a run is noted when it begins; a cancelled one begins and ends beside others."""
    model, runs = LateModel(is_last=True), make_runs(5)
    comm, ledger = serve_runs(model, runs, cancelled=[5])
    verdicts = [decode_verdict(message) for _, tag, message in comm.sent if tag is Tag.VERDICT]
    assert [verdict.run_id for verdict in verdicts] == [1, 2, 3, 4, 5]
    for verdict, run in zip(verdicts[:4], runs, strict=False):
        assert list(verdict.tokens) == [row.position % N_VOCAB for row in run.rows] and not verdict.cancelled
    assert verdicts[4].cancelled and model.n_begun == 4
    assert [cancelled for *_, cancelled in ledger.moved(0.0)] == [False] * 4 + [True, False]
