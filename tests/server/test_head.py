"""What the process that speaks HTTP makes of what heads say, without processes."""

import asyncio
from typing import Any, cast

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.front import Ask, Came, Ended, FromHead, Ready
from pipeinfer.server.channel import decode, encode
from pipeinfer.server.head import Head, State
from pipeinfer.server.metrics import Metrics

REQUEST = GenerationRequest((1, 2), 8, 10, SamplingParams(), frozenset())


class Writer:
    """What it was told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def write(self, data: bytes) -> None:
        self.said += map(decode, data.splitlines())


def hears(head: Head, *messages: FromHead) -> list[Any]:
    """A head says this, and is gone. What it was told meanwhile."""

    async def hear() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(encode, messages)))
        reader.feed_eof()
        await head.run(reader)

    writer = Writer()
    head.writer = cast(asyncio.StreamWriter, writer)
    asyncio.run(hear())
    return writer.said


@pytest.mark.parametrize("is_followed", [False, True])
def test_what_a_head_gives_up_goes_on_where_another_one_follows(is_followed: bool) -> None:
    """Launchers stop rank 0, in order, when another rank has died."""
    head = Head(4, Metrics("model", 100), is_followed)
    hears(head, Ready(100))
    (choice,) = head.ask([REQUEST], "client").choices
    hears(head, Came(0.0, 0.0, [(choice.id, [5, 6], "ab", [])]), Ended(choice.id, ""))
    if not is_followed:
        assert choice.finish == "" and not head.choices
        return
    head.recover("rank 1 died")
    assert choice.finish is None and head.state is State.RECOVERING
    (asked,) = (each for each in hears(head, Ready(100)) if isinstance(each, Ask))
    assert asked.id == choice.id and asked.begun == (5,)
    hears(head, Came(0.0, 0.0, [(choice.id, [6, 7], "bc", [])]), Ended(choice.id, "length"))
    assert choice.finish == "length" and choice.tokens == [5, 6, 7]


def test_nothing_waits_for_a_head_that_does_not_come() -> None:
    head = Head(4, Metrics("model", 100), is_followed=True)
    hears(head, Ready(100))
    (choice,) = head.ask([REQUEST], "client").choices
    head.recover()
    head.give_up()
    assert choice.finish == "" and head.state is State.LOST
