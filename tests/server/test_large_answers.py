"""Answers that are much larger than their requests: refused, or made beside the loop that serves all clients."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
import httpx

import pipeinfer.server.app as app
from pipeinfer.cluster.verdicts import Likely
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.answers import Entry
from pipeinfer.job.requests.body import Body, Defaults
from pipeinfer.job.requests.fields import CHAT, COMPLETION, PassedOver
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.server.choices import Answer
from pipeinfer.server.errors import JsonResponse, LargeJsonResponse
from pipeinfer.server.forms import OpenAIForm
from pipeinfer.server.front import HttpOptions
from pipeinfer.server.llama_cpp import CompletionForm
from pipeinfer.server.prompting import MAX_LOGPROBS, Prompting, parse_request
from pipeinfer.server.respond import AnswerResponse

CHAT_PROMPT = {"messages": [{"role": "user", "content": "a"}]}


def request_of(body: Body) -> GenerationRequest:
    """Each character of a prompt is a token."""
    return GenerationRequest((1,) * len(body.prompt), max(0, body.n_predict), 99, body.sampling, frozenset())


def api() -> app.Api:
    """Rank 0 takes no request."""
    template = SimpleNamespace(process=SimpleNamespace(start_ahead=lambda: None))
    prompts: Any = SimpleNamespace(
        ask=lambda bodies: [request_of(body) for body in bodies],
        format=SimpleNamespace(template=template),
        tokenizer=SimpleNamespace(
            n_vocab=10,
            path=Path("m.gguf"),
            decode_piece=lambda token, special: b"abcdefgh",
            encode=lambda text, add, parse: [1] * len(text),
        ),
    )
    defaults = Defaults(SamplingParams(), 1, (), False)
    setup: Any = SimpleNamespace(model=Path("m.gguf"), defaults=defaults, limit=40_000, parallel=1)

    def ask(requests: Any, client: str) -> Answer:
        raise NotImplementedError

    head: Any = SimpleNamespace(check_ready=lambda: None, ask=ask)
    return app.Api(HttpOptions(), setup, head, Prompting(prompts), SimpleNamespace())  # type: ignore[arg-type]


async def post(path: str, fields: dict[str, Any]) -> httpx.Response:
    served: Any = api().app("127.0.0.1")
    transport = httpx.ASGITransport(served, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json=fields)


@pytest.mark.parametrize(
    ("path", "fields", "n"),
    [
        (COMPLETION, {"prompt": "a" * 801, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}, 128 * 801 * 21),
        (COMPLETION, {"prompt": ["a" * 9000] * 8, "echo": True, "logprobs": 1, "max_tokens": 0}, 8 * 9000 * 2),
        (COMPLETION, {"prompt": "a", "n": 64, "logprobs": 5, "max_tokens": 400}, 64 * 400 * 6),
        ("/completion", {"prompt": "a", "n": 2, "n_probs": 20, "n_predict": 3121}, 6242 * 21),
        (CHAT, CHAT_PROMPT | {"n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 3121}, 6242 * 21),
    ],
)
def test_more_log_probabilities_than_an_answer_has_are_refused(path: str, fields: dict[str, Any], n: int) -> None:
    answer = asyncio.run(post(path, fields))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f" {n} log-probabilities" in message and f"up to {MAX_LOGPROBS}" in message and "fewer texts" in message


def test_the_tokens_of_a_lone_text_are_not_counted() -> None:
    answer = asyncio.run(post("/completion", {"prompt": "a", "n_probs": 20, "n_predict": 8000}))
    assert "NotImplementedError" in answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 6000, "prompt_logprobs": 20, "max_tokens": 1},
        {"prompt": "a" * 6000, "n": 128, "max_tokens": 4000},
        {"prompt": "a" * 32_000, "echo": True, "logprobs": 1, "max_tokens": 0},
    ],
)
def test_others_reach_rank_0(fields: dict[str, Any]) -> None:
    answer = asyncio.run(post(COMPLETION, fields))
    assert "NotImplementedError" in answer.text


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/tokenize", {"content": "𝓐" * 32_769}, "content has 131076 bytes in UTF-8; up to 131072 are tokenised"),
        ("/tokenize", {"content": "a" * 131_073}, "content has 131073 bytes in UTF-8; up to 131072 are tokenised"),
        ("/detokenize", {"tokens": [1] * 131_073}, "tokens are 131073, of 1048584 bytes; up to 1048576 are sent"),
    ],
)
def test_tokens_of_a_long_text_are_refused(path: str, fields: dict[str, Any], reason: str) -> None:
    answer = asyncio.run(post(path, fields))
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(reason)
    assert answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/tokenize", {"content": "𝓐" * 32_768, "with_pieces": True}), ("/detokenize", {"tokens": [1] * 131_072})],
)
def test_tokens_of_a_shorter_text_are_told_by_a_thread(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(kind: type[JsonResponse], content: Any) -> JsonResponse:
        threads.append(threading.current_thread())
        return kind(content)

    for kind in (JsonResponse, LargeJsonResponse):
        monkeypatch.setattr(app, kind.__name__, partial(noted, kind))
    answer = asyncio.run(post(path, fields))
    assert answer.status_code == 200 and threading.main_thread() not in threads and threads
    texts = {"tokens": [{"id": 1, "piece": "abcdefgh"}] * 32_768, "count": 32_768, "max_model_len": 40_000}
    assert answer.json() == (
        texts if path == "/tokenize" else dict.fromkeys(("content", "prompt"), "abcdefgh" * 131_072)
    )


# -- made in a thread


def form_of(n_scored: int) -> OpenAIForm:
    fields = {"prompt": "a" * n_scored, "prompt_logprobs": 1, "max_tokens": 1}
    parsed = parse_request(fields, COMPLETION, Defaults(SamplingParams(), 1, (), False), PassedOver())
    answer = Answer([0], [request_of(body) for body in parsed.bodies])
    (choice,) = answer.choices
    choice.score([Entry(1, -0.5, [Likely(2, -0.25)], 0)] * (n_scored - 1))
    choice.finish = "stop"
    return OpenAIForm(parsed, answer, "m", "1", lambda token: b"\xc3\xa9\xe2\x80\xa8")


@pytest.mark.parametrize(("n_scored", "is_large"), [(9, False), (9000, True)])
def test_a_thread_makes_a_large_answer(n_scored: int, is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    form, threads, sent = form_of(n_scored), [], list[bytes]()
    whole, render = form.whole, JsonResponse.render

    def noted(self: JsonResponse, content: Any) -> bytes:
        threads.append(threading.current_thread())
        return render(self, content)

    def noted_whole() -> Any:
        threads.append(threading.current_thread())
        return whole()

    monkeypatch.setattr(JsonResponse, "render", noted)
    form.whole = noted_whole  # type: ignore[method-assign]

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    head: Any = SimpleNamespace(cancel=lambda answer: None)
    response = AnswerResponse(head, form.answer, form, {}, lambda: None, lambda line: None)
    asyncio.run(response({"type": "http", "http_version": "1.0", "method": "POST"}, receive, send))
    assert all((thread is not threading.main_thread()) is is_large for thread in threads) and threads
    assert len(sent[-1]) > n_scored * 50 and '"é\\u2028"'.encode() in sent[-1]


def test_of_many_texts_the_first_has_the_grammar_and_the_prompt() -> None:
    fields = {"prompt": "a", "n": 3, "grammar": "root ::= [a-z]", "max_tokens": 1}
    parsed = parse_request(fields, COMPLETION, Defaults(SamplingParams(), 1, (), False), PassedOver())
    parsed = replace(parsed, prompt_texts=("a",))
    answer = Answer(range(3), [request_of(body) for body in parsed.bodies])
    for choice in answer.choices:
        choice.finish = "stop"
    objects = CompletionForm(parsed, answer, "m", "1", lambda token: b"").whole()
    grammars = [each["generation_settings"].get("grammar") for each in objects]
    assert grammars == ["root ::= [a-z]", None, None]
    assert [each.get("prompt") for each in objects] == ["a", None, None]


def test_json_of_both_kinds_is_the_same() -> None:
    data = {"a": [1, 2.5, None, True, {"b": "é\u2028\ud800", "c": []}], "d": {}}
    assert LargeJsonResponse(data).body == JsonResponse(data).body
