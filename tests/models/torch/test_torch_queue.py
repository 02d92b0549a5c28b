"""Runs that are begun before the last one is done, on a device that works late: no run's inputs are overwritten while
the device has still to read them, and the host waits once a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelFault
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import make_batch, never, random_tokens
from tests.support.gguf_factory import Shape, write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.device import DeviceQueue, HostFuture  # noqa: E402
from pipeinfer.models.torch.stage import TorchStage  # noqa: E402

SMALL = Shape(n_layer=2, n_embd=64, n_ff=96, peaky=8.0)
PARAMS = TorchParams(300, 8, 64, 64, 1, "cpu", "f32", exact=False, padded=True)


class LateMark:
    def __init__(self, queue: LateQueue) -> None:
        self.queue, self.n_before = queue, queue.n_asked

    def query(self) -> bool:
        return self.queue.n_done >= self.n_before

    def synchronize(self) -> None:
        if not self.query():
            self.queue.n_waits += 1
            self.queue.work_off(self.n_before)


class LateQueue(DeviceQueue):
    """Does nothing before somebody waits for it: the latest that a device may be."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._work: list[Callable[[], None]] = []
        self.n_asked = self.n_done = self.n_waits = 0

    def do(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.n_asked += 1

    def mark(self) -> Any:
        return LateMark(self)

    def work_off(self, n: int) -> None:
        with torch.inference_mode():
            while self.n_done < n:
                self._work.pop(0)()
                self.n_done += 1


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchStage, TorchStage, LateQueue]:
    """A stage that computes at once, one that does late, and the latter's queue."""
    info = read_model_info(write_model(tmp_path / "small.gguf", SMALL, "F32"))
    plain = TorchStage(open_slice(info, 0, 2), replace(PARAMS, padded=False))
    queue = LateQueue()
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", lambda device: queue)
    return plain, TorchStage(open_slice(info, 0, 2), PARAMS), queue


def runs() -> list[tuple[list[KvOp], Batch]]:
    """Single tokens and trees of some sizes, with branches that come and go in between: all that a run's inputs say
    changes from one to the next."""
    tokens, rng, at, found = random_tokens(300), np.random.default_rng(4), 0, []
    for _ in range(30):
        n = int(rng.choice([1, 1, 2, 3, 7, 12]))
        ops = [KvOp(OpKind.REMOVE, 1), KvOp(OpKind.COPY, 0, 1, 0, at)] if at else []
        batch = make_batch(tokens[at : at + n], at, wanted=[bool(rng.integers(2)) for _ in range(n)])
        if at and rng.integers(2):
            batch = Batch(
                np.append(batch.tokens, 7),
                np.append(batch.positions, at).astype(np.int32),
                [*batch.seqs, (1,)],
                None,
                np.append(batch.wanted, True),
            )
        found.append((ops, batch))
        at += n
    return found


def difference(found: FloatArray, expected: FloatArray) -> float:
    return float(np.linalg.norm(found - expected) / max(1e-9, float(np.linalg.norm(expected))))


def test_a_run_is_prepared_while_the_device_has_not_begun_the_last(
    stages: tuple[TorchStage, TorchStage, LateQueue],
) -> None:
    plain, late, queue = stages
    under_way: list[tuple[HostFuture, FloatArray]] = []
    for n_begun, (ops, batch) in enumerate(runs()):
        for stage in (plain, late):
            stage.apply(ops)
        expected = plain.evaluate(batch, never)
        begun = late.begin(batch, never)
        assert expected is not None and begun is not None
        assert not begun.is_done and queue.n_done == max(0, n_begun - 1), "the host waited before it had to"
        under_way.append((begun, expected.copy()))
        if len(under_way) == 2:
            found, expected = under_way[0][0].result(), under_way.pop(0)[1]
            assert found.shape == expected.shape and difference(found, expected) < 1e-5
            assert queue.n_waits == n_begun, "the host waits once a run"


def test_a_third_run_waits_for_the_first(stages: tuple[TorchStage, TorchStage, LateQueue]) -> None:
    """There are two versions of inputs: the oldest is free again when the device is done with it, not before."""
    plain, late, queue = stages
    under_way, all_expected = [], []
    for n_begun, (ops, batch) in enumerate(runs()[:9]):
        for stage in (plain, late):
            stage.apply(ops)
        expected = plain.evaluate(batch, never)
        assert expected is not None
        under_way.append(late.begin(batch, never))
        all_expected.append(expected.copy())
        assert queue.n_done == max(0, n_begun - 1)
    for begun, expected in zip(under_way, all_expected, strict=True):
        assert begun is not None and difference(begun.result(), expected) < 1e-5


def test_without_that_wait_results_are_wrong(
    stages: tuple[TorchStage, TorchStage, LateQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above would see if the host did not heed the device: all but the last two runs are others."""
    plain, late, queue = stages
    monkeypatch.setattr(LateMark, "synchronize", lambda mark: None)
    under_way = []
    for at, token in enumerate(random_tokens(8)):
        expected, begun = plain.evaluate(make_batch([token], at), never), late.begin(make_batch([token], at), never)
        assert expected is not None and begun is not None
        under_way.append((begun, expected.copy()))
    queue.work_off(queue.n_asked)
    assert sum(difference(begun.result(), expected) > 1e-3 for begun, expected in under_way) >= 6


def test_a_run_that_is_stopped_before_it_began_leaves_those_under_way_alone(
    stages: tuple[TorchStage, TorchStage, LateQueue],
) -> None:
    plain, late, queue = stages
    first, dead, after = make_batch([5, 6, 7], 0), make_batch([8, 9], 3), make_batch([10], 3)
    begun = late.begin(first, never)
    assert late.begin(dead, lambda: True) is None and late.next_position(0) == 3 and queue.n_done == 0
    last = late.begin(after, never)
    for batch, found in ((first, begun), (after, last)):
        expected = plain.evaluate(batch, never)
        assert expected is not None and found is not None and difference(found.result(), expected) < 1e-5


# --- recordings -------------------------------------------------------------------------------------------------------


class PlayedGraph:
    """Runs again what was recorded: reads where its inputs were then, writes where its result was."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute, self.found, self.n_replays = compute, compute(), 0

    def replay(self) -> None:
        self.found.copy_(self.compute())
        self.n_replays += 1


class PlayedRecorder:
    def __init__(self) -> None:
        self.graphs: list[PlayedGraph] = []

    def record(self, compute: Callable[[], Any]) -> tuple[PlayedGraph, Any]:
        self.graphs.append(PlayedGraph(compute))
        return self.graphs[-1], self.graphs[-1].found


@pytest.mark.parametrize("exact", [True, False])
def test_recordings_are_replayed_with_each_run_s_own_inputs(
    stages: tuple[TorchStage, TorchStage, LateQueue], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exact: bool
) -> None:
    """Made ahead, or when a size is first met; with exact numerics those of many rows and cells are not."""
    monkeypatch.setattr("pipeinfer.models.torch.stage.MOST_EXACT", 4 * 256)
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", DeviceQueue)
    plain, recorder = stages[0], PlayedRecorder()
    stage = TorchStage(open_slice(read_model_info(tmp_path / "small.gguf"), 0, 2), replace(PARAMS, exact=exact))
    assert stage._replays is not None
    stage._replays._recorder = recorder  # type: ignore[assignment]
    with torch.inference_mode():
        stage._replays.record_ahead(stage._no_inputs())
    # 256 cells and all 300, of 1, 2, 4 and 8 rows
    assert len(recorder.graphs) == (5 if exact else 8) and len(stage._replays._frames) == 8
    for ops, batch in runs():
        for each in (plain, stage):
            each.apply(ops)
        expected, found = plain.evaluate(batch, never), stage.evaluate(batch, never)
        assert expected is not None and found is not None and difference(found, expected) < 1e-5
    assert sum(graph.n_replays for graph in recorder.graphs) > (5 if exact else 29)


def test_a_device_without_room_for_a_run_is_named(
    stages: tuple[TorchStage, TorchStage, LateQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*inputs: Any) -> None:
        raise torch.OutOfMemoryError

    plain, _, _ = stages
    monkeypatch.setattr(plain, "_through_layers", full)
    with pytest.raises(ModelFault, match=r"no room on cpu for a run of 3 rows through layers 0-1 of .*; use a"):
        plain.evaluate(make_batch([5, 6, 7], 0), never)
