"""Scores of prompts of each kind of model and of long prompts: the same alone and beside others, on one rank and on
several."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.server.test_scoring import MIXED, SHAPE, SHORT, WHOLE, plain_scores
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model
from tests.support.serving import Served

PROMPTS = [WHOLE, SHORT, MIXED, WHOLE[3:]]


class Scores(NamedTuple):
    """`of_prompts`: of each prompt, of all tokens but the first. `version`: the server's, with its numerics' name."""

    of_prompts: list[list[float]]
    version: str


def scores(model: Path, n_ranks: int, prompts: Sequence[Sequence[int]], *words: str) -> Scores:
    """All are asked for at once, but on one rank, where they come one after another."""
    n_at_once = len(prompts) if n_ranks > 1 else 1
    n_ctx = str(sum(map(len, prompts)) + 64 * len(prompts))
    with Served(n_ranks, ["-m", str(model), "--parallel", "4", "-c", n_ctx, *words]) as server:
        server.http.timeout = 120

        def score(prompt: Sequence[int]) -> list[float]:
            answer = server.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)
            first, *others = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert first is None
            return others

        with ThreadPoolExecutor(n_at_once) as clients:
            found = list(clients.map(score, prompts))
        return Scores(found, server.http.get("/v1/models").json()["data"][0]["system_fingerprint"])


@pytest.mark.parametrize("name", ["mamba", "qwen3next"])
def test_of_models_with_states(tmp_path: Path, name: str) -> None:
    model = write_random_model(tmp_path / "model.gguf", replace(MODELS[name], with_vocab=True))
    prompts = [[265 + token % 55 for token in prompt] for prompt in PROMPTS]
    alone, beside = (scores(model, n_ranks, prompts) for n_ranks in (1, 2))
    assert alone == beside, "the same bits"
    # AMX kernels add up a row in another order: 2e-7 of a product, and 0.02 of a score once that rounds an activation
    # to the next of 8 bits
    (chosen, _), *_ = plain_scores(model, prompts[1:2], repacked="q8_0" in alone.version)
    assert alone.of_prompts[1] == pytest.approx(chosen, abs=1e-5)


def test_of_long_prompts(tmp_path: Path) -> None:
    shape = Shape(n_layer=3, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_vocab=384)
    model = write_model(tmp_path / "model.gguf", shape)
    long = [265 + at * at % 113 for at in range(8000)]
    alone, beside = (scores(model, n_ranks, [long, SHORT, long[:700]]) for n_ranks in (1, 3))
    assert alone == beside and len(alone.of_prompts[0]) == 7999
    assert alone.of_prompts[2][:639] == alone.of_prompts[0][:639], "blocks of 64 rows are the same, whatever follows"


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_of_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", SHAPE)
    by_torch = [scores(model, n_ranks, PROMPTS, "--backend", "torch").of_prompts for n_ranks in (1, 2)]
    for found, expected, (chosen, _) in zip(*by_torch, plain_scores(model, PROMPTS), strict=True):
        assert found == pytest.approx(expected, abs=0.02)
        assert np.abs(np.subtract(found, chosen)).mean() < 0.1, "libllama rounds activations to 8 bits"
