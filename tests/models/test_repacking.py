"""Exact numerics with repacked weights: what kernels are found to do, and rows alone, in batches, trees and slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.disk_cache import DiskCache
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama import repacking
from pipeinfer.models.llama.params import (
    IS_X86,
    NARROW,
    LlamaParams,
    TypeRows,
    largest_part,
    matrix_bytes,
    worth_repacking,
)
from pipeinfer.models.llama.repacking import N_OUT, SIZES, Kernels, Repacked, repacked_types
from pipeinfer.models.llama.stage import LlamaStage
from tests.models.test_llama_stage import TreeDriver, loaded, make_batch, random_tokens, run  # noqa: F401
from tests.support.gguf_factory import Shape, write_model

Q8_0, Q4_K = 8, 12
FOUND = tuple(TypeRows(type, n_rows) for type, n_rows, _ in repacked_types())
Load = Callable[..., list[LlamaStage]]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q4_0", "Q2_K", "IQ4_NL"])
def test_rows_are_the_same_in_every_batch_tree_and_slice(
    tmp_path: Path,
    loaded: Load,  # noqa: F811
    type_name: str,
    n_threads: int,
) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_layer=2, peaky=8.0), type_name)
    if not {each.type for each in FOUND} & matrix_bytes(read_model_info(path)).keys():
        pytest.skip(f"this libggml repacks nothing of {type_name}")
    params = LlamaParams(768, 16, n_batch=64, n_outputs_max=64, n_threads=n_threads, repacked=FOUND)
    (alone,) = loaded(path, (), params=replace(params, n_threads=1))
    tokens, at = random_tokens(260), 0
    expected = np.array([run([alone], make_batch([token], i))[0] for i, token in enumerate(tokens)])
    (stage,), slices = loaded(path, (), params=params), loaded(path, (1,), params=params)
    for n in (*range(1, 13), 31, 32, 33, 64):
        for stages in ([stage], slices):
            assert np.array_equal(run(stages, make_batch(tokens[at : at + n], at)), expected[at : at + n]), n
        at += n if at + n < 150 else 0
        for each in (stage, *slices):
            each.apply([KvOp(OpKind.REMOVE, 0, first=at)])
    trees = loaded(path, (1,), params=params)
    driver = TreeDriver(trees, tokens, expected, seed=n_threads)
    driver.prefill(100)
    while driver.at < 240:
        driver.step()
    (plain,) = loaded(path, (), params=replace(params, repacked=()))
    if IS_X86 and type_name != "IQ4_NL":
        rows = [run([plain], make_batch([token], at))[0] for at, token in enumerate(tokens[:20])]
        assert not np.array_equal(rows, expected[:20]), "nothing was repacked"


class OtherFrom(Kernels):
    """Add up in another order from so many rows on, or where there are two threads."""

    def __init__(self, n_rows: int, n_threads: int = 9) -> None:
        super().__init__()
        self.n_rows, self.n_threads = n_rows, n_threads

    def _multiply(self, matrix: int, rows: FloatArray, n_threads: int) -> FloatArray:
        changes = len(rows) >= self.n_rows or n_threads >= self.n_threads
        return np.full((len(rows), N_OUT), float(changes), np.float32)


@pytest.mark.parametrize(("kernels", "expected"), [((6,), 5), ((2,), 1), ((99,), SIZES[-1]), ((99, 2), 1)])
def test_as_many_rows_as_have_the_bits_of_single_rows(kernels: tuple[int, ...], expected: int) -> None:
    rows = np.zeros((SIZES[-1], 4), np.float32)
    assert OtherFrom(*kernels)._check(Q4_K, 0, rows).n_rows == expected


def test_what_was_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "user_cache", lambda: DiskCache(tmp_path))
    find: Any = repacked_types.__wrapped__
    found = find()
    assert found == repacked_types() and all(1 <= each.n_rows <= SIZES[-1] for each in found)
    monkeypatch.setattr(Kernels, "check", lambda *_: pytest.fail("it was multiplied again"))
    assert find() == found and all(isinstance(each, Repacked) for each in found)
    monkeypatch.setattr(repacking.ggml, "amx_works", lambda: False)
    assert find() == ()


def test_weights_are_repacked_where_that_is_faster(tmp_path: Path) -> None:
    mostly = read_model_info(write_model(tmp_path / "k.gguf", type_name="Q4_K_M"))
    bytes_of = matrix_bytes(mostly)
    assert 2 * bytes_of[Q4_K] > sum(bytes_of.values())
    params = LlamaParams(256)
    three = TypeRows(Q4_K, 3)
    assert worth_repacking(mostly, params, (three, TypeRows(Q8_0, 7))) == (three,)
    assert worth_repacking(mostly, params, (TypeRows(Q4_K, 2),)) == ()
    assert largest_part(mostly, replace(params, repacked=(three,))) == 3
    hardly = read_model_info(write_model(tmp_path / "8.gguf", type_name="Q8_0"))
    assert worth_repacking(hardly, params, (three,)) == ()
    # Q6_K has the lesser part of the bytes: smaller parts do not pay for it
    other = next(type for type in bytes_of if type != Q4_K)
    assert worth_repacking(mostly, params, (TypeRows(other, 3),)) == ()
    assert worth_repacking(mostly, params, (TypeRows(other, 32),)) == (TypeRows(other, 32),)
    narrow = replace(mostly.tensors[-1], name="blk.0.ffn_down_shexp.weight", shape=(NARROW, 64), type=Q8_0)
    assert worth_repacking(replace(mostly, tensors=(*mostly.tensors, narrow)), params, (three,)) == ()


@pytest.mark.parametrize("n_in", [2 * NARROW, 256, 2560])
def test_what_one_shape_shows_holds_of_others(n_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all but NARROW ones, beyond which AMX kernels read."""
    monkeypatch.setattr(repacking, "N_IN", n_in)
    kernels = Kernels()
    for each in repacked_types():
        if n_in % GGML_QUANT_SIZES[GGMLQuantizationType(each.type)][0] == 0:
            assert (found := kernels.check(each.type)) and found.n_rows == each.n_rows, each
