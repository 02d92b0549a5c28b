"""Experts multiplied all at once, as on a device that nobody waits for: what comes of them is what each gives alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.core.interfaces import Batch
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import make_batch, never, random_tokens
from tests.support.gguf_factory import Shape, write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.layer import of_experts, runs_without_waiting  # noqa: E402
from pipeinfer.models.torch.stage import TorchStage  # noqa: E402
from tests.models.torch.test_torch_device import ELSEWHERE, ShapesOnly, rows_of  # noqa: E402
from tests.models.torch.test_torch_queue import LateQueue, difference, runs  # noqa: E402

PARAMS = TorchParams(400, 8, 128, 64, 1, "cpu", "f32", exact=False)
SHAPES = {
    "mixtral": Shape(n_layer=2, n_embd=64, n_ff=96, n_expert=4),
    "qwen3moe": Shape("qwen3moe", n_layer=2, n_embd=64, n_ff=96, n_expert=16),
}


def load(path: Path, params: TorchParams) -> TorchStage:
    info = read_model_info(path)
    return TorchStage(open_slice(info, 0, info.n_layer), params)


@pytest.mark.parametrize("n_experts", [1, 3, 64])
@pytest.mark.parametrize("n_rows", [1, 2, 17])
def test_all_at_once_is_one_by_one(n_rows: int, n_experts: int) -> None:
    generator = torch.Generator().manual_seed(n_rows)
    n_used = min(2, n_experts)
    rows = torch.randn((n_rows, 32), generator=generator)
    gate, up = torch.randn((2, n_experts, 48, 32), generator=generator)
    down = torch.randn((n_experts, 32, 48), generator=generator)
    shares, chosen = torch.rand((n_rows, n_experts), generator=generator).topk(n_used, dim=1)
    found = of_experts(rows, chosen, shares, [gate, up, down], lambda own, other: torch.relu(own) * other)
    for row, own, share, expected in zip(rows, chosen.tolist(), shares, found, strict=True):
        parts = [down[each] @ (torch.relu(gate[each] @ row) * (up[each] @ row)) for each in own]
        assert torch.allclose(
            sum(part * part_of for part, part_of in zip(parts, share, strict=True)), expected, rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("name", SHAPES)
def test_runs_of_every_size_are_those_of_experts_one_by_one(
    tmp_path: Path, name: str, dtype: str, tolerance: float
) -> None:
    """Filled up ones, and a larger chunk, which is not."""
    path = write_model(tmp_path / f"{name}.gguf", SHAPES[name], "F32")
    plain, at_once = (load(path, replace(PARAMS, dtype=dtype, padded=padded)) for padded in (False, True))
    assert at_once._replays is not None and plain._replays is None
    tokens, at = random_tokens(300), 0
    for n in (1, 3, 64, 100, 1, 7):
        batch = make_batch(tokens[at : at + n], at, wanted=[True] * n if n <= 64 else [False] * n)
        expected, found = plain.evaluate(batch, never), at_once.evaluate(batch, never)
        assert expected is not None and found is not None
        if n <= 64:
            # of most rows in bf16: one whose router is undecided may get another expert
            assert np.median([difference(*each) for each in zip(found, expected, strict=True)]) < tolerance
        at += n


def test_they_are_prepared_ahead_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, queue = write_model(tmp_path / "model.gguf", SHAPES["qwen3moe"], "F32"), LateQueue()
    plain = load(path, PARAMS)
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", lambda device: queue)
    late, under_way = load(path, replace(PARAMS, padded=True)), []
    for n_begun, (ops, batch) in enumerate(runs()):
        for stage in (plain, late):
            stage.apply(ops)
        expected, begun = plain.evaluate(batch, never), late.begin(batch, never)
        assert expected is not None and begun is not None
        assert queue.n_done == max(0, n_begun - 1), "the host waited before it had to"
        under_way.append((begun, expected.copy()))
        if len(under_way) == 2:
            begun, expected = under_way.pop(0)
            assert difference(begun.result(), expected) < 1e-5


def test_they_meet_nothing_of_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's kernel, the one for shapes takes bf16 alone."""
    assert not runs_without_waiting(ELSEWHERE, torch.float32)
    monkeypatch.setattr("pipeinfer.models.torch.stage.find_device", lambda asked, local_rank: ELSEWHERE)
    monkeypatch.setattr("pipeinfer.models.torch.stage.DeviceQueue", ShapesOnly)
    path = write_model(tmp_path / "model.gguf", SHAPES["qwen3moe"], "Q8_0")
    at = 0
    for padded in (True, False):
        stage = load(path, replace(PARAMS, device="cuda", dtype="bf16", padded=padded))
        for n in (3, 100, 1):
            rows = np.arange(n, dtype=np.int32)
            batch = Batch(rows + 5, rows + at, [(0,)] * n, None, rows % 3 == 0)
            assert rows_of(stage.begin(batch, never)).shape == ((n + 2) // 3, stage.n_vocab)
            at += n
        at = 0


def test_a_device_without_such_a_kernel_has_them_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_without_waiting(torch.device("cpu"), torch.bfloat16)
    path = write_model(tmp_path / "model.gguf", SHAPES["mixtral"], "F32")
    monkeypatch.setattr("pipeinfer.models.torch.stage.runs_without_waiting", lambda device, dtype: False)
    assert load(path, replace(PARAMS, padded=True))._replays is None
    for params in (replace(PARAMS, exact=True), replace(PARAMS, dtype="int8"), replace(PARAMS, dtype="int4")):
        stage = load(path, replace(params, padded=True))
        assert stage._replays is None, "each has its own rows"
