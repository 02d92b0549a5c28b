"""Log-probabilities are those of the model's logits, the same bits under every policy and on any number of ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeinfer.cluster.verdicts import LEAST_LOGPROB, ScoredToken, score_token
from pipeinfer.job.requests.answers import Entries, Entry, chat_logprobs, completion_logprobs
from tests.support.gguf_factory import CHAT_TEMPLATE, Shape, write_model
from tests.support.jobs import ROOT, finish

SHAPE = Shape(n_layer=3, n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_vocab=384, n_strong=1, weak=0.3)
PROMPT = list(range(5, 90))  # long enough for blocks
N_PREDICT, N_TOP = 20, 5


def log_softmax(logits: Any) -> Any:
    values = np.asarray(logits, np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


@pytest.mark.parametrize("n_vocab", [12, 50_000])
@pytest.mark.parametrize("n_top", [0, 1, 20])
def test_they_are_the_log_softmax(n_vocab: int, n_top: int) -> None:
    logits = np.random.default_rng(n_vocab).normal(0, 4, n_vocab).astype(np.float32)
    logits[3] = logits[9]
    before = logits.copy()
    expected = log_softmax(logits)
    answer = score_token(logits, 9, n_top)
    assert answer == 9 and answer.logprob == pytest.approx(expected[9], abs=1e-6)
    order = sorted(range(n_vocab), key=lambda id: (-logits[id], id))[:n_top]
    assert [each.token for each in answer.top] == order
    assert [each.logprob for each in answer.top] == pytest.approx(list(expected[order]), abs=1e-6)
    assert np.array_equal(logits, before)


def test_what_cannot_be_has_a_number_too() -> None:
    answer = score_token(np.array([0.0, -np.inf, -1e9], np.float32), 1, 3)
    assert [answer.logprob, *(each.logprob for each in answer.top)] == [LEAST_LOGPROB, 0.0, *[LEAST_LOGPROB] * 2]


def scored_token(token: int) -> ScoredToken:
    return ScoredToken(token, -0.5, [])


def test_entries_come_with_the_text_and_not_without_it() -> None:
    entries = Entries({2})
    for token, offset in ((7, 0), (8, 0), (9, 1), (5, 4), (2, 5)):  # 7 and 8 are one character together
        entries.add(scored_token(token), offset)
    entries.add(11, 5)  # of a request that did not ask
    assert entries.take(0) == []
    assert [entry.token for entry in entries.take(1)] == [7, 8]
    assert [entry.token for entry in entries.take(3)] == [9]
    assert [(entry.token, entry.offset) for entry in entries.take(math.inf)] == [(5, 4)] and entries.take(
        math.inf
    ) == []


def test_tokens_that_are_parts_of_characters_are_spelled_in_bytes() -> None:
    spelled = {1: b"\xe2\x82", 2: b"\xac", 3: b"a", 4: b"a"}.__getitem__
    entries = [Entry(1, -1.0, [(2, -0.5)], 0), Entry(3, -3.0, [(4, -0.25), (3, -3.0)], 1)]  # type: ignore[list-item]
    assert completion_logprobs(entries, spelled) == {
        "tokens": ["bytes:\\xe2\\x82", "a"],
        "token_logprobs": [-1.0, -3.0],
        "text_offset": [0, 1],
        "top_logprobs": [{"bytes:\\xac": -0.5, "bytes:\\xe2\\x82": -1.0}, {"a": -0.25}],
    }
    first = chat_logprobs(entries, spelled)["content"][0]
    assert first == {
        "id": 1,
        "token": "bytes:\\xe2\\x82",
        "logprob": -1.0,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [{"id": 2, "token": "bytes:\\xac", "logprob": -0.5, "bytes": [0xAC]}],
    }


# -- real jobs

PLAIN = """
import json, sys
import numpy as np
from tests.support.plain_llama import greedy
from tests.job.requests.test_logprobs import N_PREDICT, N_TOP, PROMPT, log_softmax
rows = []
tokens = greedy(sys.argv[1], PROMPT, N_PREDICT, see=lambda logits: rows.append(log_softmax(logits)))
tops = [sorted(range(len(row)), key=lambda id: (-row[id], id))[:N_TOP] for row in rows]
print(json.dumps([tokens, [row[token] for row, token in zip(rows, tokens)],
                  [[row[id] for id in top] for row, top in zip(rows, tops)]]))
"""

LINES = [
    {"prompt": PROMPT, "temperature": 0, "seed": 1, "logprobs": N_TOP, "ignore_eos": True},
    {"prompt": [5, 9, 77], "seed": 4, "temperature": 1.2, "logprobs": 0, "repeat_penalty": 1.3},
    {"prompt": [5, 9, 77], "seed": 4, "temperature": 1.2, "repeat_penalty": 1.3},
    {"prompt": [6, 7], "seed": 5, "grammar": "root ::= [a-z ]+", "logprobs": 1},
    {
        "custom_id": "chat",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "a rank"}], "seed": 1, "logprobs": True, "top_logprobs": 20},
    },
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target, and drafts that are often wrong."""
    folder = tmp_path_factory.mktemp("models")
    shapes = [SHAPE, Shape(**{**vars(SHAPE), "n_layer": 1}), Shape(**{**vars(SHAPE), "n_layer": 2})]
    return [write_model(folder / f"{n}.gguf", shape, template=CHAT_TEMPLATE) for n, shape in enumerate(shapes)]


def batch(n_ranks: int, folder: Path, words: list[str]) -> dict[Any, dict[str, Any]]:
    """By index or custom_id."""
    source, output = folder / "in.jsonl", folder / f"{n_ranks}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    words = ["-t", "1", "-n", str(N_PREDICT), "--no-repack", *words]  # plain_llama's layout
    done = finish(n_ranks, ["batch", str(source), "-o", str(output), *words])
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in output.read_text().splitlines()]
    for result in results:
        for name in ("ttft_s", "tpot_s", "total_s", "tokens_cached"):  # which depend on who was first
            result.pop(name, None)
        if "response" in result:
            result["response"]["body"].pop("created")
    return {result.get("index", result.get("custom_id")): result for result in results}


def test_real_ranks_give_those_of_plain_llama_under_every_policy(models: list[Path], tmp_path: Path) -> None:
    target, *drafts = map(str, models)
    alone = batch(1, tmp_path, ["-m", target, "--parallel", "1"])
    larger = [word for draft in drafts for word in ("-md", draft)]
    many = batch(
        4, tmp_path, ["-m", target, *larger, "--sampler-threads", "2", "--policy", "pipeinfer", "--width", "3"]
    )
    assert alone == many, "the same bits"

    done = subprocess.run([sys.executable, "-c", PLAIN, target], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tokens, chosen, tops = json.loads(done.stdout.splitlines()[-1])
    answer = alone[0]["logprobs"]
    assert len(answer["tokens"]) == N_PREDICT == len(tokens)
    assert answer["token_logprobs"] == pytest.approx(chosen, abs=1e-5)
    for of_plain, reported in zip(tops, answer["top_logprobs"], strict=True):
        values = list(reported.values())  # of tokens that are spelled alike one is missing
        assert values[0] == pytest.approx(of_plain[0], abs=1e-5) and len(values) > 1
        assert all(min(abs(value - each) for each in of_plain) < 1e-5 for value in values)

    assert alone[1]["text"] == alone[2]["text"] and "logprobs" not in alone[2]
    assert {len(top) for top in alone[1]["logprobs"]["top_logprobs"]} == {1}
    forced = alone[3]["logprobs"]
    assert "".join(forced["tokens"]) == alone[3]["text"] and any(
        max(top.values()) > value for top, value in zip(forced["top_logprobs"], forced["token_logprobs"], strict=True)
    ), "a grammar does not change them"
    content = alone["chat"]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content and {len(each["top_logprobs"]) for each in content} == {20}
