"""Answers on their way: whatever ends one, nobody works on it any more."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import HostFault
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.fields import COMPLETION, PassedOver
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve import channel
from pipeinfer.server import errors, respond
from pipeinfer.server.access import WRITE
from pipeinfer.server.choices import Answer
from pipeinfer.server.forms import OpenAIForm, event
from pipeinfer.server.head_client import HeadClient, HeadState
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.prompting import parse_request
from pipeinfer.server.respond import AnswerResponse


def test_a_fault_of_the_host_is_not_the_client_s() -> None:
    response = asyncio.run(errors.error_response(Request({"type": "http"}), HostFault("short of memory")))
    assert response.status_code == 503 and response.headers["retry-after"]


def request_of(n_prompt: int) -> GenerationRequest:
    return GenerationRequest((1,) * n_prompt, 8, 20, SamplingParams(), frozenset())


def test_an_answer_that_fails_is_over() -> None:
    answer, over, sent = Answer([0], [request_of(1)]), list[str](), list[str]()
    answer.changed.set()

    def fail() -> bytes:
        raise KeyError("x")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    head: Any = SimpleNamespace(cancel=lambda answer: over.append("cancelled"))
    form: Any = SimpleNamespace(parsed=SimpleNamespace(stream=True), first=lambda: b"data: 1\n\n", events=fail)
    response = AnswerResponse(head, answer, form, {}, lambda: over.append("ended"), lambda line: None)
    with pytest.raises(KeyError):
        asyncio.run(response({"http_version": "1.0", "method": "POST"}, receive, send))
    assert over == ["cancelled", "ended"] and sent == ["http.response.start"]


def test_no_event_has_a_character_at_which_clients_split_lines() -> None:
    data = {"text": "a\x85b\u2028c\u2029d\ve\x1cf\rg ü"}
    written = event(data).decode()
    assert len(written.splitlines()) == 2 and json.loads(written.removeprefix("data: ")) == data and "ü" in written


def test_events_of_an_echo_are_json_with_and_without_times() -> None:
    fields = {"prompt": "ab", "stream": True, "echo": True, "timings_per_token": True}
    parsed = parse_request(fields, COMPLETION, Defaults(SamplingParams(), 8, (), False), PassedOver())
    answer = Answer([0], [request_of(2)])
    form = OpenAIForm(parsed, answer, "m", "1", lambda token: b"x")
    written = form.events()
    choice = answer.choices[0]
    choice.started_s, choice.verdict_s, choice.told_s, choice.heard_s = 0.0, 1.0, 1.5, 2.0
    choice.add([3], "c", [])
    written += form.events()
    choice.heard_s = 2.5
    choice.add([4, 5], "d", [])
    written += form.events()
    events = [json.loads(line.removeprefix("data: ")) for line in written.decode().split("\n\n")[:-1]]
    assert ["timings" in each for each in events] == [False, True, True]
    timings = events[2]["timings"]
    assert timings["predicted_n"] == 3 and timings["predicted_per_second"] == 4 and timings["prompt_per_second"] == 1
    assert events[1]["timings"]["predicted_per_second"] == 0, "of one token there is no rate"


def test_a_stream_without_output_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the job is started again, and while its prompt goes on."""
    monkeypatch.setattr(respond, "PING_S", 0.05)
    answer, head = Answer([0], [request_of(9)]), HeadClient(1, Metrics("m", 9), is_followed=True)
    form: Any = SimpleNamespace(
        parsed=SimpleNamespace(stream=True, schemas={}), first=lambda: b"", events=lambda: b"", last=lambda: b"end"
    )
    sent = list[bytes]()

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def comments() -> list[bytes]:
        return [data for data in sent if data.startswith(b": ")]

    async def recover_and_read() -> None:
        (choice,) = answer.choices
        head.recover("rank 1 is lost\non host a")
        while len(comments()) < 2:
            await asyncio.sleep(0.03)
        head.state = HeadState.READY
        choice.has_turn = True
        n_before = len(comments())
        while len(comments()) < n_before + 2:
            choice.n_read = min(choice.n_read + 1, 8)
            choice.changed.set()
            await asyncio.sleep(0.03)
        choice.finish = "stop"
        choice.changed.set()

    async def run() -> None:
        response = AnswerResponse(head, answer, form, {}, lambda: None, lambda line: None)
        responding = response({"http_version": "1.0", "method": "POST"}, receive, send)
        await asyncio.wait_for(asyncio.gather(recover_and_read(), responding), 60)

    asyncio.run(run())
    n_before = comments().count(b": the job is started again: rank 1 is lost on host a\n\n")
    assert n_before >= 2 and len(comments()) >= n_before + 2
    assert all(b"of 9 prompt tokens are evaluated" in each for each in comments()[n_before:])
    assert sent[-1] == b"end"


def test_an_answer_that_cannot_be_formatted_ends_alone() -> None:
    """Not the channel to rank 0, in whose reading answers are formatted."""
    head = HeadClient(2, Metrics("m", 99))
    failed: Any = SimpleNamespace(parsed=SimpleNamespace(stream=True), first=lambda: b"")
    failed.events = iter([b"data: 1\n\n"]).__next__  # and StopIteration from then on
    sent = list[str]()

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def respond_to_all() -> None:
        reader = asyncio.StreamReader()
        running = asyncio.ensure_future(head.run(reader))
        reader.feed_data(channel.encode(channel.Ready(99)))
        await asyncio.sleep(0.01)
        answer, other = (head.ask([request_of(1)], client) for client in "ab")
        response = AnswerResponse(head, answer, failed, {}, lambda: None, lambda line: None)
        chunks: Any = SimpleNamespace(flows=True, write=lambda data: None, send=send_chunk)
        scope = {"http_version": "1.1", "method": "POST", "extensions": {WRITE: chunks}}
        responding = asyncio.ensure_future(response(scope, receive, send))
        for text in "xyz":
            await asyncio.sleep(0.05)
            parts: list[channel.TextUpdate] = [(each.choices[0].id, [5], text, []) for each in (answer, other)]
            reader.feed_data(channel.encode(channel.TextUpdates(0.0, 0.0, parts)))
        with pytest.raises(RuntimeError):  # of StopIteration in a coroutine
            await responding
        await asyncio.sleep(0.05)
        assert not running.done() and other.choices[0].text == "xyz"
        assert [*head.choices.values()] == other.choices
        running.cancel()

    async def send_chunk(data: bytes) -> None:
        pass

    asyncio.run(respond_to_all())


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_that_no_longer_fits_is_told_why(streams: bool) -> None:
    head, sent = HeadClient(1, Metrics("m", 99), is_followed=True), list[Any]()
    form: Any = SimpleNamespace(parsed=SimpleNamespace(stream=streams))

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def hear(limit: int) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(channel.encode(channel.Ready(limit)))
        reader.feed_eof()
        await head.run(reader)

    async def run() -> None:
        await hear(99)
        answer = head.ask([request_of(1)], "a")
        head.recover("rank 1 died")
        await hear(19)
        response = AnswerResponse(head, answer, form, {}, lambda: None, lambda line: None)
        await response({"type": "http", "http_version": "1.1", "method": "POST"}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert "has 20 tokens with the text to come, and since hosts were lost the job holds 19" in str(sent[1]["body"])
