"""`pipeinfer perplexity`: llama-perplexity's protocol, and the same number on any number of ranks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pipeinfer.models.demo import TARGET
from tests.support.jobs import finish

SIZE, N_CHUNKS = 64, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(Path(__file__).read_text())
    return path


def plain_losses(text: str) -> list[float]:
    """Of the second halves of the chunks, by libllama alone."""
    model = llama_cpp.Llama(str(TARGET), n_ctx=SIZE, n_batch=SIZE, logits_all=True, verbose=False, n_threads=1)
    tokens, losses = model.tokenize(text.encode(), add_bos=True), list[float]()
    adds_bos = llama_cpp.llama_vocab_get_add_bos(model._model.vocab)
    for start in range(0, SIZE * N_CHUNKS, SIZE):
        chunk = tokens[start : start + SIZE]
        chunk = [model.token_bos(), *chunk[1:]] if adds_bos else chunk
        model.reset()
        model.eval(chunk)
        logits = np.array(model.scores[SIZE // 2 : SIZE - 1], np.float64)
        chosen = logits[np.arange(len(logits)), chunk[SIZE // 2 + 1 :]]
        losses += (np.log(np.exp(logits).sum(axis=1)) - chosen).tolist()
    model.close()
    return losses


def test_the_estimate_is_llama_cpps_on_any_number_of_ranks(text: Path) -> None:
    losses = plain_losses(text.read_text())
    expected, words = math.exp(np.mean(losses)), ["-m", str(TARGET), "-f", str(text), "-c", str(SIZE)]
    found = []
    for n_ranks, more in ((1, []), (2, []), (3, ["--layer-split", "1,2,6"])):
        done = finish(n_ranks, ["perplexity", *words, "--chunks", str(N_CHUNKS), "--json", *more])
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert {each["perplexity"] for each in found} == {found[0]["perplexity"]}
    assert found[0]["perplexity"] == pytest.approx(expected, rel=0.02)
    assert found[0]["error"] == pytest.approx(expected * np.std(losses) / math.sqrt(len(losses) - 1), rel=0.05)
    assert found[0]["tokens"] == len(losses) and found[0]["chunks"] == N_CHUNKS
    done = finish(2, ["perplexity", *words, "--numerics", "fast"])
    assert re.fullmatch(r"Final estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}\n", done.stdout), done.stderr


@pytest.mark.parametrize("size", [32, 33, 34])
def test_chunks_may_be_a_row_longer_than_a_run(text: Path, size: int) -> None:
    """The last row comes with those before it."""
    words = ["-c", str(size), "-b", "16", "--chunks", "2", "--numerics", "fast"]
    done = finish(1, ["perplexity", "-m", str(TARGET), "-f", str(text), *words])
    assert done.returncode == 0 and "PPL" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"), [(["-c", "2"], "-c 2 is no chunk"), (["-c", "40000"], "two chunks of 40000 are the least")]
)
def test_texts_that_cannot_be_cut_are_refused(text: Path, words: list[str], message: str) -> None:
    done = finish(1, ["perplexity", "-m", str(TARGET), "-f", str(text), *words])
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
