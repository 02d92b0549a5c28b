"""Scores of prompts: the same bits on any ranks and under every policy, and those of plain llama-cpp-python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT
from tests.support.serving import Served

SHAPE = Shape(n_layer=3, n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_vocab=384, n_strong=1, weak=0.3)
WHOLE, SHORT, MIXED = [265 + at * 7 % 110 for at in range(200)], list(range(270, 305)), list(range(265, 346))
N_TOP = 5

PLAIN = """
import json, sys
from tests.job.requests.test_logprobs import log_softmax
from tests.support.plain_llama import prompt_logits
found = []
for prompt in json.loads(sys.argv[2]):
    rows = list(map(log_softmax, prompt_logits(sys.argv[1], prompt, repacked=sys.argv[3] == "True")))
    found.append([[row[token] for row, token in zip(rows, prompt[1:], strict=True)], [row.max() for row in rows]])
print(json.dumps(found))
"""


def plain_scores(model: Path, prompts: Sequence[Sequence[int]], repacked: bool = False) -> list[list[list[float]]]:
    """Of each prompt, in plain llama-cpp-python, log-probabilities of all tokens but the first: its own, and those of
    the likeliest."""
    command = [sys.executable, "-c", PLAIN, str(model), json.dumps(prompts), str(repacked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    scores: list[list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return scores


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target, and a draft that is often wrong."""
    folder = tmp_path_factory.mktemp("models")
    shapes = [SHAPE, Shape(**{**vars(SHAPE), "n_layer": 1})]
    return [write_model(folder / f"{n}.gguf", shape) for n, shape in enumerate(shapes)]


def ask(server: Served, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json={"temperature": 0, "max_tokens": 0, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores_of(server: Served) -> list[Any]:
    found = []
    for n_more, prompts in ((0, [WHOLE, SHORT, MIXED]), (3, [WHOLE]), (0, WHOLE[:1])):
        answer = ask(server, prompt=prompts, echo=True, logprobs=N_TOP, max_tokens=n_more, ignore_eos=True)
        found += [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]
    return found


def test_scores_are_those_of_plain_llama_on_any_ranks(models: list[Path]) -> None:
    target, draft = map(str, models)
    found = []
    for n_ranks, words in (
        (1, []),
        (2, ["--policy", "speculative", "-md", draft]),
        (3, ["--policy", "pipeinfer", "-md", draft, "--sampler-threads", "1"]),
    ):
        with Served(n_ranks, ["-m", target, "--no-repack", "--parallel", "3", *words]) as server:
            found.append(scores_of(server))
    assert found[0] == found[1] == found[2], "the same bits"
    prompts = [WHOLE, SHORT, MIXED]
    for prompt, (text, logprobs), (chosen, best) in zip(
        prompts, found[0][:3], plain_scores(models[0], prompts), strict=True
    ):
        assert len(logprobs["tokens"]) == len(prompt) and "".join(logprobs["tokens"]) == text
        assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
        assert logprobs["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-5)
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:]] == pytest.approx(best, abs=1e-5)
    text, logprobs = found[0][3]
    assert len(logprobs["tokens"]) == len(WHOLE) + 3 and text.startswith(found[0][0][0])
    assert logprobs["token_logprobs"][: len(WHOLE)] == found[0][0][1]["token_logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    assert found[0][4][1]["token_logprobs"] == [None]


@pytest.fixture(scope="module")
def served(models: list[Path]) -> Iterator[Served]:
    with Served(2, ["-m", str(models[0]), "--no-repack", "--parallel", "3"]) as server:
        yield server


def test_a_prompt_that_is_cached_is_scored_all_the_same_and_its_text_does_not_change(served: Served) -> None:
    plain = ask(served, prompt=WHOLE, max_tokens=5, cache_prompt=True)
    first, again = (ask(served, prompt=WHOLE, max_tokens=5, echo=True, logprobs=2, cache_prompt=True) for _ in "ab")
    assert first["choices"] == again["choices"] and again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    echoed = ask(served, prompt=WHOLE, max_tokens=0, echo=True)["choices"][0]
    assert first["choices"][0]["text"] == echoed["text"] + plain["choices"][0]["text"] and echoed["logprobs"] is None


def test_a_stream_begins_with_the_prompt_and_its_scores(served: Served) -> None:
    fields = {"prompt": SHORT, "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1, "temperature": 0}
    whole = ask(served, **fields)["choices"][0]
    lines = served.http.post("/v1/completions", json={**fields, "stream": True}).text.splitlines()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]] == values


def test_vllm_s_field_has_the_same_scores_by_token(served: Served) -> None:
    answer = ask(served, prompt=[MIXED, SHORT], prompt_logprobs=3)["choices"]
    assert [choice["text"] for choice in answer] == ["", ""] and answer[0]["logprobs"] is None
    scores = ask(served, prompt=[MIXED, SHORT], echo=True, logprobs=3)["choices"]
    for prompt, choice, expected in zip([MIXED, SHORT], answer, scores, strict=True):
        first, *others = choice["prompt_logprobs"]
        assert first is None and len(others) == len(prompt) - 1
        found = [each[str(token)]["logprob"] for each, token in zip(others, prompt[1:], strict=True)]
        assert found == expected["logprobs"]["token_logprobs"][1:]
        for each in others:
            ranks = [entry["rank"] for entry in each.values() if entry["rank"]]
            assert sorted(ranks) == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs is 21; give a whole number from 0 to 20"),
        ("/v1/completions", {"prompt_logprobs": True}, "prompt_logprobs is true; give a whole number from 0 to 20"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs do not come in a stream"),
        ("/v1/completions", {"echo": "yes"}, 'echo is "yes"; give true or false'),
        ("/v1/completions", {"echo": True, "logprobs": 6}, "from 0 to 5"),
        ("/completion", {"echo": True}, "echo and prompt_logprobs are for /v1/completions"),
        ("/completion", {"prompt_logprobs": 0}, "echo and prompt_logprobs are for /v1/completions"),
        ("/v1/chat/completions", {"echo": True}, "echo is true; only false can be served"),
    ],
)
def test_what_cannot_be_scored_is_said(served: Served, path: str, fields: dict[str, Any], why: str) -> None:
    prompt: dict[str, Any] = {"prompt": SHORT}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "hello"}]}
    answer = served.http.post(path, json={**prompt, "max_tokens": 1, **fields})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
