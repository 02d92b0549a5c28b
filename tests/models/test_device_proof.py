"""How many rows have the bits of single ones, found by trying: a CPU's limits, which are known, are found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.layers import CacheTypes
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.device_proof import NONE, SIZES, prove, spans_of_kinds
from pipeinfer.models.llama.params import IS_X86, LlamaParams, largest_part
from pipeinfer.models.llama.tensor_places import TensorPlace, TensorPlaces
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model

EXACT = CacheTypes("bf16", "f16") if IS_X86 else CacheTypes("f16", "bf16")
PARAMS = LlamaParams(0, cache=EXACT, devices=())


def test_threads_change_no_bit_and_types_of_a_cache_do() -> None:
    info = read_model_info(TARGET)
    found = prove(info, PARAMS)
    assert found.n_rows == SIZES[-1] and prove(info, replace(PARAMS, n_threads=2)) == found
    assert prove(info, replace(PARAMS, cache=CacheTypes("f16", "f16"))).digest != found.digest


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_attention_that_threads_divide_is_found() -> None:
    """K and V of one type: libggml then gives each thread some cells of a single row."""
    assert prove(read_model_info(TARGET), replace(PARAMS, n_threads=2, cache=CacheTypes("f16", "f16"))).n_rows == 0


@pytest.mark.parametrize("type_name", ["F16", "Q4_K_M", "Q8_0"])
def test_the_limits_of_types_are_found(tmp_path: Path, type_name: str) -> None:
    path = write_model(tmp_path / "m.gguf", Shape(n_layer=4), type_name)
    info = read_model_info(path)
    limit = largest_part(info, replace(PARAMS, n_batch=SIZES[-1]))  # F16: 1, Q4_K_M: 7 on x86
    assert prove(info, PARAMS).n_rows == limit


def test_one_layer_of_each_kind_is_tried(tmp_path: Path) -> None:
    info = read_model_info(TARGET)
    assert list(spans_of_kinds(info, TensorPlaces())) == [(0, 1), (info.n_layer - 1, info.n_layer)]
    moved = TensorPlaces((TensorPlace.parse(r"blk\.[34]\.ffn_up=CPU"),))
    assert list(spans_of_kinds(info, moved)) == [(0, 1), (3, 4), (info.n_layer - 1, info.n_layer)]
    states = write_random_model(tmp_path / "m.gguf", MODELS["mamba2"])
    assert prove(read_model_info(states), PARAMS) == NONE
