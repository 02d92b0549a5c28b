"""What one connection may take: time to ask, time to read, room beside the others. Knows no requests."""

import asyncio
import contextlib
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeinfer.server.options import most_of_one

HEAD_S = 30.0
"""How long the first lines of a request may take at most: until then nobody knows what a client wants."""

WRITE = "pipeinfer.write"
"""The extension of a request's scope, `Chunks`."""

N_LINGERING, LINGER_S = 32, 1.0
"""Connections above the limit that may say what they want for so long, while they hear that it is too much."""

N_OTHER_FILES = 64 + N_LINGERING
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    b'{"error": {"message": "there are too many connections; ask again later", "type": "unavailable_error", '
    b'"param": null, "code": 503}}'
)


class Chunks:
    """Parts of a body that is sent in chunks, without the many steps of `send`: a token is one."""

    def __init__(self, protocol: H11Protocol) -> None:
        self._transport, self._flow = protocol.transport, protocol.flow

    @property
    def flows(self) -> bool:
        """Whether the connection takes more now."""
        return not self._flow.write_paused and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Where it `flows`."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send(self, data: bytes) -> None:
        """Once it flows."""
        if self._flow.write_paused:
            await self._flow.drain()
        if not self._transport.is_closing():
            self.write(data)


def limited_protocol(n_connections: int, timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits; as many connections as the system allows files, if that is less."""
    n_most = min(n_connections, _n_files() - N_OTHER_FILES)
    n_of = Counter[str]()  # connections of each address that are served

    class LimitedProtocol(H11Protocol):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            app, self.app = self.app, self._with_writing
            self._served = app
            self._asking: asyncio.TimerHandle | None = None
            self._reading: asyncio.TimerHandle | None = None

        async def _with_writing(self, scope: Any, receive: Any, send: Any) -> None:
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
            """What it sends meanwhile is read, as who is closed upon with something unread may not see the answer."""
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
            """Between two requests a client has begun to speak, or is new: it has so long to say what it wants."""
            if self.cycle is not None and not self.cycle.response_complete:
                _cancel(self._asking)
                self._asking = None
            elif self._asking is None:
                self._asking = self.loop.call_later(min(HEAD_S, timeout_s), self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._reading)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if not self._is_refused:
                n_of[self._address] -= 1
                if not n_of[self._address]:
                    del n_of[self._address]
            _cancel(self._asking)
            _cancel(self._reading)

    return LimitedProtocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()


def _n_files() -> int:
    """Files that this process may have open; more than by default, where it may ask for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
