"""Answers on their way: whatever ends one, nobody works on it any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipeinfer.server.respond import EventsResponse


async def one_event_then_a_fault() -> AsyncIterator[bytes]:
    yield b"data: 1\n\n"
    raise KeyError("x")


def test_an_answer_that_fails_is_over() -> None:
    over, sent = list[bool](), list[str]()

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    response = EventsResponse(one_event_then_a_fault(), lambda: over.append(True))
    with pytest.raises(KeyError):
        asyncio.run(response({"http_version": "1.1", "method": "GET"}, receive, send))
    assert over == [True] and sent == ["http.response.start", "http.response.body"]
