"""Limits of connections: time to send a request, time to read, number. Knows no requests."""

import asyncio
import contextlib
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeinfer.server.errors import Refusal, json_bytes
from pipeinfer.server.front import most_of_one

HEAD_S = 30.0  # how long the head of a request may take at most
WRITE = "pipeinfer.write"  # the name of `Chunks` among the extensions of a request's scope

N_LINGERING, LINGER_S = 32, 1.0
"""Refused connections that stay open for so long, and how long, as one that is closed with unread data may lose the
answer."""

N_OTHER_FILES = 64 + N_LINGERING
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    + json_bytes(Refusal(503, "there are too many connections; ask again later").body)
)


class Chunks:
    """Writes parts of a chunked body without the many steps of ASGI's `send`: each token is one."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._transport, self._flow = protocol.transport, protocol.flow

    @property
    def flows(self) -> bool:
        """Whether the connection accepts data now."""
        return not self._flow.write_paused and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Only where it `flows`."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """Waits until it flows."""
        if self._flow.write_paused:
            await self._flow.drain()
        if not self._transport.is_closing():
            self.write(data)


def limited_protocol(n_connections: int, timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits, and no more connections than the system allows files."""
    n_most = min(n_connections, _n_files() - N_OTHER_FILES)
    n_of = Counter[str]()  # open connections by address

    class LimitedProtocol(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._served, self.app = self.app, self._with_chunks
            self._head_timer: asyncio.TimerHandle | None = None
            self._write_timer: asyncio.TimerHandle | None = None

        async def _with_chunks(self, scope: Any, receive: Any, send: Any) -> None:
            await self._served({**scope, "extensions": {WRITE: Chunks(self)}}, receive, send)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._address = self.client[0] if self.client else ""
            self._is_refused = n_of.total() >= n_most or n_of[self._address] >= most_of_one(n_most)
            if self._is_refused:
                self._refuse(transport)
            else:
                n_of[self._address] += 1
                self._await_request()

        def _refuse(self, transport: asyncio.Transport) -> None:
            """Send `FULL`, and read on for LINGER_S."""
            transport.write(FULL)
            if len(self.connections) > n_most + N_LINGERING or not transport.can_write_eof():
                transport.close()
                return
            transport.write_eof()
            self.loop.call_later(LINGER_S, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self._is_refused or self.transport.is_closing():
                return
            super().data_received(data)
            self._await_request()

        def _await_request(self) -> None:
            """Start the timer of a new connection or of a further request."""
            if self.cycle is not None and not self.cycle.response_complete:
                _cancel(self._head_timer)
                self._head_timer = None
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(min(HEAD_S, timeout_s), self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._write_timer)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if not self._is_refused:
                n_of[self._address] -= 1
                if not n_of[self._address]:
                    del n_of[self._address]
            _cancel(self._head_timer)
            _cancel(self._write_timer)

    return LimitedProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


def _n_files() -> int:
    """Files that this process may have open, after its limit was raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
