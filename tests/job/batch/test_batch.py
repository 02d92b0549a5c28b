"""`pipeinfer batch`: each text is that of `run`, whatever else is open; interruptions lose and repeat nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.batch.batch import BatchOptions, _defaults
from pipeinfer.job.batch.batch_file import BatchFile, BatchOutput, read_request
from pipeinfer.job.options.text_sections import ChatOptions
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.requests import fields
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.models.text.chat_template import ChatTemplate
from pipeinfer.models.text.json_schema import schema_grammar
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.support.gguf_factory import CHAT_TEMPLATE, Shape, write_model
from tests.support.jobs import but_waiting, environment, finish, launcher, run_json, start
from tests.support.planned import deploy, options_of
from tests.test_outputs import room_for

SHAPE = Shape(n_layer=3, n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_vocab=384, n_strong=1, weak=0.3)
N_REQUESTS = 66
COMMON = ["-t", "1", "-n", "12"]
SLOW = ["--pace", "ethernet:qwen-1.5b-0.5b"]  # so that a batch takes longer than whoever interrupts it


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target.gguf", SHAPE, template=CHAT_TEMPLATE)
    draft = write_model(folder / "draft.gguf", replace(SHAPE, n_layer=1), template=CHAT_TEMPLATE)
    return ["-m", str(target), "-md", str(draft)]


GRAMMAR = "root ::= [a-z ]+"


def request(index: int) -> dict[str, Any]:
    """Short and long prompts, greedy and sampled, plain and in both of OpenAI's forms."""
    words = ["the", "a", "of", "model", "rank"]
    text = " ".join(words[index * step % 5] for step in range(1, 4 + (100 if index % 16 == 5 else index % 9)))
    asked: dict[str, Any] = {"max_tokens": 4 + index % 7, "seed": index, "temperature": 0.9 * (index % 4 > 0)}
    if index % 5 == 1:
        asked |= {"repeat_penalty": 1.3, "top_k": 10, "presence_penalty": 0.2, "logit_bias": {"7": -3, str(index): 2.5}}
    if index % 7 == 6:
        asked["grammar"] = GRAMMAR
    if index % 8 == 2:
        chat = {**asked, "messages": [{"role": "system", "content": "of"}, {"role": "user", "content": text}]}
        return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    if index % 8 == 3:
        body = {**asked, "prompt": text, "model": "any", "n": 1}
        return {"custom_id": f"c{index}", "method": "POST", "url": "/v1/completions", "body": body}
    return {**asked, "prompt": text}


REQUESTS = [request(index) for index in range(N_REQUESTS)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asked") / "asked.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in REQUESTS))
    return path


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """By id; each is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines), "a result is there twice"
    return found


def texts_of(path: Path) -> dict[str, str]:
    return {id: text_of(result) for id, result in results_of(path).items()}


def text_of(result: dict[str, Any]) -> str:
    if "response" not in result:
        return str(result["text"])
    choice = result["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def batch(n_ranks: int, source: Path, output: Path, words: Sequence[str]) -> dict[str, Any]:
    done = finish(n_ranks, ["batch", str(source), "-o", str(output), "--json", *COMMON, *words])
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.fixture(scope="module")
def alone(pair: list[str], asked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all, one after the other, on one rank."""
    output = tmp_path_factory.mktemp("alone") / "out.jsonl"
    assert batch(1, asked, output, [*pair[:2], "--parallel", "1"])["open_max"] == 1
    return output


def by_index(path: Path) -> dict[int, dict[str, Any]]:
    places = {each["custom_id"]: index for index, each in enumerate(REQUESTS) if "custom_id" in each}
    return {
        result["index"] if "index" in result else places[result["custom_id"]]: result
        for result in results_of(path).values()
    }


# -- texts


def test_texts_are_those_of_each_alone_where_cells_run_out(pair: list[str], tmp_path: Path) -> None:
    """Four texts of 450 tokens in a cache that holds two of them: who came last waits and goes on."""
    asked: list[dict[str, Any]] = []
    for number in range(4):
        prompt = "the model of a rank is in the layers of a token " * (5 if number == 1 else 1) + str(number)
        asked.append({"prompt": prompt, "max_tokens": 450, "ignore_eos": True, "seed": number, "temperature": 0.8})
    asked[3] |= {"repeat_penalty": 1.3, "repeat_last_n": 200}
    asked[2] |= {"grammar": 'root ::= "the" [ a-z]+', "ignore_eos": False, "max_tokens": 200}
    source, alone = tmp_path / "asked.jsonl", tmp_path / "alone.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in asked))
    assert not batch(1, source, alone, [*pair[:2], "--parallel", "1"])["preempted_n"]
    for n_ranks, draft in ((1, []), (3, pair[2:])):
        together = tmp_path / f"{n_ranks}.jsonl"
        words = [*pair[:2], *draft, "--parallel", "8", "-c", "640"]
        assert batch(n_ranks, source, together, words)["preempted_n"]
        assert texts_of(together) == texts_of(alone)
        assert all(each["tokens_predicted"] <= 450 for each in results_of(together).values())


def test_prompts_that_begin_alike_are_evaluated_once_and_have_the_texts_of_each_alone(
    pair: list[str], tmp_path: Path
) -> None:
    """Three texts of one prompt, and others with the same system prompt, among them OpenAI's."""
    system = "the model of a rank is in the layers of a token " * 6
    asked: list[dict[str, Any]] = [{"prompt": system, "seed": seed, "temperature": 0.9} for seed in range(3)]
    asked += [{"prompt": f"{system}{'the rank ' * n}", "seed": n, "temperature": 0.5} for n in (1, 9, 20)]
    body = {"prompt": f"{system}a model", "seed": 5}
    asked.append({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body})
    source, alone, together = tmp_path / "asked.jsonl", tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in asked))
    assert not batch(1, source, alone, [*pair[:2], "--parallel", "1"])["cache_n"]
    summary = batch(3, source, together, [*pair, "--parallel", "8", *SLOW])
    assert texts_of(together) == texts_of(alone)
    assert summary["open_max"] == len(asked)
    found = results_of(together).values()
    usage = next(each["response"]["body"]["usage"] for each in found if "response" in each)
    plain = {each["index"]: each for each in found if "index" in each}
    n_cached = [plain[index]["tokens_cached"] for index in range(6)]
    n_prompt = plain[0]["tokens_evaluated"]
    assert n_cached[:3] == [0, n_prompt - 1, n_prompt - 1] and min(n_cached[3:]) >= 128, n_cached
    assert summary["cache_n"] == sum(n_cached) + usage["prompt_tokens_details"]["cached_tokens"]


def test_who_can_begin_does_while_others_wait_for_a_prompt(pair: list[str], tmp_path: Path) -> None:
    """Seven of eight texts of one prompt wait until it is read; the short one behind them has ended then."""
    brief = {"max_tokens": 1, "ignore_eos": True}
    asked = [{"prompt": "the model of a rank is in the layers " * 60, "seed": n, **brief} for n in range(8)]
    asked.append({"prompt": "of the", **brief})
    source, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in asked))
    assert batch(1, source, output, [*pair[:2], "--parallel", "16"])["open_max"] == len(asked)
    assert json.loads(output.read_text().splitlines()[0])["index"] == 8


def test_requests_wait_while_the_texts_of_open_ones_fill_a_message(pair: list[str], tmp_path: Path) -> None:
    """Grammars go to the stages with the first run of their requests, and 12 of these 14 fit into a message."""
    source, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    line = {"prompt": "the", "max_tokens": 2, "json_schema": {"enum": [3], "description": "x" * 85_000}}
    source.write_text(f"{json.dumps(line)}\n" * 14)
    assert 2 <= batch(2, source, output, [*pair[:2], "--parallel", "16"])["open_max"] <= 12
    assert list(texts_of(output).values()) == 14 * ["3"]


def test_a_request_among_65_has_the_text_that_it_has_alone(
    pair: list[str], asked: Path, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    summary = batch(2, asked, output, [*pair, "--parallel", "65"])
    assert texts_of(output) == texts_of(alone)
    assert len(set(texts_of(output).values())) > 40
    assert summary["completed"] == N_REQUESTS and summary["failed"] == summary["left"] == 0
    assert 32 < summary["open_max"] <= 65, "so many are open at a time"
    assert summary["predicted_n"] == sum(
        result.get("tokens_predicted") or result["response"]["body"]["usage"]["completion_tokens"]
        for result in results_of(output).values()
    )
    assert 0 < summary["ttft_p50_s"] <= summary["ttft_p99_s"] and 0 < summary["tpot_p50_s"] < summary["wall_s"]
    check_time_used(summary)


def test_texts_are_those_of_run(pair: list[str], alone: Path) -> None:
    found = by_index(alone)
    for index in (2, 6, 11):
        body = REQUESTS[index].get("body", REQUESTS[index])
        words = ["-n", str(body["max_tokens"]), "-s", str(index), "--temp", str(body["temperature"]), "-t", "1"]
        if "repeat_penalty" in body:
            words += ["--repeat-penalty", "1.3", "--top-k", "10", "--presence-penalty", "0.2"]
            words += ["--logit-bias", "7-3", "-l", f"{index}+2.5"]
        if "grammar" in body:
            words += ["--grammar", GRAMMAR]
        if "messages" in body:
            words += ["--chat", "-sys", "of", "-p", body["messages"][1]["content"]]
        else:
            words += ["-p", body["prompt"]]
        result = run_json(1, [*pair, *words])
        assert text_of(found[index]) == result["text"], index
    assert "repeat_penalty" in REQUESTS[6] and "messages" in REQUESTS[2]["body"] and "url" in REQUESTS[11]


def test_figures_that_are_taken_while_requests_are_open_add_up(
    pair: list[str], asked: Path, alone: Path, tmp_path: Path
) -> None:
    """What ranks note of their runs would grow without end; rank 0 has a stage of its own here."""
    output = tmp_path / "out.jsonl"
    code = (
        "import sys, pipeinfer.job.batch.batch as batch; from pipeinfer.cli import main; batch.MAX_RECORDS = 8; "
        "main(sys.argv[1:])"
    )
    words = ["batch", str(asked), "-o", str(output), "--json", *COMMON, *pair[:2], "-np", "3"]
    done = subprocess.run(
        [*launcher(2), sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert texts_of(output) == texts_of(alone)
    check_time_used(json.loads(done.stdout))


def check_time_used(summary: dict[str, Any]) -> None:
    head_s = summary["ranks"][0]["busy_s"]
    for rank in summary["ranks"]:
        used_s = sum(rank[f"{use}_s"] for use in ("busy", "cancelled", "waiting", "idle"))
        # while the head is held up, a stage may wait for no run, but to be asked what it did
        assert 0.8 * summary["wall_s"] < used_s + head_s and used_s < 1.1 * summary["wall_s"]
        assert rank["busy_s"] > 0 and rank["wall_s"] == pytest.approx(summary["wall_s"])


def test_answers_have_openai_s_form_and_what_cannot_be_served_is_a_line(pair: list[str], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    url = {"method": "POST", "url": "/v1/completions"}
    lines = [
        {"prompt": "the " * 300, "n_predict": 4},
        {"custom_id": "long", **url, "body": {"prompt": "the " * 300}},
        {"prompt": [5, 100000]},
        {
            "custom_id": "ok",
            **url,
            "body": {"prompt": [5, 6], "seed": 1, "max_tokens": 40, "stop": ["e", "a", "o", "i", " "]},
        },
        {"prompt": "of", "stop": ["nowhere"], "ignore_eos": True, "seed": None},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = finish(1, ["batch", str(source), "-o", str(output), *pair, *COMMON, "-c", "100"])
    assert done.returncode == 0 and "2 completed, 3 not served" in done.stderr, done.stderr
    found = results_of(output).values()
    plain = {result["index"]: result for result in found if "index" in result}
    named = {result["custom_id"]: result for result in found if "index" not in result}
    assert "-c 100 holds 100" in plain[0]["error"] and "there is no token 100000" in plain[2]["error"]
    assert plain[4]["tokens_predicted"] == 12 and plain[4]["finish"] == "length" and plain[4]["seed"] >= 0
    assert named["long"]["response"]["status_code"] == 400 and "-c 100" in named["long"]["error"]["message"]
    body = named["ok"]["response"]["body"]
    assert named["ok"]["error"] is None and body["object"] == "text_completion" and body["model"] == "target.gguf"
    assert body["choices"][0]["finish_reason"] == "stop" and not set("eaoi ") & set(body["choices"][0]["text"])
    assert body["usage"]["prompt_tokens"] == 2 and body["usage"]["completion_tokens"] < 40
    words = ["batch", str(source), "-o", str(output), *pair, *COMMON, "-c", "1000"]
    done = finish(1, words)
    assert done.returncode == 2 and "an option, such as -c, differs" in done.stderr, done.stderr
    output.write_text("".join(f"{json.dumps(each)}\n" for each in (plain[4], named["ok"])))
    done = finish(1, words)
    assert done.returncode == 0 and "2 completed, 1 not served" in done.stderr, done.stderr
    assert "2 done before, 0 left" in done.stderr, done.stderr


# -- interruptions


def wait_for_lines(path: Path, n: int, job: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < n:
        assert time.monotonic() < end_s and job.poll() is None, job.communicate()
        time.sleep(0.005)


def test_a_batch_interrupted_before_its_first_result_says_so(pair: list[str], tmp_path: Path) -> None:
    asked, output, notes = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "notes"
    asked.write_text('{"prompt": "the", "max_tokens": 8000}\n')
    words = ["batch", str(asked), "-o", str(output), "--resume", str(notes), "--ignore-eos", *COMMON]
    job = start(1, [*words, *pair[:2], *SLOW])
    wait_for_lines(notes, 2, job)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 130 and "interrupted; no result is complete yet, the same command" in errors, errors
    assert not output.exists()


def test_an_interrupted_batch_goes_on_and_nothing_is_lost_or_repeated(
    pair: list[str], asked: Path, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    words = ["batch", str(asked), "-o", str(output), *COMMON, *pair, "--parallel", "4"]
    job = start(1, [*words, "--policy", "iterative", *SLOW])
    wait_for_lines(output, 5, job)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 130 and "interrupted" in errors and "goes on from there" in errors, errors
    n_first = len(results_of(output))
    assert 5 <= n_first < N_REQUESTS
    job = start(2, [*words, *SLOW], start_new_session=True)
    wait_for_lines(output, n_first + 5, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    with output.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a rank may outlive its launcher for a moment
    n_lines = output.read_bytes().count(b"\n")
    assert n_first < n_lines < N_REQUESTS
    with output.open("ab") as file:
        file.write(b'{"id": "0123456789')  # as a crash of the machine may leave it
    done = finish(2, [*words[:-1], "16"])
    assert done.returncode == 0 and "is cut off" in done.stderr, done.stderr
    assert f"{n_lines} done before, 0 left" in done.stderr, done.stderr
    assert texts_of(output) == texts_of(alone)
    before = output.read_bytes()
    done = finish(1, [*words, "--json"])
    assert done.returncode == 0 and json.loads(done.stdout)["left"] == 0
    assert "all 66 results are there" in done.stderr and output.read_bytes() == before
    done = finish(1, [*words, "--numerics", "fast"])
    assert done.returncode == 2 and "line 1 is the result of no request" in done.stderr, done.stderr
    assert output.read_bytes() == before
    output.write_bytes(before + before.partition(b"\n")[0] + b"\n")
    done = finish(1, words)
    assert done.returncode == 2 and "line 67 is of the same request as line 1" in done.stderr, done.stderr


# -- lines


DEFAULTS = Defaults(SamplingParams(), 12, ("end",), False, as_chat=False, salt="")
URL = '"url": "/v1/completions", "body"'


def read(line: str, defaults: Defaults = DEFAULTS) -> Any:
    return read_request(line.encode(), 3, defaults)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nothing", "the request is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "the request is not a JSON object"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', 'has the field "seed" twice'),
        ('{"prompt": "a", "logit_bias": {"7": 1, "7": 2}}', 'has the field "7" twice'),
        ("{}", "one of prompt and messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "one of prompt and messages"),
        ('{"prompt": ["a", "b"]}', "give one text, or a list of token ids"),
        ('{"prompt": []}', "give one text, or a list of token ids"),
        ('{"prompt": [1, -1]}', "give one text, or a list of token ids"),
        ('{"prompt": "a", "temperature": "1"}', "give a number from 0 to 1000"),
        ('{"prompt": "a", "temperature": NaN}', "give a number from 0 to 1000"),
        ('{"prompt": "a", "temp": 1, "temperature": 2}', "and 1 by another name; give one of them"),
        ('{"prompt": "a", "top_p": 1.5}', "top_p is 1.5; give a number from 0 to 1"),
        ('{"prompt": "a", "top_k": 1.5}', "give a whole number from -1"),
        ('{"prompt": "a", "seed": true}', "seed is true"),
        ('{"prompt": "a", "seed": 4294967296}', "seed is 4294967296; give a whole number from -1 to 4294967295"),
        ('{"prompt": "a", "n_predict": -2}', "give a whole number from 0 on"),
        ('{"prompt": "a", "max_tokens": 1, "n_predict": 2}', "max_tokens 1 and n_predict 2 are not the same"),
        ('{"prompt": "a", "stop": ["x", 1]}', "stop is "),
        (json.dumps({"prompt": "a", "stop": ["x"] * 33}), "stop has 33 texts, and at most 32 are possible"),
        (json.dumps({"prompt": "a", "stop": "x" * 257}), "stop has a text of 257 characters, and at most 256"),
        ('{"prompt": "a", "n": 2}', "only 1 can be served"),
        ('{"prompt": "a", "stream": true}', "only false can be served"),
        ('{"prompt": "a", "custom_id": 5}', "custom_id is 5"),
        ('{"prompt": "a", "ignore_eos": 1}', "give true or false"),
        ('{"prompt": "a", "priority": 1.5}', "priority is 1.5; give a whole number from -2147483647 to 2147483647"),
        ('{"prompt": "a", "priority": true}', "priority is true; give"),
        ('{"prompt": "a", "priority": 2147483648}', "priority is 2147483648; give"),
        ('{"messages": []}', "give a list of objects"),
        ('{"prompt": "a", "logit_bias": {"x": "y"}}', 'logit_bias has ["x", "y"]; give token ids'),
        ('{"prompt": "a", "typical_p": 1.5}', "typical_p is 1.5; give a number from 0 to 1"),
        ('{"prompt": "a", "xtc_probability": -1}', "xtc_probability is -1; give a number from 0 to 1"),
        ('{"prompt": "a", "dry_base": "x"}', 'dry_base is "x"; give a number from 0 to 1000'),
        ('{"prompt": "a", "dry_sequence_breakers": [""]}', "dry_sequence_breakers has a text of 0 characters"),
        ('{"prompt": "a", "dry_sequence_breakers": 1}', "dry_sequence_breakers is 1; give texts"),
        ('{"prompt": "a", "logit_bias": [[1, NaN]]}', "logit_bias has [1, NaN]"),
        ('{"prompt": "a", "grammar": 1}', "grammar is 1; give a text in GBNF"),
        ('{"prompt": "a", "json_schema": 1}', "a JSON schema is an object"),
        ('{"prompt": "a", "response_format": "json"}', 'response_format is "json"'),
        ('{"prompt": "a", "logit_bias": 1}', "give an object of token ids"),
        ('{"messages": [{"role": "critic", "content": "x"}]}', 'messages[0].role is "critic"; it is one of system,'),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "models here read text alone"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content is null; give a text"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "are served"),
        (f'{{{URL}: {{"prompt": "a"}}}}', "there is no custom_id"),
        (f'{{"custom_id": "a", "method": "GET", {URL}: {{"prompt": "a"}}}}', "must be POST"),
        (f'{{"custom_id": "a", {URL}: {{"messages": []}}}}', "has prompt, and no messages"),
        (f'{{"custom_id": "a", "seed": 1, {URL}: {{"prompt": "a"}}}}', "seed is no field of OpenAI's batch format"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(line)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_request_does_not_say_is_as_the_command_line_says() -> None:
    found = read('{"prompt": "a", "temperature": 0, "max_tokens": null, "user": "x", "logit_bias": {}}')
    body = found.body
    assert (body.prompt, body.n_predict, body.stops, found.index) == ("a", 12, ("end",), 3)
    assert body.sampling == replace(SamplingParams(), temp=0.0)
    stops = [read(f'{{"prompt": "a", "stop": {given}}}').body.stops for given in ('"x"', "[]")]
    assert stops == [("x",), ()]
    assert read('{"prompt": "a", "n_predict": -1}').body.n_predict == 12
    asked = read('{"messages": [{"role": "developer", "content": [{"type": "text", "text": "b"}]}]}')
    assert asked.body.messages == (ChatMessage("system", "b"),)
    assert read('{"prompt": "a"}', replace(DEFAULTS, as_chat=True)).body.messages == (ChatMessage("user", "a"),)
    same = [read('{"prompt": "a", "temperature": 1}'), read('{"temp": 1.0, "prompt": ["a"]}')]
    assert same[0].id("") == same[1].id("") != same[0].id("another model")
    assert replace(same[0], index=4).id("") != same[0].id("") == replace(same[0], index=3).id("")
    assert read('{"prompt": "a", "temperature": 1, "priority": -3}').id("") == same[0].id("")
    apart = [
        read(f'{{"prompt": "a"{more}}}').id("")
        for more in (
            "",
            ', "parse_special": false',
            ', "add_special_tokens": false',
            ', "stop_token_ids": [5]',
            ', "parse_special": true',
        )
    ]
    assert len(set(apart)) == 5 and read('{"prompt": "a", "stop_token_ids": []}').id("") == apart[0]
    chat = '{"messages": [{"role": "user", "content": "b"}], "reasoning_budget_tokens": %d}'
    assert (
        read(chat.replace(', "reasoning_budget_tokens": %d', "")).id("")
        == read(chat % -1).id("")
        != read(chat % 9).id("")
    )
    assert read('{"prompt": "a", "guesses": false}').id("") == read('{"prompt": "a"}').id(""), "it is the same text"
    named = replace(same[0], custom_id="x")
    biased = read('{"prompt": "a", "logit_bias": [[7, false], ["8", 0.5], [8, 1]]}')
    assert biased.body.sampling.logit_bias == "7-inf 8+1.5" and biased.id("") != read('{"prompt": "a"}').id("")
    forms = [
        '"grammar": "root ::= x"',
        '"json_schema": {}',
        '"response_format": {"type": "json_object"}',
        '"response_format": {"type": "text"}',
    ]
    asked_for = replace(DEFAULTS, sampling=SamplingParams(grammar="by default"))
    found = [read(f'{{"prompt": "a", {form}}}', asked_for).body.sampling.grammar for form in [*forms, '"n": 1']]
    assert found == ["root ::= x", schema_grammar({}), schema_grammar({}), "", "by default"]
    longer = replace(named, body=replace(named.body, n_predict=13))
    assert replace(named, index=4).id("") == named.id("") != longer.id("")


def test_a_wrong_line_is_named_before_anything_loads(pair: list[str], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n\n{"prompt": 5}\n')
    done = finish(2, ["batch", str(source), "-o", str(output), *pair[:2]])
    assert done.returncode == 2 and f"{source} line 3: prompt is 5" in done.stderr, done.stderr
    assert len(but_waiting(done.stderr)) == 1 and not output.exists()
    source.write_text('{"prompt": "a", "custom_id": "x"}\n{"prompt": "a", "custom_id": "x"}\n')
    done = finish(1, ["batch", str(source), "-o", str(output), *pair])
    assert done.returncode == 2 and "line 2: custom_id 'x' is that of line 1 too" in done.stderr, done.stderr


CHANGED = """
import sys
from pipeinfer.job.session.ranks import LoadedRanks

load = LoadedRanks.load
def loaded(self):
    load(self)
    open(sys.argv[2], "w").write('{"prompt": 5}\\n')

LoadedRanks.load = loaded
from pipeinfer.cli import main
main()
"""


def test_a_file_that_changes_while_models_load_ends_the_batch_in_order(pair: list[str], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    done = subprocess.run(
        [sys.executable, "-c", CHANGED, "batch", str(source), "-o", str(output), *pair],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2 and "line 1: prompt is 5" in done.stderr, done.stderr
    assert "pipeinfer: rank 0" not in done.stderr, "it has not died"
    assert not output.exists()


KILLED = """
import os, sys
from pipeinfer import child

ask, n = child.LimitedProcess.ask, 0
def killed(self, request):
    global n
    n += 1
    if n == N_BEFORE:  # once the lines are checked
        child.START = "import os; os.kill(os.getpid(), 9)"
    return ask(self, request)

child.LimitedProcess.ask = killed
from pipeinfer.cli import main
main()
"""


@pytest.mark.parametrize(
    ("asked", "n_before"),
    [({"messages": [{"role": "user", "content": "a"}]}, 2), ({"prompt": "a", "grammar": GRAMMAR}, 1)],
)
def test_a_fault_of_the_host_is_no_result(
    pair: list[str], tmp_path: Path, asked: dict[str, Any], n_before: int
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(asked | {"max_tokens": 2}) + "\n")
    words = ["batch", str(source), "-o", str(output), *pair[:2]]
    code = KILLED.replace("N_BEFORE", str(n_before))
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and "was killed, stopped or not started, 2 times" in done.stderr, done.stderr
    assert not output.exists() or not output.read_text()
    assert finish(1, words).returncode == 0 and '"text"' in output.read_text()


FAULT = """
from pipeinfer.errors import ModelFault
from pipeinfer.job.batch.batch import Batch
from pipeinfer.observe import report

report.PATIENCE_S = 0.0

def fail(self):
    self.progress.update(0, 1)
    raise ModelFault("its file was changed")

Batch._generate = fail
from pipeinfer.cli import main
main()
"""


def test_a_fault_ends_the_bar_before_it_is_said(pair: list[str], tmp_path: Path) -> None:
    (source := tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    words = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), *pair[:2]]
    environ = {name: value for name, value in environment().items() if name != "CI"} | {"TERM": "xterm"}
    ours, terminal = os.openpty()
    with subprocess.Popen([sys.executable, "-c", FAULT, *words], env=environ, stderr=terminal) as job:
        os.close(terminal)
        said = b""
        with contextlib.suppress(OSError):  # all have closed it
            while data := os.read(ours, 4096):
                said += data
    os.close(ours)
    bar, message = said.rsplit(b"pipeinfer: ", 1)
    assert job.returncode == 1 and b"its file was changed" in message
    assert bar.rfind(b"\x1b[?25h") > bar.rfind(b"\x1b[?25l") > 0


def test_lines_are_read_one_by_one_and_as_often_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n  \n{"prompt": "b"}')
    file = BatchFile(path, DEFAULTS)
    first, second = file.requests(), file.requests()
    assert next(first).body.prompt == "a" and [each.index for each in second] == [0, 2]
    assert next(first).body.prompt == "b"
    file.close()
    with pytest.raises(UserError, match="No such file"):
        BatchFile(tmp_path / "none", DEFAULTS)


# -- room


def test_the_plan_counts_what_open_requests_take(pair: list[str]) -> None:
    options, hosts = options_of(model=Path(pair[1])), [Host("a", frozenset({0}), 1)]
    info, _, tokenizer = open_models(options)
    tokenizer.close()
    plans = [deploy(options.changed(parallel=n), hosts, info, 1024, 200) for n in (1, 3, 40)]
    assert [plan.capacity.n_nodes for plan in plans] == [32, 32, 40], (
        "roots that a run carries, and logits that it wants"
    )
    one, three, most = (plan.memory[0].kv for plan in plans)
    assert 0 < three - one < most - one == 1.5 * (three - one), "prompts that are read, each in a context of its own"
    assert options.speculation.n_seq(40) >= 40 and options.speculation.n_seq(254) == 254


# -- results


def test_a_torn_line_is_cut_off_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    output = BatchOutput(path)
    output.write({"id": "a", "text": "é\n"})
    with pytest.raises(UserError, match="another job"):
        BatchOutput(path)
    with room_for(path.stat().st_size + 10), pytest.raises(UserError, match="File too large"):
        output.write({"id": "b", "text": "long enough"})
    torn = path.read_bytes()
    assert len(torn) > len('{"id": "a"}\n') and list(output.ids()) == [(1, "a")]
    assert path.read_bytes() == torn and not capfd.readouterr().err, "not before the job goes on"
    output.go_on()
    assert "10 bytes, is cut off" in capfd.readouterr().err
    output.write({"id": "c"})
    assert list(output.ids()) == [(1, "a"), (2, "c")]
    output.close()
    for lost in (b"\0" * 5000, b'{"id": "d", "te' + b"\0" * 50):  # as a power cut leaves them
        path.write_bytes(b'{"id": "a"}\n' + lost)
        output = BatchOutput(path)
        assert list(output.ids()) == [(1, "a")]
        output.go_on()
        assert path.read_bytes() == b'{"id": "a"}\n'
        output.close()
    for foreign in ("notes without an end", '{"text": "a"}\n', "a\nb\n"):
        path.write_text(foreign)
        output = BatchOutput(path)
        with pytest.raises(UserError, match="line 1 is no result of a batch"):
            list(output.ids())
        output.close()
        assert path.read_text() == foreign
    with pytest.raises(UserError, match="is no file"):
        BatchOutput(tmp_path)


def test_a_result_that_lacks_its_newline_alone_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": "b"}')
    output = BatchOutput(path)
    assert list(output.ids()) == [(1, "a"), (3, "b")] and not path.read_text().endswith("\n")
    output.go_on()
    output.go_on()
    output.write({"id": "c"})
    output.close()
    assert path.read_text() == '{"id": "a"}\n\n{"id": "b"}\n{"id": "c"}\n' and not capfd.readouterr().err


def test_a_refused_batch_leaves_its_results_as_they_are(pair: list[str], tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "seed": 1}\n{"prompt": "b", "seed": 1}\n')
    words = ["batch", str(source), "-o", str(output), *pair[:2], "-t", "1", "-n", "2"]
    assert finish(1, words).returncode == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-1])
    done = finish(1, [*words, "--temp", "0"])
    assert done.returncode == 2 and "is cut off" not in done.stderr, done.stderr
    assert output.read_bytes() == whole[:-1]
    done = finish(1, words)
    assert done.returncode == 0 and "all 2 results are there" in done.stderr, done.stderr
    assert output.read_bytes() == whole


def test_results_depend_on_what_is_in_a_chat_s_files(pair: list[str], tmp_path: Path) -> None:
    def salt(**files: Any) -> str:
        options = options_of(model=Path(pair[1]), chat=ChatOptions(**files))
        info, _, tokenizer = open_models(options)
        prompts = BodyPrompts(options.text, options.context, info, tokenizer)
        found = _defaults(BatchOptions(run=options, source=path, output=path), options, info, prompts).salt
        assert "template_file" not in files or prompts.format.template.source == "{{ messages }}", "it is read once"
        tokenizer.close()
        return found

    path, fifo = tmp_path / "text", tmp_path / "fifo"
    assert salt().endswith(f" {ChatOptions()}") and salt(system="a").endswith(f" {ChatOptions(system='a')}")
    for text in "ab":
        path.write_text(text)
        assert salt(system_file=path) == salt(system=text)
    path.write_text("{{ messages }}")
    os.mkfifo(fifo)
    threading.Thread(target=fifo.write_text, args=("{{ messages }}",), daemon=True).start()
    assert salt(template_file=path) == salt(template_file=fifo) != salt()


def test_what_one_chat_s_template_refuses_is_no_other_s_affair(pair: list[str]) -> None:
    source = "{% if messages[0].content == 'x' %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"
    endless = "{% if messages[0].content == 'x' %}{% for _ in range(100000000) %}{% endfor %}{% endif %}ok"
    tokenizer = Tokenizer(pair[1])
    for text, wrong in ((source, "not this"), (endless, "OverflowError")):
        chats = [[ChatMessage("user", content)] for content in ("a", "x", "b")]
        found = ChatTemplate(text, "the template").render_all(chats, tokenizer)
        assert [isinstance(each, UserError) for each in found] == [False, True, False]
        assert wrong in str(found[1])
    tokenizer.close()


def test_no_sampling_option_is_refused_or_passed_over() -> None:
    refused = {*fields.ONLY, *fields.IN_EFFECT, *fields.WITHOUT_EFFECT}
    assert refused & {*fields.ALIASES, *(name for name, _, _ in fields.SAMPLING_SETTINGS)} == set()
