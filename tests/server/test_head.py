"""The HTTP process's end of the channel to rank 0, without processes."""

import asyncio
from dataclasses import fields
from typing import Any, cast

import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.channel import Ask, Closing, Finished, FromHead, Ready, TextUpdates, decode, encode
from pipeinfer.server.errors import Refusal
from pipeinfer.server.head_client import HeadClient, HeadState
from pipeinfer.server.metrics import Metrics

REQUEST = GenerationRequest((1, 2), 8, 10, SamplingParams(), frozenset())


def test_a_request_crosses_the_channel_as_it_is() -> None:
    sampling, spans = SamplingParams(seed=3, logit_bias="5:-inf", n_logprobs=2), (Span(0, 64), Span(64, 130))
    texts = frozenset({7, 3}), ("a", "é"), True
    request = GenerationRequest(
        (1, 2), 8, 10, sampling, *texts, spans, True, -5, (4, 5), "</think>", ((1, 0.5),), guesses=False
    )
    changed = [each.name for each in fields(request) if getattr(request, each.name) != getattr(REQUEST, each.name)]
    assert {*changed} == {each.name for each in fields(request)} - {"prompt", "n_predict", "n_ctx", "policy"}
    for each in (request, REQUEST):
        assert decode(encode(Ask(9, "client", each))) == Ask(9, "client", each)


class Writer:
    """Decodes what is written to it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, data: bytes) -> None:
        self.messages += map(decode, data.splitlines())


def hears(head: HeadClient, *messages: FromHead) -> list[Any]:
    """Rank 0 sends these messages, and is gone. Returns what it was sent meanwhile."""

    async def hear() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(encode, messages)))
        reader.feed_eof()
        await head.run(reader)

    writer = Writer()
    head.writer = cast(asyncio.StreamWriter, writer)
    asyncio.run(hear())
    return writer.messages


@pytest.mark.parametrize("is_followed", [False, True])
def test_what_a_head_gives_up_goes_on_where_another_one_follows(is_followed: bool) -> None:
    """Launchers stop rank 0, in order, when another rank has died."""
    head = HeadClient(4, Metrics("model", 100), is_followed)
    hears(head, Ready(100))
    (choice,) = head.ask([REQUEST], "client").choices
    hears(head, TextUpdates(0.0, 0.0, [(choice.id, [5, 6], "ab", [])]), Finished(choice.id, ""))
    if not is_followed:
        assert choice.finish == "" and not head.choices
        return
    head.recover("rank 1 died")
    assert choice.finish is None and head.state is HeadState.RECOVERING
    (message,) = (each for each in hears(head, Ready(100)) if isinstance(each, Ask))
    assert message.id == choice.id and message.request.begun == (5,)
    hears(head, TextUpdates(0.0, 0.0, [(choice.id, [6, 7], "bc", [])]), Finished(choice.id, "length"))
    assert choice.finish == "length" and choice.tokens == [5, 6, 7]


def test_a_queue_of_messages_leaves_turns_to_others() -> None:
    async def count() -> int:
        head, reader, n_turns = HeadClient(4, Metrics("model", 100)), asyncio.StreamReader(), 0
        reader.feed_data(encode(Ready(100)) * 50)
        reader.feed_eof()
        hearing = asyncio.ensure_future(head.run(reader))
        while not hearing.done():
            n_turns += 1
            await asyncio.sleep(0)
        return n_turns

    assert asyncio.run(count()) >= 50


def test_runs_of_each_head_are_counted() -> None:
    head = HeadClient(4, Metrics("model", 100), is_followed=True)
    for n_runs, n_all in ((7, 7), (3, 10), (4, 14)):
        hears(head, Ready(100))
        (choice,) = head.ask([REQUEST], "client").choices
        hears(head, Finished(choice.id, "length", n_runs=n_runs))
        assert f"llamacpp:n_decode_total {n_all}.0" in head.metrics.text().decode()
        head.recover("rank 1 died")


def test_more_texts_than_one_may_ever_have_are_not_to_be_asked_for_again() -> None:
    head = HeadClient(4, Metrics("model", 100))
    hears(head, Ready(100))
    with pytest.raises(Refusal, match="wants 4 texts, and one address may have 3") as refused:
        head.ask([REQUEST] * 4, "client")
    assert refused.value.status == 400
    assert len(head.ask([REQUEST] * 3, "client").choices) == 3


def test_nothing_waits_for_a_head_that_does_not_come() -> None:
    head = HeadClient(4, Metrics("model", 100), is_followed=True)
    hears(head, Ready(100))
    (choice,) = head.ask([REQUEST], "client").choices
    head.recover()
    head.give_up()
    assert choice.finish == "" and head.state is HeadState.LOST


@pytest.mark.parametrize("why", ["", "rank 1 died"])
def test_clients_have_the_time_of_an_end_in_order(why: str) -> None:
    """Rank 0's last message holds until the supervisor says that the job was lost."""
    head = HeadClient(4, Metrics("model", 100), is_followed=True)
    hears(head, Ready(100), Closing(9.0))
    head.recover()
    if why:
        head.recover(why)
    assert head.closing_s == (0.0 if why else 9.0)
