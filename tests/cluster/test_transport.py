"""Messages come although nobody but the ranks themselves moves them: whoever computes or sleeps looks often enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipeinfer.cluster import idle, transport
from pipeinfer.cluster.head_pipeline import HeadPipeline
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.idle import LARGE_BYTES, NO_PROGRESS, Idle, Progress
from pipeinfer.cluster.stages.stage import StageWorker
from pipeinfer.cluster.transport import N_LOOKS, REST_S, Comm, Inbox, Tag, progress_between
from pipeinfer.cluster.verdicts import decode_verdict, encode_verdict, verdict_bytes
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, Row, Run, Verdict
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault, StopRequested, UserError
from tests.support.jobs import until

NEVER = 1 << 40  # looks


class Coming:
    """A request of MPI's that is done after so many looks, and then has put `content` into its buffer."""

    def __init__(self, n_looks: int, content: bytes = b"", buffer: np.ndarray | None = None) -> None:
        self.n_left, self.content, self.buffer = n_looks, content, buffer

    def Test(self, status: object = None) -> bool:
        self.n_left -= 1
        if self.n_left <= 0 and self.buffer is not None:
            self.buffer[: len(self.content)] = np.frombuffer(self.content, np.uint8)
        return self.n_left <= 0

    def Cancel(self) -> None:
        self.n_left = 0


class SlowComm:
    """Messages move one piece a look, of which each takes `n_pieces`."""

    def __init__(self, n_pieces: int, content: bytes) -> None:
        self.n_pieces, self.content, self.sent = n_pieces, content, list[tuple[int, int]]()

    def Irecv(self, buffer: Sequence[Any], source: int, tag: int) -> Coming:
        return Coming(self.n_pieces, self.content, buffer[0])

    def Isend(self, message: Sequence[Any], dest: int, tag: int) -> Coming:
        self.sent.append((dest, tag))
        return Coming(1)


def slow_comm(n_pieces: int, content: bytes) -> Comm:
    return cast(Comm, SlowComm(n_pieces, content))


def test_who_has_rested_takes_in_many_pieces_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1.0
    monkeypatch.setattr(transport, "time", SimpleNamespace(perf_counter=lambda: now_s))
    inbox = Inbox(slow_comm(N_LOOKS + 2, b"text"), 1, Tag.VERDICT, 8)
    assert inbox.poll() is None, "16 pieces have come"
    assert inbox.poll() is None, "and at once after that one more"
    now_s += 2 * REST_S
    message = inbox.poll()
    assert message is not None and bytes(message[:4]) == b"text"
    inbox.close(Idle())


class ThreeLayers:
    """A first stage that asks between its layers."""

    n_embd, is_last = 4, False

    def __init__(self, between: Callable[[], object]) -> None:
        self.between = between

    def apply(self, ops: Sequence[KvOp]) -> None: ...

    def next_position(self, seq: int) -> int:
        return 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        for _ in range(3):
            assert not stop()
            self.between()
        return np.zeros((len(batch.positions), 4), np.float32)


class StoppingLayers(ThreeLayers):
    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:  # type: ignore[override]
        return None if any(stop() for _ in range(3)) else super().evaluate(batch, stop)


def test_a_head_that_computes_a_stage_hears_verdicts_meanwhile() -> None:
    heard: list[bool] = []
    content = bytes(encode_verdict(Verdict(1, (7,))))
    worker = StageWorker(ThreeLayers(lambda: heard.append(bool(pipeline.ledger.verdicts))), lambda: 0.0, True)
    comm = slow_comm(N_LOOKS + 3, content)  # 16 looks before the run, the last ones between its layers
    pipeline = HeadPipeline(comm, [0, 1], worker, verdict_bytes(1), decode_verdict)
    pipeline.submit(Run(1, [Row(0, 5, 0, (0,))]))
    pipeline.work()
    assert heard[-1] and pipeline.poll() == Verdict(1, (7,))
    assert pipeline.ledger.verdicts[0][1] == 1


def test_what_fails_between_the_layers_of_a_head_fails_when_the_run_is_sent() -> None:
    """A run that is neither sent nor answered is waited for for ever: a batch whose disk was full did so."""
    n_calls: list[None] = []
    comm, worker = SlowComm(NEVER, b""), StageWorker(ThreeLayers(lambda: None), lambda: 0.0, True)
    pipeline = HeadPipeline(cast(Comm, comm), [0, 1], worker, verdict_bytes(1), decode_verdict)

    def fail() -> None:
        n_calls.append(None)
        raise UserError("the disk is full")

    pipeline.listen_by(fail)
    for number in (1, 2):
        pipeline.submit(Run(number, [Row(0, 5, 0, (0,))]))
        with pytest.raises(UserError, match="the disk is full"):
            pipeline.work()
        assert len(n_calls) == number, "nothing is asked twice of what has failed"
        assert comm.sent.count((1, Tag.PIPELINE)) == number


def test_a_run_of_the_head_is_cancelled_where_it_is_asked_to_stop() -> None:
    """It may take longer than an orderly end may."""
    comm, asked = SlowComm(NEVER, b""), iter([None, None])

    def check() -> None:
        if next(asked, "stop"):
            raise StopRequested("interrupted")

    worker = StageWorker(StoppingLayers(lambda: None), lambda: 0.0, True)
    pipeline = HeadPipeline(cast(Comm, comm), [0, 1], worker, verdict_bytes(1), decode_verdict)
    pipeline.submit(Run(1, [Row(0, 5, 0, (0,))]))
    with pytest.raises(StopRequested):
        pipeline.work(check)
    assert comm.sent.count((1, Tag.PIPELINE)) == 1 and len(pipeline.ledger.cancelled) == 1


def test_what_a_stage_of_the_head_lacks_is_a_fault() -> None:
    """No bad input, after which requests could be stopped one by one."""

    def fail() -> None:
        raise UserError("no memory")

    worker = StageWorker(ThreeLayers(fail), lambda: 0.0, True)
    pipeline = HeadPipeline(slow_comm(NEVER, b""), [0, 1], worker, verdict_bytes(1), decode_verdict)
    pipeline.submit(Run(1, [Row(0, 5, 0, (0,))]))
    with pytest.raises(ModelFault, match="no memory"):
        pipeline.work()


def test_messages_move_beside_large_runs_alone() -> None:
    looks: list[None] = []
    progress = Progress(lambda: looks.append(None))
    with progress.beside(LARGE_BYTES - 1):
        time.sleep(0.05)
        assert not looks
    for _ in range(2):
        looks.clear()
        with progress.beside(LARGE_BYTES):
            until(lambda: len(looks) > idle.N_LOOKS)
        looks.clear()
        time.sleep(0.05)
        assert len(looks) <= idle.N_LOOKS, "of the round that was under way"


def test_ranks_of_one_host_need_no_thread_for_progress() -> None:
    assert progress_between(cast(Comm, None), [Host("a", frozenset(), 1)] * 2) is NO_PROGRESS
