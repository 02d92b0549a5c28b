"""What a GPU is told, as far as that can be seen without one: on torch's device that computes shapes alone, layers of
every type meet no tensor of the host's, and 4 bits are packed in the shape that a GPU's kernel takes."""

from __future__ import annotations

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

from pipeinfer.models.torch.device import DeviceQueue, DoneMark, TorchRows  # noqa: E402
from pipeinfer.models.torch.matrices import GROUP, Int4Rows, multiply_int4, pack_int4  # noqa: E402
from pipeinfer.models.torch.stage import TorchStage  # noqa: E402

ELSEWHERE = torch.device("meta")


class ShapesOnly(DeviceQueue):
    """Nothing can be copied back from there: the host's memory for results is there as well."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._is_async = False

    def upload(self, values: Any) -> Any:
        return values.to(self.device)

    def host_memory(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device="cpu" if dtype is torch.uint8 else self.device)


def kernel_for_gpus(rows: Any, weight: Any, group: int, steps: Any) -> Any:
    """Its shapes: torch has none for this device."""
    assert rows.device == weight.device == steps.device == ELSEWHERE
    assert rows.dtype == steps.dtype == torch.bfloat16 and weight.dtype == torch.int32
    n_tiles, n_out, n_in = 2 * weight.shape[3], 8 * weight.shape[0], rows.shape[1]
    assert weight.shape[1:3] == (n_in // (16 * n_tiles), 32) and n_out % 8 == 0
    assert group == GROUP and steps.shape == (n_in // GROUP, n_out, 2) and steps.is_contiguous()
    return rows.new_empty((len(rows), n_out))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.models.torch.stage.find_device", lambda asked, local_rank: ELSEWHERE)
    monkeypatch.setattr("pipeinfer.models.torch.stage.check_device", lambda device: None)
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", ShapesOnly)
    monkeypatch.setattr("pipeinfer.models.torch.stage.rows_together", lambda matrices, n_threads: 4)
    monkeypatch.setattr("torch.ops.aten._weight_int4pack_mm", kernel_for_gpus)


def rows_of(future: Any) -> Any:
    """The rows that are computed there."""
    assert future.rows.device == ELSEWHERE and isinstance(future.done, DoneMark)
    return future.rows


@pytest.mark.parametrize(
    ("dtype", "padded", "exact"),
    [
        (dtype, padded, padded == (at % 2 > 0))
        for at, dtype in enumerate(("f32", "bf16", "int8", "int4"))
        for padded in (True, False)
    ],
)
def test_layers_on_a_device_meet_nothing_of_the_hosts(tmp_path: Path, dtype: str, padded: bool, exact: bool) -> None:
    """Runs that are filled up and larger ones, blocks of a prompt, without rows that are wanted too; first and last
    slices, and what passes between these by way of the host or not."""
    rounded = dtype != "f32"
    info = read_model_info(write_model(tmp_path / "model.gguf", Shape("qwen3", n_layer=2), "Q4_K_M"))
    params = TorchParams(512, 8, 256, 64, 1, "cuda", dtype, exact=exact, padded=padded)
    first, last = (TorchStage(open_slice(info, *edges), params) for edges in ((0, 1), (1, 2)))
    at = 0
    for n, wanted in ((3, True), (100, True), (1, True), (64, True), (2, False)):
        rows = np.arange(n, dtype=np.int32)
        batch = Batch(rows + 5, rows + at, [(0,)] * n, None, (rows % 3 == 0) & wanted)
        batch.span = Span(at, at + n) if n == 64 else None
        assert rows_of(first.begin(batch, never)).shape == (n, info.n_embd)
        batch.hidden = np.zeros((n, info.n_embd), np.float32)
        assert rows_of(last.begin(batch, never)).shape == (batch.wanted.sum(), info.n_vocab)
        for stage in (first, last):  # once more, from device to device
            stage.apply([KvOp(OpKind.REMOVE, 0, first=at)])
        left = rows_of(first.begin_on_device(batch, never, rounded))
        assert left.shape == (n, info.n_embd) and left.dtype == (torch.bfloat16 if rounded else torch.float32)
        memory = TorchRows(left, first._queue).memory
        batch.hidden, batch.on_device = None, last.device_rows(memory, n, rounded)
        assert rows_of(last.begin(batch, never)).shape == (batch.wanted.sum(), info.n_vocab)
        at += n


@pytest.mark.parametrize("n_in", [32, 64, 96, 128, 4096])
@pytest.mark.parametrize("n_out", [8, 33, 4096])
def test_4_bits_are_packed_as_a_gpu_takes_them(n_in: int, n_out: int) -> None:
    pairs = torch.empty((2, n_out, n_in // 2), dtype=torch.uint8, device=ELSEWHERE)
    steps = torch.empty((2, n_out, n_in // GROUP, 2), dtype=torch.bfloat16, device=ELSEWHERE)
    experts = pack_int4(Int4Rows(pairs, steps))
    found = multiply_int4(torch.empty((3, n_in), dtype=torch.bfloat16, device=ELSEWHERE), experts[1])
    assert found.shape == (3, n_out) and experts[1].shape == (n_out, n_in)
