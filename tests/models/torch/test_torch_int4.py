"""Weights in 4 bits: as the file has them, or rounded; their products; what a device that cannot multiply them says."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.matrices import MIDDLE, read_four_bits
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import make_batch, random_tokens, run
from tests.support.gguf_factory import Shape, write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.matrices import (  # noqa: E402
    GROUP,
    Int4,
    Int4Rows,
    Int8,
    Weight,
    check_device,
    multiply,
    pack_int4,
    to_int4,
)
from pipeinfer.models.torch.stage import TorchStage  # noqa: E402
from pipeinfer.models.torch.weights import Weights  # noqa: E402

CPU = torch.device("cpu")
WIDE = Shape(n_layer=2, n_embd=256, n_ff=512)
FAMILY = {
    "llama": WIDE,
    "qwen2": replace(WIDE, arch="qwen2"),
    "qwen3": replace(WIDE, arch="qwen3"),
    "qwen3moe": replace(WIDE, arch="qwen3moe", n_expert=4),
}


def numbers_of(rows: Int4Rows) -> Any:
    """(n_out, n_in) what they stand for."""
    whole = torch.stack([rows.pairs >> 4, rows.pairs & 15], -1).view(len(rows.pairs), -1, GROUP).float()
    scale, offset = rows.steps.float()[..., None].unbind(-2)
    return ((whole - MIDDLE) * scale + offset).view(len(rows.pairs), -1)


def difference(found: FloatArray, expected: FloatArray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def as_numbers(weight: Weight, n_in: int) -> FloatArray:
    """(n_out, n_in) by its products."""
    found: FloatArray = multiply(torch.eye(n_in), weight).T.numpy()
    return found


@pytest.mark.parametrize("n_rows", [1, 7, 40])
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 32), (33, 96), (200, 256)])
def test_int4_multiplies_with_the_nearest_of_16_numbers_a_group(
    monkeypatch: pytest.MonkeyPatch, n_out: int, n_in: int, n_rows: int
) -> None:
    """A group's scale is its own, however far apart the sizes of rows are; packed in pieces or at once is the same."""
    generator = torch.Generator().manual_seed(n_rows)
    matrix = torch.randn((n_out, n_in), generator=generator) * torch.logspace(-6, 6, n_out)[:, None]
    matrix[5], matrix[6] = 0.0, 3.0
    kept, rows = to_int4(matrix), torch.randn((n_rows, n_in), generator=generator).bfloat16()
    again, groups = numbers_of(kept), matrix.view(n_out, -1, GROUP)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    wrong = (again - matrix).abs().view(groups.shape).amax(-1)
    assert (wrong <= 0.52 * step + 0.02 * groups.abs().amax(-1)).all()
    assert not again[5].any() and (again[6] == 3.0).all()
    sizes = again.norm(dim=1).clamp_min(1e-30)  # so that every row of the matrix counts
    at_once = multiply(rows.float(), pack_int4(kept)) / sizes
    monkeypatch.setattr("pipeinfer.models.torch.matrices.PACKED_PIECE", 1)
    assert torch.equal(multiply(rows.float(), pack_int4(kept)) / sizes, at_once)
    assert difference(at_once.numpy(), (rows.float() @ again.T / sizes).numpy()) < 8e-3


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q4_K"])
def test_types_of_4_bits_are_read_as_they_are(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    rng = np.random.default_rng(1)
    n_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (40, n_bytes), np.uint8)
    for at in (0, 2):  # scales that are numbers
        data[:, at : at + 2] = rng.standard_normal((40, 1)).astype(np.float16).view(np.uint8)
    expected = gguf.quants.dequantize(data, kind).reshape(-1, GROUP)
    found = read_four_bits(int(kind), data.tobytes())
    own = (found.numbers.astype(np.float32) - MIDDLE) * found.scale[:, None] + found.offset[:, None]
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("type_name", "allowed"), [("Q4_0", 5e-3), ("Q4_K_S", 6e-3), ("Q8_0", 0.1), ("F16", 0.1)])
def test_a_file_in_4_bits_loses_next_to_nothing(tmp_path: Path, type_name: str, allowed: float) -> None:
    """But a rounding of scales to bf16; other files are rounded. The order of heads' rows is llama's own."""
    path = write_model(tmp_path / "model.gguf", WIDE, type_name)
    source = open_slice(read_model_info(path), 1, 2)
    kept, plain = (Weights(source, dtype, CPU) for dtype in ("int4", "f32"))
    backwards = lambda name: torch.arange(kept.tensors[name].shape[1]).flip(0)  # noqa: E731
    for names in (["attn_q", "attn_k"], ["ffn_gate", "ffn_up"], ["attn_output"]):
        matrices = [
            weights.matrix(*(f"blk.0.{name}.weight" for name in names), order=backwards) for weights in (kept, plain)
        ]
        assert isinstance(matrices[0], Int4)
        found, expected = (as_numbers(matrix, WIDE.n_embd) for matrix in matrices)
        assert difference(found, expected) < allowed
        assert found.shape == tuple(matrices[0].shape)
    assert isinstance(kept.matrix("token_embd.weight"), Int8)
    for weights in (kept, plain):
        weights.close()
    source.close()


def test_rows_that_are_no_whole_groups_stay_in_bf16(tmp_path: Path) -> None:
    path = write_model(tmp_path / "narrow.gguf", Shape(n_layer=1, n_embd=48, n_head=4, n_head_kv=2, n_ff=96), "F32")
    with closing(Weights(open_slice(read_model_info(path), 0, 1), "int4", CPU)) as weights:
        narrow, wide = weights.matrix("blk.0.ffn_up.weight"), weights.matrix("blk.0.ffn_down.weight")
    assert isinstance(narrow, torch.Tensor) and narrow.dtype is torch.bfloat16
    assert isinstance(wide, Int4)


@pytest.mark.parametrize("name", FAMILY)
def test_logits_in_int4_are_nearly_those_of_float32(tmp_path: Path, name: str) -> None:
    """Of a file in 4 bits, cut in two; experts too. Most rows: one whose router is undecided may get another."""
    path = write_model(tmp_path / f"{name}.gguf", FAMILY[name], "Q4_0")
    info, batch, found = read_model_info(path), make_batch(random_tokens(33), 0), {}
    for dtype in ("f32", "int4"):
        params = TorchParams(64, 4, 64, 64, 1, "cpu", dtype, exact=False)
        chain = [TorchStage(open_slice(info, *edges), params) for edges in ((0, 1), (1, 2))]
        found[dtype] = run(chain, batch)
    apart = np.median([difference(*rows) for rows in zip(found["int4"], found["f32"], strict=True)])
    assert 1e-3 < apart < 3e-2


def test_a_device_whose_kernel_is_missing_or_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(CPU)
    right = torch.ops.aten._weight_int4pack_mm_for_cpu

    def wrong(rows: Any, *others: object) -> Any:
        return right(rows, *others).flip(1)

    def missing(*others: object) -> Any:
        raise RuntimeError("no kernel image is available\nmore lines")

    for kernel, message in ((wrong, "its products are wrong"), (missing, "no kernel image is available; use")):
        monkeypatch.setattr("torch.ops.aten._weight_int4pack_mm_for_cpu", kernel)
        with pytest.raises(UserError, match=f"--backend torch:int4 does not work on cpu .*{message}"):
            check_device(CPU)
