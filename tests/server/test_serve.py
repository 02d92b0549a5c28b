"""`pipeinfer serve`: OpenAI's own client, and others that are not so polite, against a real server on two ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
import httpx
import openai

from pipeinfer.models.text.grammar import TOO_MUCH
from tests.models.test_grammar import LATE
from tests.support.cases import in_long
from tests.support.jobs import command_of, descendants, finish, run_json
from tests.support.paces import pace_words, slow_runs
from tests.support.server_fuzz import KINDS, faults_of, request, run_case
from tests.support.server_hostile import abuse
from tests.support.serving import LISTENS, Served, lines_of, open_texts

PROMPT = "def read_lines(path):\n"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "temperature": 0.9}
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 900, "seed": 1, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 15_000}  # half a minute of work at least: its client leaves before


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    words = ["--parallel", "20", "--queue", "12", "--alias", "pair", "-sys", "of", "--timeout", "30"]
    with Served(2, [*words, "--log-format", "none"], by_pid=True) as server:
        server.http.timeout = 120
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_the_way_there_from_another_machine_is_said(served: Served) -> None:
    start = f"pipeinfer: from another machine: ssh -L {served.port}:127.0.0.1:{served.port} "
    assert served.lines[[line.startswith(LISTENS) for line in served.lines].index(True) - 1].startswith(start)


# -- curl


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(served: Served) -> None:
    def curl(*words: str, **fields: Any) -> str:
        command = ["curl", "-sS", "-N", *words, f"{served.url}/v1/completions", "-d", json.dumps(fields)]
        header = ["-H", "content-type: application/json"]
        return subprocess.run([*command, *header], capture_output=True, text=True, check=True, timeout=30).stdout

    fields = {"prompt": "def f(", "max_tokens": 6, "temperature": 0}
    text = json.loads(curl(**fields))["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in curl(**fields, stream=True).splitlines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]) == text
    refused = curl("-w", "%{http_code}", **fields | {"temperature": -1})
    assert refused.endswith("400") and "temperature" in refused


# -- OpenAI's client


def test_a_completion_is_the_text_of_run(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="pair", **ASKED)
    result = run_json(2, ["-p", PROMPT, "-n", "24", "-s", "7", "--temp", "0.9", "-t", "1"])
    choice = reply.choices[0]
    assert choice.text == result["text"] and choice.finish_reason == "length"
    assert reply.object == "text_completion" and reply.model == "pair" and reply.id.startswith("cmpl-")
    assert reply.usage and reply.usage.prompt_tokens == result["timings"]["prompt_n"]
    assert reply.usage.completion_tokens == 24 and reply.usage.total_tokens == 24 + reply.usage.prompt_tokens


def test_a_stream_s_pieces_are_the_text(client: openai.OpenAI, served: Served) -> None:
    pieces = list(client.completions.create(model="pair", stream=True, stream_options={"include_usage": True}, **ASKED))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == served.text(**ASKED)
    assert len(pieces) > 2 and [piece.usage for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].usage and pieces[-1].usage.completion_tokens == 24 and not pieces[-1].choices
    assert pieces[-2].choices[0].finish_reason == "length"


def test_a_chat_is_asked_with_the_template(client: openai.OpenAI) -> None:
    chat: list[Any] = [{"role": "user", "content": "the rank"}]
    whole = client.chat.completions.create(model="pair", messages=chat, max_tokens=16, seed=3)
    streamed = client.chat.completions.create(model="pair", messages=chat, max_tokens=16, seed=3, stream=True)
    pieces = list(streamed)
    result = run_json(1, ["--chat", "-sys", "of", "-p", "the rank", "-n", "16", "-s", "3", "-t", "1"])
    assert whole.choices[0].message.content == result["text"] and whole.object == "chat.completion"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == result["text"]
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[0].object == "chat.completion.chunk"


def test_several_texts_have_the_next_seeds(client: openai.OpenAI, served: Served) -> None:
    reply = client.completions.create(model="pair", n=3, **ASKED)
    alone = [served.text(**ASKED | {"seed": seed}) for seed in (7, 8, 9)]
    assert [choice.text for choice in reply.choices] == alone and len(set(alone)) == 3
    assert reply.usage and reply.usage.completion_tokens == 72
    assert reply.usage.prompt_tokens == served.complete(**ASKED)["usage"]["prompt_tokens"]
    prompts = [PROMPT, "class A:\n"]
    several = client.completions.create(model="pair", **ASKED | {"prompt": prompts, "n": 2})
    assert [choice.text for choice in several.choices[:2]] == alone[:2] and len(several.choices) == 4
    pieces = list(client.completions.create(model="pair", stream=True, n=3, **ASKED))
    texts = ["".join(each.choices[0].text for each in pieces if each.choices[0].index == index) for index in range(3)]
    assert texts == alone


def test_a_stop_string_ends_a_text_and_what_counts_ends_there_too(client: openai.OpenAI, served: Served) -> None:
    text = served.text(**ASKED)
    stop = text[10:13]
    cut = client.completions.create(model="pair", stop=[stop, "nowhere"], **ASKED)
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    streamed = client.completions.create(model="pair", stop=stop, stream=True, **ASKED)
    pieces = list(streamed)
    assert "".join(piece.choices[0].text for piece in pieces) == cut.choices[0].text
    counts = {served.complete(stop=stop, **ASKED)["usage"]["completion_tokens"] for _ in range(4)}
    assert len(counts) == 1 and counts.pop() < 24, "not how many came with the last one"


def test_models_and_health(client: openai.OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["pair"] and client.models.retrieve("pair").id == "pair"
    with pytest.raises(openai.NotFoundError, match="there is no model 'x'"):
        client.models.retrieve("x")
    assert served.http.get("/health").json() == {"status": "ok"}


def test_a_name_that_leads_here_is_not_this_host_s(served: Served) -> None:
    """A page of another site, whose name was made to lead to 127.0.0.1 after it was loaded."""
    local = [f"127.0.0.1:{served.port}", f"localhost:{served.port}", "127.3.2.1", "[::1]:9"]
    names = dict.fromkeys(local, 200) | dict.fromkeys(
        ["there.example", "127.0.0.1.there.example:80", "10.0.0.1", "["], 403
    )
    for name, status in names.items():
        for headers in ({}, {"origin": f"http://{name}"}, {"sec-fetch-site": "same-origin"}):
            headers = headers | {"host": name}
            answer = served.http.post("/v1/completions", json={**ASKED, "max_tokens": 1}, headers=headers)
            assert answer.status_code == status, (headers, answer.text)
        for path in ("/", "/health", "/v1/models", "/slots", "/metrics"):
            assert served.http.get(path, headers={"host": name}).status_code == status, (name, path)


LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ({**LINK, "sec-fetch-dest": "iframe"}, 403),
        ({"referer": "https://there.example/page"}, 403),
        ({"referer": "http://["}, 403),
        (LINK, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin", "referer": "https://there.example/page"}, 200),
        ({"referer": "OWN/"}, 200),
    ],
)
def test_a_page_of_another_site_is_not_told_anything(served: Served, headers: dict[str, str], status: int) -> None:
    """Where a browser sends no Origin: pictures, scripts, frames. A link that the user follows is none of these."""
    headers = {name: value.replace("OWN", served.url) for name, value in headers.items()}
    assert served.http.get("/slots", headers=headers).status_code == status
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        assert served.http.post("/tokenize", json={"content": "a"}, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"logprobs": 6}, "logprobs is 6; of a prompt give how many"),
        ({"top_logprobs": 2}, "top_logprobs is 2, which is for chats"),
        ({"echo": 1}, "echo is 1; give true or false"),
        ({"n_probs": 21}, "n_probs is 21; give a whole number from 0 to 20"),
        ({"mirostat": 2}, "mirostat is 2; only 0 can be served"),
        ({"n": 0}, "n is 0"),
        ({"n": 200}, "from 1 to 128"),
        ({"temperature": -1}, "temperature is -1"),
        ({"response_format": {"type": "xml"}}, 'its type is "text", "json_object"'),
        ({"response_format": {"type": "json_schema"}}, "a JSON schema is an object"),
        ({"grammar": "root ::= b"}, "it has no rule b"),
        ({"logit_bias": [[at, 1] for at in range(60_000)]}, "names more than 2048 tokens"),
        ({"stop": ["x"] * 200_000}, "stop has 200000 texts, and at most 32 are possible"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "leave one of them out"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar and json_schema both say"),
        ({"logit_bias": {"4096": 1}}, "a logit bias is for token 4096"),
        ({"prompt": ["a", -1]}, "give one text"),
        ({"prompt": [10**8]}, "there is no token"),
        ({"messages": []}, "has prompt, and no messages"),
    ],
)
def test_what_cannot_be_served_is_said(client: openai.OpenAI, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="pair",
            **{
                **ASKED,
                **{
                    n: v
                    for n, v in fields.items()
                    if n in ("n", "prompt", "logprobs", "max_tokens", "temperature", "stream_options")
                },
            },
            extra_body=fields,
        )
    assert why in caught.value.message and caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"role": "usr", "content": "a"}], "messages[1].role"),
        ([{"role": ["user"], "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a " * 5000}], "messages"),
    ],
)
def test_what_is_wrong_with_messages_is_said_with_their_name(served: Served, messages: Any, param: str) -> None:
    answer = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# -- log-probabilities


def test_a_completion_s_tokens_have_log_probabilities(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="pair", logprobs=3, n=2, **ASKED)
    plain = client.completions.create(model="pair", n=2, **ASKED)
    assert [choice.text for choice in whole.choices] == [choice.text for choice in plain.choices]
    assert plain.choices[0].logprobs is None
    for choice in whole.choices:
        reply = choice.logprobs
        assert reply and reply.tokens and reply.token_logprobs and reply.top_logprobs and reply.text_offset
        assert "".join(reply.tokens) == choice.text and len(reply.tokens) == 24
        for token, logprob, top, offset in zip(
            reply.tokens, reply.token_logprobs, reply.top_logprobs, reply.text_offset, strict=True
        ):
            assert choice.text[offset:].startswith(token) and top[token] == logprob <= 0 and 3 <= len(top) <= 4
            assert list(top.values())[:3] == sorted(list(top.values())[:3], reverse=True)
    pieces = list(client.completions.create(model="pair", logprobs=3, stream=True, **ASKED))
    reported = [piece.choices[0].logprobs for piece in pieces]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [value for each in reported if each for value in getattr(each, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name), name
    alone = client.completions.create(model="pair", logprobs=0, **ASKED).choices[0].logprobs
    assert alone and alone.top_logprobs and {len(top) for top in alone.top_logprobs} == {1}


@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_stop_string_cuts_off_has_no_entries(client: openai.OpenAI, streamed: bool) -> None:
    fields: Any = {"model": "pair", "logprobs": 1, **ASKED}
    free = client.completions.create(**fields).choices[0]
    assert free.logprobs and free.logprobs.text_offset and free.logprobs.tokens
    stop = free.text[9:14]
    at = free.text.index(stop)
    pairs = zip(free.logprobs.tokens, free.logprobs.text_offset, strict=True)
    expected = [token for token, offset in pairs if offset < at]
    reply: list[str] = []
    answer = client.completions.create(stop=stop, stream=streamed, **fields)
    pieces: Any = answer if streamed else [answer]
    text = ""
    for piece in pieces:
        text += piece.choices[0].text
        reply += (piece.choices[0].logprobs and piece.choices[0].logprobs.tokens) or []
    assert text == free.text[:at] and reply == expected and 0 < len(reply) < 24


def test_a_chat_s_tokens_have_log_probabilities(client: openai.OpenAI) -> None:
    fields: Any = {"messages": [{"role": "user", "content": "the rank"}], "max_tokens": 16, "seed": 3, "model": "pair"}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=20, **fields).choices[0]
    assert whole.logprobs and whole.logprobs.content
    assert "".join(each.token for each in whole.logprobs.content) == whole.message.content
    for each in whole.logprobs.content:
        assert bytes(each.bytes or ()).decode() == each.token and len(each.top_logprobs) == 20
        assert each.logprob in [top.logprob for top in each.top_logprobs if top.token == each.token] or (
            each.logprob <= each.top_logprobs[-1].logprob
        )
    pieces = client.chat.completions.create(logprobs=True, top_logprobs=20, stream=True, **fields)
    reported = [each for piece in pieces if (of := piece.choices[0].logprobs) for each in of.content or []]
    assert reported == whole.logprobs.content
    bare = client.chat.completions.create(logprobs=True, **fields).choices[0].logprobs
    assert bare and bare.content and [each.logprob for each in bare.content] == [each.logprob for each in reported]
    assert not any(each.top_logprobs for each in bare.content)
    too_many = {"logprobs": True, "top_logprobs": 21}
    reasons = ("give true or false", "without logprobs", "from 0 to 20")
    for wrong, why in zip(({"logprobs": 1}, {"top_logprobs": 2}, too_many), reasons, strict=True):
        with pytest.raises(openai.BadRequestError, match=why):
            client.chat.completions.create(**fields, extra_body=wrong)


def test_json_is_what_was_asked_for(client: openai.OpenAI) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"enum": [1, 2]}, "s": {"maxLength": 3}}}
    schema["properties"]["s"]["type"] = "string"  # type: ignore[index]
    conversation = [{"role": "user", "content": "a"}]
    forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}]
    forms += [{"type": "json_object", "schema": schema}]
    texts = []
    for form in forms:
        reply = client.chat.completions.create(
            model="pair",
            messages=conversation,
            seed=4,
            max_tokens=60,
            response_format=form,  # type: ignore[call-overload]
        )
        assert reply.choices[0].finish_reason == "stop"
        texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1] and json.loads(texts[0])["n"] in (1, 2)
    body = {"json_schema": schema, "seed": 4, "cache_prompt": True}
    plain = client.completions.create(model="pair", prompt="def a", max_tokens=60, extra_body=body)
    assert json.loads(plain.choices[0].text)["n"] in (1, 2)
    text = {"grammar": 'root ::= "yes" | "no"'}
    assert client.completions.create(model="pair", prompt="a", extra_body=text).choices[0].text in ("yes", "no")


# -- the same text, whoever else asks


def conversation(served: Served) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Two turns; the messages of the second, and its answer."""
    conversation = [{"role": "user", "content": "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(9))}]
    first = chat(served, conversation).json()["choices"][0]["message"]["content"]
    conversation += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    return conversation, chat(served, conversation).json()


def chat(served: Served, messages: list[dict[str, str]]) -> httpx.Response:
    fields = {"messages": messages, "max_tokens": 70, "seed": 4, "temperature": 0.7}
    return served.http.post("/v1/chat/completions", json=fields)


PROBES = [
    ASKED,
    {**ASKED, "prompt": "class Rank:\n" * 30, "seed": 8, "repeat_penalty": 1.2},  # long enough for blocks
    {**ASKED, "prompt": [5, 9, 77], "seed": 9, "top_k": 5, "max_tokens": 60},
    {**ASKED, "temperature": 0, "max_tokens": 60},
]


def streamed(served: Served, fields: dict[str, Any]) -> str:
    with served.stream(**fields) as answer:
        pieces = [json.loads(line) for line in lines_of(answer) if line != "[DONE]"]
    return "".join(piece["choices"][0]["text"] for piece in pieces)


def test_a_text_does_not_depend_on_who_else_asks(served: Served) -> None:
    alone = [served.text(**fields) for fields in PROBES]
    others = [{**ASKED, "seed": 100 + i, "max_tokens": 20 + 5 * i, "prompt": PROMPT[: 3 + i]} for i in range(16)]
    with ThreadPoolExecutor(24) as pool:
        noise = [pool.submit(served.text, **fields) for fields in others]
        whole = [pool.submit(served.text, **fields) for fields in PROBES]
        pieces = [pool.submit(streamed, served, fields) for fields in PROBES]
        assert [each.result() for each in whole] == alone
        assert [each.result() for each in pieces] == alone
        assert len({each.result() for each in noise}) == 16
    messages, answer = conversation(served)
    retained = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 64 < retained < answer["usage"]["prompt_tokens"], "what was said before is not evaluated again"
    timed = answer["timings"]
    assert (timed["prompt_n"], timed["cache_n"]) == (answer["usage"]["prompt_tokens"] - retained, retained)
    for n_ranks in (1, 3):
        with Served(n_ranks, ["-sys", "of"]) as other:
            assert [other.text(**fields) for fields in PROBES] == alone
            cold = chat(other, messages).json()
            assert cold["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]
            assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# -- clients that leave, or are slow


def slots(served: Served) -> list[Any]:
    return open_texts(served.http)


def n_predicted(served: Served) -> float:
    """Tokens of all texts so far."""
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("llamacpp:tokens_predicted_total"))


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    n_before = n_predicted(served)
    with served.stream(**ENDLESS) as answer:
        lines = lines_of(answer)  # to be kept: with it the connection would end
        for _ in range(7):  # pieces of a text that goes on
            next(lines)
        assert [slot["is_processing"] for slot in slots(served)] == [True]
    served.until(lambda: not slots(served))
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/completions", json=ENDLESS, timeout=0.3)
    served.until(lambda: not slots(served))
    assert n_predicted(served) - n_before < ENDLESS["max_tokens"]


def test_who_does_not_read_stalls_nobody(served: Served) -> None:
    """Its text is short enough for the system's buffers, or waits in the server: others are served meanwhile."""
    data, n_before = json.dumps({**ENDLESS, "n": 8, "stream": True}).encode(), n_predicted(served)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", served.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
        )
        served.until(lambda: slots(served))
        assert served.text(**ASKED) and slots(served)
    served.until(lambda: not slots(served))
    assert n_predicted(served) - n_before < 8 * ENDLESS["max_tokens"]


def test_what_has_no_room_waits_and_what_has_no_room_to_wait_is_refused(served: Served) -> None:
    with served.stream(**ENDLESS, n=20) as answer:
        lines = lines_of(answer)  # to be kept: with it the connection would end
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.text, **ASKED)
            served.until(lambda: [slot["is_processing"] for slot in slots(served)].count(False) > 0)
            refused = served.http.post("/v1/completions", json={**ASKED, "n": 9})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
            answer.close()
            assert waiting.result(timeout=60)


@pytest.fixture
def paced(tmp_path: Path) -> Callable[[float], list[str]]:
    """Options of one rank, with which a token takes so many milliseconds."""

    def options(run_ms: float) -> list[str]:
        return ["-md", "none", *pace_words(tmp_path, slow_runs(run_ms))]

    return options


def test_who_waits_begins_by_priority(paced: Callable[[float], list[str]]) -> None:
    words = ["--parallel", "1", "--priorities", "-c", "4096", *paced(10)]
    with Served(1, words) as served, ThreadPoolExecutor(3) as pool:
        queued_s: dict[int, float] = {}

        def ask(priority: int) -> str:
            response = served.complete(**ASKED, priority=priority)
            queued_s[priority] = response["timings"]["queued_s"]
            assert queued_s[priority] < response["timings"]["ttft_s"] < response["timings"]["total_s"]
            return str(response["choices"][0]["text"])

        with served.stream(**LONG | {"max_tokens": 3600}) as answer:
            lines = lines_of(answer)  # to be kept: with it the connection would end
            next(lines)
            fields = []
            for n_before, priority in enumerate((1, 0, -1)):
                fields.append(pool.submit(ask, priority))
                served.until(lambda n=n_before: len(slots(served)) == n + 2)
            answer.close()
            texts = {each.result(timeout=60) for each in fields}
        timings = served.http.post("/v1/completions", json=ASKED).json()["timings"]
        assert 0 <= timings["queued_s"] < timings["ttft_s"]
        assert len(texts) == 1 and queued_s[1] > queued_s[0] > queued_s[-1] > 0
        refused = served.http.post("/v1/completions", json={**ASKED, "priority": "high"})
        assert refused.status_code == 400 and "priority is" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "priority"
        refused = served.http.post("/v1/completions", json={**ASKED, "grammar": 'root ::= "a"', "ignore_eos": True})
        assert refused.json()["error"]["message"].startswith("ignore_eos goes on")
        assert refused.json()["error"]["param"] == "ignore_eos"


def test_a_low_priority_passes_preempted_texts(paced: Callable[[float], list[str]]) -> None:
    """Of three texts two have cells for all they are to have, so the third one gives its own up before they end."""
    with (
        Served(1, ["--parallel", "4", "-c", "510", "--priorities", *paced(15)]) as served,
        ThreadPoolExecutor(4) as pool,
    ):
        ended: list[int] = []

        def ask(priority: int, n: int, seed: int) -> int:
            body = {**ASKED, "ignore_eos": True, "max_tokens": n, "priority": priority, "seed": seed}
            response = served.http.post("/v1/completions", json=body, timeout=60).json()
            ended.append(priority)
            return int(response["timings"]["preempted_n"])

        fields = []
        for n_before in range(3):
            fields.append(pool.submit(ask, 3, 480, n_before))
            served.until(lambda n=n_before: sum(slot["is_processing"] for slot in slots(served)) == n + 1)
        served.until(lambda: ended or any(slot["n_decoded"] and not slot["is_processing"] for slot in slots(served)))
        metrics = served.http.get("/metrics").text
        assert "llamacpp:requests_processing 2.0" in metrics and "llamacpp:requests_deferred 1.0" in metrics
        pool.submit(ask, -3, 20, 3).result(timeout=60)
        assert [each.result(timeout=60) for each in fields] == [0, 0, 1]
        assert ended == [-3, 3, 3, 3]


@pytest.mark.parametrize("numbers", [range(100), in_long(range(100, 2000))], ids=str)
def test_clients_that_err_lie_leave_and_dawdle_disturb_nobody(numbers: range) -> None:
    """The first cases of benchmarks/fuzz_server.py. Where a length is garbled, -n and -c end the text."""
    words = ["--parallel", "20", "--queue", "100", "--timeout", "3", "-n", "16", "-c", "20480", "--log-format", "none"]
    with Served(2, words) as served:
        text = served.text(**ASKED)
        with ThreadPoolExecutor(12) as pool:
            kinds = pool.map(lambda number: run_case(served, number), numbers)
            texts = [served.text(**ASKED) for _ in range(4)]
            assert len(set(kinds)) == len(set(KINDS))
        assert texts == [text] * 4
        served.until(lambda: not slots(served))
        assert faults_of(served) == ""


def test_a_grammar_that_takes_too_much_ends_its_text_alone(served: Served) -> None:
    fields = {"prompt": "a", "max_tokens": 700, "temperature": 0, "grammar": LATE}
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(served.text, **ASKED)
        whole = served.http.post("/v1/completions", json=fields)
        assert whole.status_code == 400 and whole.json()["error"]["message"] == TOO_MUCH
        with served.stream(**fields) as answer:
            *_, error, done = lines_of(answer)
        assert done == "[DONE]" and json.loads(error)["error"]["message"] == TOO_MUCH
        assert beside.result() == served.text(**ASKED)


def test_what_costs_most_ends_nobody(served: Served) -> None:
    text = served.text(**ASKED)
    assert {abuse(served.port, number) for number in range(20)} <= {200, 400, 429}
    assert served.text(**ASKED) == text and faults_of(served) == ""


# -- the end


def test_it_ends_when_what_is_open_has_ended(paced: Callable[[float], list[str]]) -> None:
    words = ["--parallel", "2", "--drain", "90", *paced(50)]
    with Served(1, words) as served, served.stream(**{**LONG, "max_tokens": 120}) as answer:
        lines = lines_of(answer)
        next(lines)
        served.signal(signal.SIGTERM)
        served.until(lambda: "no further requests" in served.errors)
        refused = httpx.post(f"{served.url}/v1/completions", json=ASKED, timeout=30)
        assert refused.status_code == 503 and "shutting down" in refused.text and "retry-after" in refused.headers
        rest = list(lines)
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert served.wait() == 0, served.errors


@pytest.mark.parametrize(("drain_s", "n_signals", "code"), [("0.3", 1, 0), ("60", 2, 143)])
def test_what_is_open_is_given_up_when_its_time_is_over(
    drain_s: str, n_signals: int, code: int, paced: Callable[[float], list[str]]
) -> None:
    """Or at a second signal. Who does not read what there is for it is not waited for either."""
    deaf = socket.socket()
    with deaf, Served(1, ["--drain", drain_s, *paced(100)]) as served, served.stream(**LONG, n=4) as answer:
        lines = lines_of(answer)
        next(lines)
        deaf.connect(("127.0.0.1", served.port))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 600)
        served.signal(signal.SIGTERM)
        if n_signals == 2:
            served.until(lambda: "no further requests" in served.errors)
            time.sleep(0.7)  # within half a second it would be the same one
            served.signal(signal.SIGTERM)
        rest = list(lines)
        assert rest[-1] == "[DONE]" and "stopped before this was complete" in json.loads(rest[-2])["error"]["message"]
        assert served.wait() == code, served.errors
        assert "ended where it stood" not in served.errors and "Traceback" not in served.errors


def test_a_front_that_stands_still_ends_the_job() -> None:
    with Served(1, ["--rank-timeout", "6"], by_pid=True) as served:
        time.sleep(7)  # while nobody asks for anything it says that it is there
        assert served.http.get("/health").status_code == 200
        os.kill(front_of(served), signal.SIGSTOP)
        assert served.wait() == 1
        assert "nothing comes from the process that speaks HTTP for 6 s; ending the job" in served.errors


def front_of(served: Served) -> int:
    return next(pid for pid in descendants(served.job.pid) if b"server.process" in command_of(pid))


def test_without_its_front_the_job_ends() -> None:
    with Served(1, [], by_pid=True) as served:
        os.kill(front_of(served), signal.SIGKILL)
        assert served.wait() == 1
        assert "the process that speaks HTTP was killed by signal 9; ending the job" in served.errors


def test_a_killed_process_of_the_chat_template_costs_nobody_a_chat(served: Served) -> None:
    """It was started ahead, by a thread of the front."""

    def waiting() -> list[int]:
        reply = (path.read_text().split() for path in Path(f"/proc/{front}/task").glob("*/children"))
        return [pid for pid in map(int, itertools.chain(*reply)) if b"template_child" in command_of(pid)]

    front = front_of(served)
    assert chat(served, [{"role": "user", "content": "a"}]).status_code == 200
    served.until(waiting)
    os.kill(waiting()[0], signal.SIGKILL)
    assert chat(served, [{"role": "user", "content": "a"}]).status_code == 200


def test_who_asks_is_told_that_a_rank_died() -> None:
    """The launcher kills rank 0 with the others; what speaks with clients is out of its reach, and ends soon after: it
    stands still until who comes late has asked too."""
    with (
        Served(2, ["--parallel", "2", "-c", "16384"], by_pid=True) as served,
        served.stream(**ENDLESS) as answer,
        ThreadPoolExecutor(1) as pool,
    ):
        whole = pool.submit(httpx.post, f"{served.url}/v1/completions", json=ENDLESS, timeout=60)
        lines = lines_of(answer)
        next(lines)
        served.until(lambda: len(slots(served)) == 2)
        front, first = front_of(served), served.pid_of(0)
        os.kill(front, signal.SIGSTOP)
        os.kill(served.pid_of(1), signal.SIGKILL)
        served.until(lambda: not command_of(first))
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as late:
            late.sendall(request("POST", "/v1/completions", json.dumps(ASKED).encode()))
            os.kill(front, signal.SIGCONT)
            refused = b"".join(iter(lambda: late.recv(1 << 16), b""))
        rest = list(lines)
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["error"]["code"] == 503
        reported = whole.result(timeout=60)
        assert reported.status_code == 503 and int(reported.headers["retry-after"]) > 0
        assert "the job behind this server has ended" in reported.json()["error"]["message"]
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in refused
        assert served.wait() not in (0, 130)
        assert "rank 1 (host" in served.errors and "died of SIGKILL" in served.errors
        served.until(lambda: not listens(served))


def listens(served: Served) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return bool(httpx.get(f"{served.url}/health").status_code)
    return False


def test_a_wrong_setting_is_said_before_anything_loads(served: Served) -> None:
    done = finish(2, ["serve", "--port", str(served.port)])
    assert done.returncode == 2 and f"--port {served.port}: Address already in use" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_lone_rank_listens_to_its_clients_alone(tmp_path: Path) -> None:
    """MPI would listen on the network, for ranks that there are not."""
    with Served(1, ["-md", "none"], by_pid=True) as served:
        files = [os.readlink(path) for path in Path(f"/proc/{served.job.pid}/fd").iterdir()]
        sockets = {name[8:-1] for name in files if name.startswith("socket:")}
        tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        found = [line.split()[1] for table in tables for line in table if line.split()[9] in sockets]
        listening = [line.split() for table in tables for line in table if line.split()[3] == "0A"]
        ends = [words[1] for words in listening if words[9] in sockets]
    assert found and ends and all(end.startswith("0100007F:") for end in ends), ends
