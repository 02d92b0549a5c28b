"""Layers on a device that is not there: torch's fake tensors compute shapes alone, and refuse what a GPU refuses:
tensors of the host and of the device in one operation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import never
from tests.support.gguf_factory import Shape, write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from pipeinfer.models.torch import stage as stages  # noqa: E402
from pipeinfer.models.torch.attention import MaskedCells  # noqa: E402
from pipeinfer.models.torch.device import DeviceQueue, DoneMark, TorchRows  # noqa: E402
from pipeinfer.models.torch.layer import Layer, Matrix  # noqa: E402
from pipeinfer.models.torch.stage import TorchStage  # noqa: E402

GPU = torch.device("meta")
SHAPES = {
    "llama": Shape(n_layer=2),
    "qwen2": Shape("qwen2", n_layer=2),
    "qwen3": Shape("qwen3", n_layer=2),
    "qwen3moe": Shape("qwen3moe", n_layer=2, n_expert=4),
}


class FakeQueue(DeviceQueue):
    """Of a device without streams. What comes back to the host stays there, or would have to be computed."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self._is_async = False

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def upload(self, values: Any) -> Any:
        return values.to(GPU)

    def mark(self) -> Any:
        return DoneMark()


class NoInference:
    """torch, for which tensors that were made to infer with are fake too."""

    inference_mode = staticmethod(torch.no_grad)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def moved(value: Any) -> Any:
    """The same on the GPU, without its numbers."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
    if isinstance(value, list):
        return [moved(each) for each in value]
    if isinstance(value, (Layer, Matrix)):
        for name, own in vars(value).items():
            setattr(value, name, moved(own))
    elif is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        if any(isinstance(each, torch.Tensor) for each in own.values()):
            return replace(value, **{name: moved(each) for name, each in own.items()})
    return value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "torch", NoInference())
    monkeypatch.setattr("pipeinfer.models.torch.weights.torch", NoInference())
    monkeypatch.setattr("pipeinfer.models.torch.device.torch", NoInference())
    monkeypatch.setattr(stages, "rows_together", lambda matrices, n_threads: 4)


def open_moved(path: Path, edges: tuple[int, int], dtype: str, padded: bool, exact: bool) -> TorchStage:
    """Loaded on the CPU."""
    params = TorchParams(512, 8, 256, 64, 1, "cpu", dtype, exact=exact, padded=padded)
    return TorchStage(open_slice(read_model_info(path), *edges), params)


def move(stage: TorchStage) -> None:
    """Within FakeTensorMode."""
    names = ["_layers", "_caches", *(["_norm", "_head"] if stage.is_last else [])]
    for name in names:
        setattr(stage, name, moved(getattr(stage, name)))
    stage.device, stage._queue, stage._in_order = GPU, FakeQueue(), stage._exact
    if stage._replays:
        stage._replays = stages.Replays(stage._compute, 512, stage._queue, records=False)


def rows_of(future: Any) -> Any:
    assert future.rows.device == GPU
    return future.rows


def evaluate_all(first: TorchStage, last: TorchStage, rounded: bool) -> None:
    """Runs that are filled up and larger ones, a block of a prompt, without rows that are wanted too; what passes from
    the first slice to the last by way of the host or not."""
    at = 0
    for n, wanted in ((3, True), (100, True), (1, True), (64, True), (2, False)):
        rows = np.arange(n, dtype=np.int32)
        batch = Batch(rows + 5, rows + at, [(0,)] * n, None, (rows % 3 == 0) & wanted)
        batch.span = Span(at, at + n) if n == 64 else None
        assert rows_of(first.begin(batch, never)).shape == (n, first.n_embd)
        batch.hidden = np.zeros((n, first.n_embd), np.float32)
        assert rows_of(last.begin(batch, never)).shape == (batch.wanted.sum(), last.n_vocab)
        for stage in (first, last):
            stage.apply([KvOp(OpKind.REMOVE, 0, first=at)])
        left = rows_of(first.begin_on_device(batch, never, rounded))
        batch.hidden = None
        batch.on_device = TorchRows(left, first._queue).pick(range(n)).spread(range(n), n)
        assert rows_of(last.begin(batch, never)).shape == (batch.wanted.sum(), last.n_vocab)
        at += n


KINDS = [
    (name, dtype, padded, exact)
    for name, dtype, padded, exact in product(SHAPES, ("f32", "bf16", "int8"), (True, False), (True, False))
    # of other families the weights differ, not the way; of experts one by one the device is asked for their numbers
    if name == "llama" or (padded and not exact and (dtype == "bf16" or name != "qwen3moe"))
]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("name", "dtype", "padded", "exact"), KINDS)
def test_nothing_of_the_hosts_meets_the_devices(
    tmp_path: Path, name: str, dtype: str, padded: bool, exact: bool
) -> None:
    path = write_model(tmp_path / "model.gguf", SHAPES[name], "F32")
    first, last = (open_moved(path, edges, dtype, padded, exact) for edges in ((0, 1), (1, 2)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(first)
        move(last)
        evaluate_all(first, last, rounded=dtype != "f32")


@pytest.mark.usefixtures("fake")
def test_it_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cells of a block stay on the host."""
    by_sequence = MaskedCells.by_sequence

    def on_host(*words: Any) -> MaskedCells:
        cells = by_sequence(*words)
        cells.parts = [part._replace(cells=part.cells.to("cpu")) for part in cells.parts]  # type: ignore[union-attr]
        return cells

    monkeypatch.setattr(MaskedCells, "by_sequence", on_host)
    path = write_model(tmp_path / "model.gguf", SHAPES["llama"], "F32")
    first, last = (open_moved(path, edges, "f32", padded=True, exact=True) for edges in ((0, 1), (1, 2)))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match="on the same device"):
        move(first)
        move(last)
        evaluate_all(first, last, rounded=False)
