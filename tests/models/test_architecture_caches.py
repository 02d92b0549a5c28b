"""Caches other than the plain one, with exact numerics: trees, packing and prompts in blocks change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.core.blocks import LARGEST, Span
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.stage import LlamaStage
from tests.job.run.test_prompts import after, evaluate, read, share, tokens_of
from tests.models.test_architectures import possible_cuts, rows_of_whole
from tests.models.test_llama_stage import TreeDriver, exact_params, loaded, make_batch, random_tokens, run
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.jobs import finish, plain_tokens_after, run_json
from tests.support.paces import pace_words, slow_target

__all__ = ["loaded"]
Loader = Callable[..., list[LlamaStage]]

CACHES = {
    "gemma3": "layers with a sliding window",
    "gpt-oss": "the same with experts, whose router is not quantised",
    "deepseek2": "keys that are values too",
    "qwen2vl": "positions of several dimensions",
}


def model_and_cut(folder: Path, name: str) -> tuple[Path, tuple[int, ...]]:
    wider = MODELS[name].metadata if name == "deepseek2" else {**MODELS[name].metadata, "embedding_length": 256}
    model = replace(MODELS[name], metadata=wider)
    path = write_random_model(folder / f"{name}.gguf", model)
    return path, possible_cuts(read_model_info(path).layers, 2)[-1]


@pytest.mark.parametrize("name", CACHES)
def test_trees_are_the_same_as_plain_decoding(tmp_path: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(tmp_path, name)
    (alone,) = loaded(path, (), exact_params(n_threads=1))
    tokens = random_tokens(710)
    expected = np.array([run([alone], make_batch([token], at))[0] for at, token in enumerate(tokens)])
    driver = TreeDriver(loaded(path, cuts, exact_params(n_threads=2, n_cells=767)), tokens, expected, seed=1)
    driver.prefill(620)
    while driver.at < 700:
        driver.step()
    assert driver.n_compactions >= 1


@pytest.mark.parametrize("name", CACHES)
def test_chunks_and_splits_of_a_prompt_change_no_bit(tmp_path: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(tmp_path, name)
    params = replace(exact_params(1), n_batch=256)
    alone, prompt = loaded(path, (), params), tokens_of(1)
    list(read(alone, prompt, 256))
    expected = after(alone)
    chain = loaded(path, cuts, replace(params, n_threads=2))
    list(read(chain, tokens_of(2), 64, seq=1))  # other cells before
    list(read(chain, prompt, 64))
    assert np.array_equal(after(chain), expected)


@pytest.mark.parametrize("name", CACHES)
def test_blocks_behind_those_of_another_request_have_the_same_bits(tmp_path: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(tmp_path, name)
    params = replace(exact_params(1), n_batch=256)
    alone, chain, prompt = loaded(path, (), params), loaded(path, cuts, params), tokens_of(1)
    list(read(alone, prompt, 256))
    share(chain, prompt)
    expected = after(alone)
    assert np.array_equal(after(chain), expected)
    for stage in chain:
        stage.apply([KvOp(OpKind.REMOVE, 0, first=len(prompt)), KvOp(OpKind.SHARED, 0, 6, 0, 128)])
        stage.apply([KvOp(OpKind.COMPACT, 0)])
    assert np.array_equal(after(chain), expected), "not as it was before it was packed"


@pytest.mark.parametrize("name", CACHES)
def test_packing_keeps_what_a_shorter_text_shares(tmp_path: Path, loaded: Loader, name: str) -> None:
    """A window behind the last token is not all that is needed of a text: another may share its beginning."""
    path, cuts = model_and_cut(tmp_path, name)
    params = replace(exact_params(1), n_batch=256)
    prompt, found = tokens_of(1), []
    for is_packed in (False, True):
        chain = loaded(path, cuts, params)
        list(read(chain, prompt, 64, seq=6))
        for stage in chain:
            stage.apply([KvOp(OpKind.COMPACT, 0)] * is_packed + [KvOp(OpKind.COPY, 6, 0, 0, 100)])
        evaluate(chain, prompt[100:], 100, 0, Span(100, len(prompt)))
        found.append(after(chain))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("name", CACHES)
def test_cells_that_lay_between_those_of_another_keep_their_order(
    tmp_path: Path, loaded: Loader, name: str, stays: bool
) -> None:
    """Also those that are out of a window's sight, which only some layers keep."""
    path, cuts = model_and_cut(tmp_path, name)
    params = replace(exact_params(1), n_batch=256)
    alone, chain, prompt = loaded(path, (), params), loaded(path, cuts, params), tokens_of(1)
    list(read(alone, prompt, 256))
    expected = after(alone)
    at = 0
    for _ in read(chain, prompt, 64):
        evaluate(chain, tokens_of(at, 50), at, seq=1)
        at += 50
    for stage in chain:
        stage.apply([KvOp(OpKind.REMOVE, 1, first=30 if stays else 0), KvOp(OpKind.COMPACT, 0)])
        assert [stage.next_position(seq) for seq in (0, 1)] == [len(prompt), 30 * stays]
    assert np.array_equal(after(chain), expected)


def test_packing_keeps_what_lies_before_the_edge_of_a_chunk(tmp_path: Path, loaded: Loader) -> None:
    """Layers of llama4 see the tokens of a chunk of 8192 alone."""
    path = write_random_model(tmp_path / "llama4.gguf", MODELS["llama4"])
    chain, tokens = loaded(path, (), replace(exact_params(1), n_batch=256, n_outputs_max=256)), tokens_of(1, 250)
    (stage,) = chain
    evaluate(chain, tokens[:110], 8000)
    stage.apply([KvOp(OpKind.COPY, 0, 1, 0, 8100)])
    evaluate(chain, tokens[100:], 8100, seq=1)
    found = []
    for ops in ([], [KvOp(OpKind.SHARED, 0, 1, 0, 8100), KvOp(OpKind.COMPACT, 0)]):
        stage.apply([*ops, KvOp(OpKind.COPY, 1, 2, 0, 8180)])
        found.append(evaluate(chain, [5], 8180, seq=2))
        stage.apply([KvOp(OpKind.REMOVE, 2, first=0)])
    before, after_packing = found
    assert np.array_equal(before, after_packing)


@pytest.mark.parametrize(("policy", "is_said"), [("iterative", False), ("speculative", True)])
def test_texts_that_guesses_may_change_are_said_not_to_be_exact(tmp_path: Path, policy: str, is_said: bool) -> None:
    path = write_random_model(tmp_path / "grok.gguf", replace(MODELS["grok"], with_vocab=True))
    lookup = ["--lookup"] * is_said
    done = finish(1, ["run", "-m", str(path), "-p", "the model", "-n", "4", "--policy", policy, *lookup])
    assert done.returncode == 0 and ("no flash attention for grok.gguf" in done.stderr) == is_said, done.stderr


@pytest.mark.parametrize("length", [32, 128])
def test_without_flash_attention_a_prompt_is_read_as_guesses_are(tmp_path: Path, loaded: Loader, length: int) -> None:
    wider = {**MODELS["grok"].metadata, "embedding_length": 4 * length}
    model = replace(MODELS["grok"], metadata=wider, with_vocab=True)
    path = write_random_model(tmp_path / "grok.gguf", model)
    prompt, params = tokens_of(1, 600), replace(exact_params(1), n_batch=256, n_outputs_max=256, n_cells=1024)

    def read_by(chain: list[LlamaStage], n_rows: int) -> FloatArray:
        for at in range(0, len(prompt), n_rows):
            evaluate(chain, prompt[at : at + n_rows], at)
        return after(chain, len(prompt))

    expected = read_by(loaded(path, (), params), 1)
    for n_threads, n_rows in ((1, 128), (2, 61), (2, 256)):
        cuts = possible_cuts(read_model_info(path).layers, 2)[-1]
        assert np.array_equal(read_by(loaded(path, cuts, replace(params, n_threads=n_threads)), n_rows), expected)
    words = ["-m", str(path), "-p", "the model of a layer " * 30, "-n", "20", "--temp", "0", "--ignore-eos"]
    alone, split = (run_json(n_ranks, words) for n_ranks in (1, 3))
    assert len(alone["prompt_tokens"]) > LARGEST and alone["tokens"] == split["tokens"]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "qwen2vl", "grok"])
def test_long_prompts_read_as_in_plain_llama(tmp_path: Path, name: str) -> None:
    wider = {**MODELS[name].metadata, "embedding_length": 256}
    path = write_random_model(tmp_path / "target.gguf", replace(MODELS[name], metadata=wider, with_vocab=True))
    words = ["-m", str(path), "-p", "the model of a layer " * 20, "-n", "20", "--temp", "0", "--ignore-eos", "-t", "1"]
    alone = run_json(1, words)
    assert len(alone["prompt_tokens"]) > LARGEST
    assert alone["tokens"] == plain_tokens_after(path, alone, 20)


def test_a_job_guesses_for_layers_with_windows_and_experts(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "target.gguf", replace(MODELS["gpt-oss"], with_vocab=True))
    pace = pace_words(tmp_path, slow_target(10.0, layers=3, draft_layers=6))  # guesses are in time
    result = run_json(
        3,
        [
            "-m",
            str(path),
            "-md",
            str(path),
            "-p",
            "the model of a layer",
            "-n",
            "40",
            "--temp",
            "0",
            "--ignore-eos",
            "--policy",
            "pipeinfer",
            *pace,
        ],
    )
    prompt, tokens = result["prompt_tokens"], result["tokens"]
    assert tokens == rows_of_whole(path, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(axis=1).tolist()
    assert result["speculation"]["acceptance_rate"] > 0.5


@pytest.mark.parametrize(
    ("n_selected", "numerics", "is_said"), [(4, "exact", True), (4, "fast", False), (64, "exact", False)]
)
def test_texts_longer_than_what_rows_see_are_said_not_to_be_exact(
    tmp_path: Path, n_selected: int, numerics: str, is_said: bool
) -> None:
    metadata = {**MODELS["deepseek32"].metadata, "attention.indexer.top_k": n_selected}
    path = write_random_model(
        tmp_path / "target.gguf", replace(MODELS["deepseek32"], metadata=metadata, with_vocab=True)
    )
    done = finish(1, ["run", "-m", str(path), "-p", "the model of a layer", "-n", "8", "--numerics", numerics])
    assert done.returncode == 0, done.stderr
    assert (f"texts of up to {n_selected} tokens are exact" in done.stderr) == is_said
