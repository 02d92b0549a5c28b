"""Answers on their way to a client, who may leave at any time: then nobody writes on for it. Knows no tokens."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from pipeinfer.models.text.grammar_check import TOO_MUCH
from pipeinfer.server.choices import Answer
from pipeinfer.server.errors import DRAINING_S, Refusal, error_body, lost
from pipeinfer.server.forms import Form, json_bytes
from pipeinfer.server.head import Head, State
from pipeinfer.server.limits import WRITE, Chunks

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PING_S = 15.0
"""A stream in which nothing has come for so long gets a comment, which says what it waits for: who is between sees that
it lives."""

SAFE_NAME, MAX_NAMED = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII), 32
"""Names that a header may have, and how many."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]  # fmt: skip


class JsonResponse(Response):
    """A JSON object; what cannot be said in UTF-8 is replaced."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


class WatchedResponse(Response):
    """`respond` is cancelled when the client leaves, or to stop it."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self.chunks: Chunks | None = (scope.get("extensions") or {}).get(WRITE) if chunked else None
        responding = asyncio.ensure_future(self.respond(send))
        leaving = asyncio.ensure_future(_has_left(receive))
        try:
            await asyncio.wait((responding, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (responding, leaving):
                task.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await responding
            finally:
                self.over()

    async def respond(self, send: Send) -> None:
        raise NotImplementedError

    def over(self) -> None:
        """The client has all, or has left."""


async def _has_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class AnswerResponse(WatchedResponse):
    """A completion, whole or as events. `on_end`: it is over. `named`: further headers. `warn`: is told what is wrong
    with the answer."""

    def __init__(
        self, head: Head, answer: Answer, form: Form, on_end: Callable[[], object] = lambda: None,
        named: Mapping[str, str] = MappingProxyType({}), warn: Callable[[str], object] = lambda said: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head, self.answer, self.form, self.on_end = head, answer, form, on_end
        self.named, self.warn = named, warn

    def over(self) -> None:
        self.head.drop(self.answer)
        self.on_end()

    async def respond(self, send: Send) -> None:
        await (self._stream(send) if self.form.asked.stream else self._whole(send))

    async def _whole(self, send: Send) -> None:
        while not self.answer.has_ended:
            await self._change()
        if self.answer.was_given_up:
            await send_refusal(send, self._why())
        else:
            whole = self.form.whole()
            if wrong := await self._mismatches():
                whole = whole | {"warnings": wrong} if isinstance(whole, dict) else whole
            await send_json(send, 200, whole, self.named)

    async def _mismatches(self) -> list[str]:
        """Where the answer does not fit what was asked; the log has it too."""
        found = await asyncio.to_thread(self.form.mismatches) if self.form.has_checks else []
        for wrong in found:
            self.warn(wrong)
        return found

    async def _stream(self, send: Send) -> None:
        alarm = Alarm(PING_S, self.answer.changed.set)
        try:
            await self._change()
            if self.answer.was_given_up:  # nothing has been said yet: it can be refused
                await send_refusal(send, self._why())
                return
            headers = [*STREAM_HEADERS, *_encoded(self.named)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._pieces(send, alarm)
        finally:
            alarm.cancel()

    async def _pieces(self, send: Send, alarm: "Alarm") -> None:
        told = set[int]()
        said = self.form.first()
        while True:
            said += b"".join(self.form.pieces(told))
            if self.answer.has_ended:
                break
            if said or alarm.has_rung():
                said = said or b": %b\n\n" % self.answer.awaits.encode()
                await (self.chunks.send(said) if self.chunks else send_part(send, said))
            self.answer.changed.push = partial(self._push, self.chunks, told) if self.chunks else None
            try:
                await self._change()
            finally:
                self.answer.changed.push = None
            said = b""
        await self._mismatches()  # before the end, behind which nobody waits for this
        said += self.form.failed(self._why()) if self.answer.was_given_up else self.form.last()
        await send_part(send, said, more=False)

    def _push(self, chunks: Chunks, told: set[int]) -> Callable[[], None] | None:
        """While this waits for the next change: what has come, to be written at once."""
        if not chunks.flows or self.answer.has_ended:
            return None
        said = b"".join(self.form.pieces(told))
        return partial(chunks.write, said) if said else None

    def _why(self) -> Refusal:
        if self.answer.has_failed:
            return Refusal(400, TOO_MUCH)
        if self.head.state is State.LOST and not self.head.closing_s:
            return lost()
        return Refusal(503, "the server has stopped before this was complete", DRAINING_S)

    async def _change(self) -> None:
        """Wait until something has come, or the alarm rings."""
        await self.answer.changed.wait()
        self.answer.changed.clear()


class Alarm:
    """Rings every `period_s`."""

    def __init__(self, period_s: float, ring: Callable[[], None]) -> None:
        self.period_s, self.ring, self._rung = period_s, ring, False
        self._set()

    def _set(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.period_s, self._now)

    def _now(self) -> None:
        self._rung = True
        self.ring()
        self._set()

    def has_rung(self) -> bool:
        """Since it was asked the last time."""
        rung, self._rung = self._rung, False
        return rung

    def cancel(self) -> None:
        self._timer.cancel()


class EventsResponse(WatchedResponse):
    """Events for as long as there are some."""

    def __init__(self, events: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        super().__init__()
        self.events, self._over = events, over

    def over(self) -> None:
        self._over()

    async def respond(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for said in self.events:
            await send_part(send, said)
        await send_part(send, b"", more=False)


async def send_part(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def passed_over_header(reasons: Mapping[str, str]) -> dict[str, str]:
    """Names the fields and parts of a request that are not served."""
    names = [name for name in reasons if SAFE_NAME.fullmatch(name)][:MAX_NAMED]
    return {"x-pipeinfer-passed-over": ", ".join(names)} if names else {}


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def send_json(send: Send, status: int, data: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
    body = json_bytes(data)
    given = _encoded(headers)
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + given})
    await send_part(send, body, more=False)


async def send_refusal(send: Send, refusal: Refusal) -> None:
    await send_json(send, refusal.status, error_body(refusal.status, refusal.message), refusal.headers)
