"""Every policy on one to five ranks writes the target's own text, token for token.

Greedy text is that of plain llama-cpp-python; sampled text is that of one process that does not speculate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies import POLICIES
from tests.support.delayed import run_delayed
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import plain_tokens_after, run_json

pytestmark = pytest.mark.long

RANKS, TEMPERATURES, N_PREDICT = range(1, 6), ("0", "0.8"), 256
PROMPTS = {
    "1 token": ("def", 0),
    "40 tokens": ("x = [1, 2]\n" * 5, 0),
    "700 tokens": ("x = [1, 2]\n" * 87, 1700),
    "1900 tokens": ("x = [1, 2]\n" * 237, 4100),
}
"""The text, and the context, if that must be longer than the shipped target was trained for."""

PARTS = ("--no-cancel", "--no-continuous", "--no-async", "--no-partitions", "--width 8 -ps 0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def words_of(model: str, prompt: str, folder: Path) -> list[str]:
    """The options that all runs of a model and prompt share. `model`: shipped, or what random weights are kept as."""
    target, draft = TARGET, DRAFT
    if model != "shipped":
        shape = Shape(n_layer=5, n_vocab=2048, peaky=12.0)
        target, draft = folder / f"{model}.gguf", folder / "draft.gguf"
        if not target.exists():
            write_model(target, shape, model)
            write_model(draft, replace(shape, n_layer=2), "Q8_0")
    text, n_ctx = PROMPTS[prompt]
    words = ["-m", str(target), "-md", str(draft), "-n", str(N_PREDICT), "-p", text, "--ignore-eos", "--seed", "7"]
    return words + (["-c", str(n_ctx)] if n_ctx else [])


def expected_tokens(words: Sequence[str]) -> list[int]:
    alone = run_json(1, [*words, "--policy", "iterative", "-t", "1"])  # one thread waits for no other
    tokens: list[int] = alone["tokens"]
    return tokens if alone["temp"] > 0 else plain_tokens_after(Path(words[1]), alone, N_PREDICT)


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("model", ["shipped", "Q8_0", "Q4_K_M", "Q6_K"])
def test_every_policy_writes_the_text_on_any_number_of_ranks(folder: Path, model: str, prompt: str, temp: str) -> None:
    words = [*words_of(model, prompt, folder), "--temp", temp]
    expected = expected_tokens(words)
    for n_ranks in RANKS:
        for policy in POLICIES:
            found = run_json(n_ranks, [*words, "--policy", policy])["tokens"]
            assert found == expected, f"{policy} on {n_ranks} ranks"


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_pipeinfer_without_one_of_its_parts_writes_the_text(folder: Path, prompt: str, temp: str) -> None:
    words = [*words_of("shipped", prompt, folder), "--temp", temp]
    expected = expected_tokens(words)
    for n_ranks in RANKS:
        for part in PARTS:
            found = run_json(n_ranks, [*words, "--policy", "pipeinfer", *part.split()])["tokens"]
            assert found == expected, f"{part} on {n_ranks} ranks"


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_pause_write_the_text(folder: Path, policy: str, temp: str) -> None:
    words = [*words_of("shipped", "40 tokens", folder), "--temp", temp]
    expected = expected_tokens(words)
    for n_ranks in RANKS:
        assert run_delayed(n_ranks, [*words, "--policy", policy], n_ranks, 300)["tokens"] == expected, n_ranks
