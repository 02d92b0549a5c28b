"""Adapters (LoRA) of single requests: each text is that of plain llama-cpp-python with the same adapters and factors,
whatever else is asked at the time, under every policy and split."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import write_adapter
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, plain_tokens, run_json
from tests.support.serving import Served

N = 24
PROMPTS = "the model of a layer", "the model of a layer " * 20
LORAS: list[list[dict[str, float]]] = [
    [],
    [{"id": 0, "scale": 1.0}],
    [{"id": 1, "scale": 0.5}],
    [{"id": 0, "scale": 0.7}, {"id": 1, "scale": -0.4}],
    [{"id": 0, "scale": 0}],
]

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "model.gguf", Shape(n_layer=6, peaky=8.0, n_strong=2, weak=0.1), "Q4_K_M")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return write_model(folder / "draft.gguf", Shape(n_layer=2, peaky=8.0), "Q4_K_M")


@pytest.fixture(scope="module")
def adapters(folder: Path, model: Path) -> list[str]:
    first = write_adapter(folder / "first.gguf", model, 8, strength=0.3)
    return [str(first), str(write_adapter(folder / "second.gguf", model, 16, "F32", strength=0.3, seed=1))]


@pytest.fixture(scope="module")
def given(model: Path, adapters: list[str]) -> list[str]:
    return ["-m", str(model), *(word for each in adapters for word in ("--lora", each)), "--no-repack"]


@pytest.fixture(scope="module")
def plain(model: Path, adapters: list[str]) -> list[list[list[int]]]:
    """Greedy tokens by prompt and adapters."""
    words = ["-m", str(model), "-md", "none", "-n", "1", "--no-repack", "-t", "1"]
    ids = [run_json(1, [*words, "-p", prompt])["prompt_tokens"] for prompt in PROMPTS]
    scaled = [[f"{adapters[int(each['id'])]}:{each['scale']}" for each in lora if each["scale"]] for lora in LORAS]
    return [[plain_tokens(model, prompt, N, adapters=each) for each in scaled] for prompt in ids]


def ask(served: Served, at: int, **more: Any) -> str:
    common = {"prompt": PROMPTS[at], "max_tokens": N, "temperature": 0, "ignore_eos": True}
    answer = served.http.post("/v1/completions", json={**common, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def spelled(served: Served, tokens: list[int]) -> str:
    """As an answer: without the names of control tokens."""
    text = str(served.http.post("/detokenize", json={"tokens": tokens}).json()["content"])
    return re.sub("</?s>", "", text)


@pytest.mark.parametrize(("n_ranks", "policy"), [in_long(1, "pipeinfer"), in_long(2, "auto"), (3, "pipeinfer")])
def test_texts_of_requests_at_once(
    n_ranks: int, policy: str, given: list[str], draft: Path, plain: list[list[list[int]]], tmp_path: Path
) -> None:
    """Each twice, the second time with what is cached, also of the same prompt with other adapters. On three
    ranks then by another server, with what is on disk."""
    words = [
        *given,
        "-md",
        str(draft),
        "--policy",
        policy,
        "--lora-init-without-apply",
        "--parallel",
        "6",
        "-c",
        "4096",
    ]
    words += ["--kv-disk", "1G", "--kv-dir", str(tmp_path)]
    asked = [(at, lora) for at in range(len(PROMPTS)) for lora in range(len(LORAS))]
    for n_times in (2, 1) if n_ranks == 3 else (2,):
        with Served(n_ranks, words) as served, ThreadPoolExecutor(len(asked)) as pool:
            expected = [spelled(served, plain[at][lora]) for at, lora in asked]
            assert len({*expected}) >= 6
            for _ in range(n_times):
                assert [*pool.map(lambda each: ask(served, each[0], lora=LORAS[each[1]]), asked)] == expected


def test_what_holds_without_the_field(given: list[str], adapters: list[str], plain: list[list[list[int]]]) -> None:
    """As llama-server: the options' factors, then those that a client sets."""
    with Served(2, [*given, "-md", "none"]) as served:
        listed = [{"id": number, "path": path, "scale": 1.0} for number, path in enumerate(adapters)]
        assert served.http.get("/lora-adapters").json() == listed
        both = ask(served, 0)
        assert both == ask(served, 0, lora=[{"id": 0, "scale": 1}, {"id": 1, "scale": 1}])
        assert both not in [spelled(served, tokens) for tokens in plain[0]]
        assert served.http.post("/lora-adapters", json=LORAS[2]).json() == {"success": True}
        assert [each["scale"] for each in served.http.get("/lora-adapters").json()] == [0.0, 0.5]
        assert ask(served, 0) == spelled(served, plain[0][2])
        assert ask(served, 0, lora=LORAS[1]) == spelled(served, plain[0][1])
        assert served.http.post("/lora-adapters", json=[]).json() == {"success": True}
        assert ask(served, 0) == spelled(served, plain[0][0])


def test_sampled_texts_are_those_of_a_job_with_the_same_factors(given: list[str], adapters: list[str]) -> None:
    usual = ["--temp", "0.8", "--seed", "7", "-n", str(N), "--ignore-eos", "-t", "1", "--policy", "iterative"]
    job = run_json(1, ["-p", PROMPTS[0], *usual, *given[:2], "--no-repack", "--lora-scaled", f"{adapters[1]}:0.5"])
    with Served(3, [*given, "--policy", "pipeinfer", "--lookup"]) as served:
        assert ask(served, 0, temperature=0.8, seed=7, lora=LORAS[2]) == job["text"]


def test_what_cannot_be_is_refused(given: list[str]) -> None:
    first, second = given[3:6:2]
    with Served(1, [*given[:2], "--lora", first, "--lora-scaled", f"{second}:-20", "-md", "none"]) as served:
        for lora, message in (
            (3, "lora is 3; give a list such as"),
            ([3], "lora is [3]; give a list such as"),
            ([{"scale": 1}], "lora.id is null; give a whole number from 0 to 1"),
            ([{"id": 2, "scale": 1}], "lora.id is 2; give a whole number from 0 to 1"),
            ([{"id": 0, "scale": -11}], "lora.scale is -11; give a number from -10 to 10"),
            ([{"id": 1, "scale": 21}], "lora.scale is 21; give a number from -20 to 20"),
            ([{"id": 0, "scale": "1"}], 'lora.scale is "1"; give a number'),
        ):
            for path, body in (("/v1/completions", {"prompt": "a", "lora": lora}), ("/lora-adapters", lora)):
                answer = served.http.post(path, json=body)
                assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
        answer = served.http.post("/lora-adapters", content=b"[")
        assert answer.status_code == 400 and "the body is not JSON" in answer.json()["error"]["message"]
    with Served(1, ["-md", "none"]) as served:
        assert served.http.get("/lora-adapters").json() == []
        answer = served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "lora": LORAS[1]})
        assert answer.status_code == 200 and answer.headers["x-pipeinfer-passed-over"] == "lora"
        answer = served.http.post("/lora-adapters", json=LORAS[1])
        assert (
            answer.status_code == 400 and "there is no adapter; start with --lora" in answer.json()["error"]["message"]
        )


def test_lines_of_a_batch(given: list[str], plain: list[list[list[int]]], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    common = {"prompt": PROMPTS[1], "n_predict": N, "temperature": 0, "ignore_eos": True}
    source.write_text(
        "".join(json.dumps({**common, "custom_id": str(at), "lora": lora}) + "\n" for at, lora in enumerate(LORAS))
    )
    words = ["batch", str(source), "-o", str(output), *given, "-md", "none", "--lora-init-without-apply", "-t", "1"]
    done = finish(2, words)
    assert done.returncode == 0, done.stderr
    lines = {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}
    with Served(1, ["-m", given[1], "-md", "none"]) as served:
        expected = [spelled(served, tokens) for tokens in plain[1]]
    assert [lines[str(at)]["text"] for at in range(len(LORAS))] == expected
