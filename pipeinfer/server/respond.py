"""Answers on their way to clients: whole or as events, cancelled when a client leaves. Knows no tokens."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Send

from pipeinfer.models.text.grammar import TOO_MUCH
from pipeinfer.server.access import WRITE, Chunks
from pipeinfer.server.choices import Answer
from pipeinfer.server.errors import DRAINING_S, JsonResponse, LargeJsonResponse, Refusal, lost
from pipeinfer.server.forms import OpenAIForm
from pipeinfer.server.head_client import HeadClient, HeadState

T = TypeVar("T")
PING_S = 15.0
"""After so long without output a stream gets a comment, which tells proxies and users what the answer waits for."""

SAFE_NAME, MAX_NAMED = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII), 32  # names that a header may have, and how many
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
STREAM_HEADERS |= {"x-accel-buffering": "no"}


@dataclass(eq=False)
class AnswerResponse(Response):
    """A completion, whole or as events, cancelled when the client leaves. `on_end`: called when it is over. `extra`:
    further headers. `warn`: called for each text that does not fit its schema."""

    head: HeadClient
    answer: Answer
    form: OpenAIForm
    extra: dict[str, str]
    on_end: Callable[[], object]
    warn: Callable[[str], object]

    def __post_init__(self) -> None:
        super().__init__()
        self._failure: Exception | None = None  # of `_push`

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self.chunks: Chunks | None = (scope.get("extensions") or {}).get(WRITE) if chunked else None
        respond = self._stream if self.form.parsed.stream else self._whole
        responding = asyncio.ensure_future(respond(scope, receive, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((responding, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (responding, leaving):
                task.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await responding
            finally:
                self.head.cancel(self.answer)
                self.on_end()

    async def _whole(self, scope: Any, receive: Receive, send: Send) -> None:
        await self.answer.end()
        if self.answer.was_given_up:
            await self._refusal().response(scope, receive, send)
            return
        is_large = self.form.is_large
        whole = await asyncio.to_thread(self.form.whole) if is_large else self.form.whole()
        mismatches = await self._mismatches()
        if mismatches and isinstance(whole, dict):
            whole |= {"warnings": mismatches}
        content = whole, 200, self.extra
        response = await asyncio.to_thread(LargeJsonResponse, *content) if is_large else JsonResponse(*content)
        await response(scope, receive, send)

    async def _mismatches(self) -> list[str]:
        """Where the texts do not fit their schemas. They are logged too."""
        mismatches = await asyncio.to_thread(self.form.mismatches) if self.form.parsed.schemas else []
        for line in mismatches:
            self.warn(line)
        return mismatches

    async def _stream(self, scope: Any, receive: Receive, send: Send) -> None:
        ping_s = time.monotonic() + PING_S
        await self._change(PING_S)
        if self.answer.was_given_up:  # nothing was sent yet: it can be refused
            await self._refusal().response(scope, receive, send)
            return
        headers = [(name.encode(), value.encode()) for name, value in (STREAM_HEADERS | self.extra).items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = self.form.first()
        while True:
            data += self.form.events()
            if self.answer.has_ended:
                break
            if data or time.monotonic() >= ping_s:
                data = data or b": %b\n\n" % self._awaits.encode()
                await (self.chunks.send(data) if self.chunks else _send_part(send, data))
                ping_s = time.monotonic() + PING_S
            self.answer.changed.push = partial(self._push, self.chunks) if self.chunks else None
            try:
                await self._change(ping_s - time.monotonic())
            finally:
                self.answer.changed.push = None
            data = b""
        await self._mismatches()  # before the end, behind which no client waits
        data += self.form.error_event(self._refusal()) if self.answer.was_given_up else self.form.last()
        await _send_part(send, data, more=False)

    def _push(self, chunks: Chunks) -> Callable[[], None] | None:
        """See `Changed.push`."""
        if not chunks.flows or self.answer.has_ended:
            return None
        try:
            data = self.form.events()
        except Exception as error:  # of this answer alone: its own coroutine ends by it
            self._failure = error
            return None
        return partial(chunks.write, data) if data else None

    @property
    def _awaits(self) -> str:
        """The reason why there is no output now, for clients, in a line."""
        if self.head.state is HeadState.RECOVERING:
            return f"the job is started again: {' '.join(self.head.reason.split())}"
        return self.answer.awaits

    def _refusal(self) -> Refusal:
        """The reason why the answer was given up."""
        if self.answer.has_failed:
            return Refusal(400, TOO_MUCH)
        if self.head.state is HeadState.LOST and not self.head.closing_s:
            return lost()
        if outgrown := self.head.outgrown(choice.request for choice in self.answer.choices):
            return outgrown
        return Refusal(503, "the server has stopped before this was complete", DRAINING_S)

    async def _change(self, timeout_s: float) -> None:
        """Wait for a change, which may bring no output."""
        # not wait_for, which before Python 3.12 swallows a cancellation that comes with the change
        timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self.answer.changed.set)
        try:
            await self.answer.changed.wait()
        finally:
            timer.cancel()
        self.answer.changed.clear()
        if self._failure:
            raise self._failure


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled when the client leaves; its body must be read. Raises ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def passed_over_header(reasons: Mapping[str, str]) -> dict[str, str]:
    """The names of a request's fields and parts that are passed over."""
    names = [name for name in reasons if SAFE_NAME.fullmatch(name)][:MAX_NAMED]
    return {"x-pipeinfer-passed-over": ", ".join(names)} if names else {}


async def _send_part(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
