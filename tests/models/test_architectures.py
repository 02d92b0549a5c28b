"""Every architecture that can be cut: slices against the whole model in plain llama-cpp-python, a row at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from experiments.grow import grow
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.architectures import ARCHITECTURES
from pipeinfer.models.gguf.layers import Layers
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import slice_bytes, slice_tensors
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.params import IS_X86, LlamaParams
from tests.models.test_llama_stage import load, make_batch, random_tokens, run
from tests.support.architecture_factory import N_VOCAB, write_random_model
from tests.support.architecture_models import MODELS, WITH_EXTRA_LAYERS, with_extra_layer

PARAMS = LlamaParams(n_cells=256, n_seq_max=4, n_batch=64, n_outputs_max=64)
F16, BF16 = 1, 30
BATCHES = (20, 13, 1, 1, 1, 4)


def rows_of_whole(path: Path, tokens: list[int]) -> FloatArray:
    """The logits after each token, (n, N_VOCAB): the whole file, a token at a time, flash attention, K in BF16 and V in
    F16 (with windows, or not on x86, the reverse), both in BF16 where libllama keeps only one of them."""
    library = ggml.load_library()
    options = library.llama_model_default_params()
    options.use_extra_bufts = False
    model = library.llama_model_load_from_file(str(path).encode(), options)
    assert model, ggml.last_errors()
    info = read_model_info(path)
    params = library.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    alone, rounds_keys = info.layers.shares_values, IS_X86
    params.flash_attn_type = 1
    params.type_k, params.type_v = BF16 if rounds_keys or alone else F16, F16 if rounds_keys and not alone else BF16
    context = library.llama_init_from_model(model, params)
    assert context, ggml.last_errors()
    out = []
    for token in tokens:
        batch = library.llama_batch_get_one((library.llama_token * 1)(token), 1)
        assert library.llama_decode(context, batch) == 0, ggml.last_errors()
        out.append(np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), (N_VOCAB,)).copy())
    library.llama_free(context)
    library.llama_model_free(model)
    return np.array(out)


def rows_of_slices(path: Path, cuts: tuple[int, ...], tokens: list[int]) -> FloatArray:
    """The same from a chain of slices, in batches."""
    stages, out, at = load(path, cuts, PARAMS), [], 0
    for n_rows in BATCHES:
        out.append(run(stages, make_batch(tokens[at : at + n_rows], at)))
        at += n_rows
    for stage in stages:
        stage.close()
    return np.concatenate(out)


def possible_cuts(layers: Layers, n_slices: int) -> list[tuple[int, ...]]:
    found = []
    for cuts in combinations(range(1, layers.n), n_slices - 1):
        if not any(layers.fault(first, last) for first, last in pairwise((0, *cuts, layers.n))):
            found.append(cuts)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_slices_equal_the_whole_model(tmp_path: Path, name: str) -> None:
    path = write_random_model(tmp_path / f"{name}.gguf", MODELS[name])
    tokens = random_tokens(sum(BATCHES))
    expected = rows_of_whole(path, tokens)
    assert np.isfinite(expected).all() and len(set(expected.argmax(axis=1))) > 4, "a model that says always the same"
    info = read_model_info(path)
    layers = info.layers
    for first, last in combinations(range(layers.n + 1), 2):
        held = [part.tensor.n_bytes for part in slice_tensors(info, first, last) if not part.is_hole]
        assert slice_bytes(info, first, last) == sum(held), (first, last)
    two, three = possible_cuts(layers, 2), possible_cuts(layers, 3)
    assert two and three
    for cuts in ((), two[-1], three[len(three) // 2]):
        assert np.array_equal(rows_of_slices(path, cuts, tokens), expected), cuts


@pytest.mark.parametrize("name", ["cohere2", "falcon", "gemma3", "granite", "lfm2", "llama", "mamba", "qwen2"])
def test_tied_embeddings(tmp_path: Path, name: str) -> None:
    model = replace(MODELS[name], without=(*MODELS[name].without, "/output.weight", "/output.bias"))
    path, tokens = write_random_model(tmp_path / f"{name}.gguf", model), random_tokens(40)
    info, expected = read_model_info(path), rows_of_whole(path, tokens)
    assert info.tied
    assert np.array_equal(rows_of_slices(path, possible_cuts(info.layers, 2)[0], tokens), expected)


@pytest.mark.parametrize(("name", "n_layer"), [("gemma3", 62), ("gemma2", 46)])
def test_sizes_whose_attention_is_scaled_otherwise(tmp_path: Path, name: str, n_layer: int) -> None:
    heads = {"attention.key_length": 32, "attention.value_length": 32}
    model = replace(MODELS[name], n_layer=n_layer, metadata={**MODELS[name].metadata, **heads})
    path, tokens = write_random_model(tmp_path / f"{name}.gguf", model), random_tokens(40)
    layers, expected = read_model_info(path).layers, rows_of_whole(path, tokens)
    assert not layers.exact and layers.query_scale == pytest.approx(2**0.5)
    found = rows_of_slices(path, (n_layer // 2,), tokens)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("name", WITH_EXTRA_LAYERS.split())
def test_layers_that_guess_ahead_are_left_out(tmp_path: Path, name: str) -> None:
    path, tokens = write_random_model(tmp_path / f"{name}.gguf", with_extra_layer(MODELS[name])), random_tokens(40)
    expected, info = rows_of_whole(path, tokens), read_model_info(path)
    assert info.n_layer == MODELS[name].n_layer
    assert np.array_equal(rows_of_slices(path, possible_cuts(info.layers, 2)[0], tokens), expected)
    grow(info, tmp_path / "grown.gguf", info.n_layer + 1, 0.0)
    assert np.array_equal(rows_of_whole(tmp_path / "grown.gguf", tokens), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_grown_model_computes_the_same(tmp_path: Path, name: str) -> None:
    path, tokens = write_random_model(tmp_path / f"{name}.gguf", MODELS[name]), random_tokens(8)
    info, grown = read_model_info(path), tmp_path / "grown.gguf"
    grow(info, grown, info.n_layer + 3, 0.0)
    assert np.array_equal(rows_of_whole(grown, tokens), rows_of_whole(path, tokens))


def test_every_architecture_is_tested_or_refused() -> None:
    assert set(MODELS) == {name for name, known in ARCHITECTURES.items() if not known.refused}


def test_small_models_with_latent_attention_are_told_apart(tmp_path: Path) -> None:
    """libllama takes files of 26 or 27 layers for those whose queries have no rank; slices have other lengths."""
    model = MODELS["deepseek2"]
    plain = {**model.metadata, "attention.q_lora_rank": None, "expert_gating_func": None}
    for n_layer, metadata, cuts in ((27, plain, (5,)), (30, model.metadata, (12, 20))):
        path = write_random_model(tmp_path / "model.gguf", replace(model, n_layer=n_layer, metadata=metadata))
        tokens, layers = random_tokens(40), read_model_info(path).layers
        assert np.array_equal(rows_of_slices(path, cuts, tokens), rows_of_whole(path, tokens))
        assert "must not have 26 layers" in layers.fault(0, 26) and not layers.fault(0, 25)
