"""Access to the server: keys, CORS, defence against other sites' pages in a browser; and limits of connections: their
number, time to send a request and its size, time to read."""

import asyncio
import contextlib
import hmac
import resource
from collections import Counter
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeinfer.server.errors import Headers, Refusal, json_bytes
from pipeinfer.server.front import most_of_one

SCRIPTS = {f"/page/{name}": (name, "text/javascript") for name in ("markdown.js", "page.js")}
PAGE_FILES = {"/": ("index.html", "text/html"), "/page/page.css": ("page.css", "text/css"), **SCRIPTS}
OPEN_PATHS = (*PAGE_FILES, "/health", "/v1/health")  # paths without secrets, which need no key
LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")

ELSEWHERE = ("cross-site", "same-site")
"""A browser's Sec-Fetch-Site for a page of another host, or of another port of this one."""

PREFLIGHT = {"access-control-allow-methods": "GET, POST", "access-control-max-age": "86400"}
"""What a page may send; its headers are allowed as it names them."""


class Access:
    """An ASGI application that passes permitted requests on to another one. `host`: of --host; `address`: where it
    listens. `origins`: of pages that are permitted (CORS); *: all."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str, address: str, origins: Sequence[str] = ()) -> None:
        self.origins = origins
        self.app, self.keys, self.host = app, [key.encode() for key in keys], host.lower()
        self.is_local = is_loopback(address)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if self._is_shared(headers):
                send = _sharing(send, headers["origin"])
                if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                    allowed = headers.get("access-control-request-headers", "content-type")
                    preflight = Response(None, 204, PREFLIGHT | {"access-control-allow-headers": allowed})
                    await preflight(scope, receive, send)
                    return
            try:
                self._check(scope["method"], scope["path"], headers)
            except Refusal as refusal:
                await refusal.response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # a proxy may go by the other one, and take the rest for the next client's request (smuggling)
            message = "Content-Length and Transfer-Encoding both say how long the body is; send one of them"
            raise Refusal(400, message, headers={"connection": "close"})
        self._check_name(headers.get("host", ""))
        if not self._is_shared(headers) and (page := _other_page(method, path, headers)):
            raise Refusal(403, f"{page[:200]} may not ask this server")
        if not self.keys or path in OPEN_PATHS:
            return
        client_key = headers.get("x-api-key", "")
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            client_key = token.strip(" \t")
        if not any([hmac.compare_digest(client_key.encode("latin-1"), key) for key in self.keys]):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise Refusal(401, message, headers={"www-authenticate": "Bearer"})

    def _is_shared(self, headers: Headers) -> bool:
        """Whether the request is of a page of a permitted other origin."""
        origin = headers.get("origin", "")
        return bool(origin) and ("*" in self.origins or origin in self.origins)

    def _check_name(self, host: str) -> None:
        """Against DNS rebinding: a page whose host name now resolves to this server has its own origin in the browser.
        Only the name tells, and only the names of the loopback interface are known."""
        if self.keys or not self.is_local or not host:
            return
        name = None
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname
        if name is None or not (name == self.host or is_loopback(name)):
            reason = "is no name of this host, and without a key this server answers to those alone"
            raise Refusal(403, f"{host[:200]} {reason}; ask localhost, or start it with --api-key")


def _sharing(send: Send, origin: str) -> Send:
    """`send`, with headers that let a page of this origin read the response."""

    async def sharing(message: Any) -> None:
        if message["type"] == "http.response.start":
            shared = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            message = {**message, "headers": [*message["headers"], *shared]}
        await send(message)

    return sharing


def is_loopback(name: str) -> bool:
    """Whether a name or an address is of the loopback interface."""
    try:
        return name in LOOPBACK_NAMES or ip_address(name).is_loopback
    except ValueError:
        return False


def _other_page(method: str, path: str, headers: Headers) -> str:
    """The page of another site that makes a browser send this request; empty if none is known."""
    origin, host = headers.get("origin", ""), headers.get("host", "")
    if origin:
        return "" if _place_in(origin) == host else f"a page of {origin}"
    site = headers.get("sec-fetch-site", "")
    if site:
        target = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        # the response then replaces the page that has the link: no script reads it
        follows_link = method in ("GET", "HEAD") and target == ("navigate", "document")
        return "a page of another site" if site in ELSEWHERE and not follows_link else ""
    # without TLS browsers send no other header
    referer = headers.get("referer", "")
    is_other = referer and path not in OPEN_PATHS and _place_in(referer) != host
    return f"a page of {_place_in(referer) or 'another site'}" if is_other else ""


def _place_in(url: str) -> str | None:
    """Host and port of a URL."""
    with contextlib.suppress(ValueError):
        return urlsplit(url).netloc
    return None


# -- connections

HEAD_S = 30.0  # how long the head of a request may take at most
HEAD_BYTES = 1 << 16  # of a request's head, while it is not complete
WRITE = "pipeinfer.write"  # the name of `Chunks` among the extensions of a request's scope

N_LINGERING, LINGER_S = 32, 1.0
"""Refused connections that stay open for so long, and how long, as one closed with unread data may lose the answer."""

N_OTHER_FILES = 64 + N_LINGERING
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n"
    + json_bytes(Refusal(503, "there are too many connections; ask again later").body)
)


MOST_CHUNKS, CHUNK_BYTES = 1 << 15, 64
"""A body may come in so many chunks, and one more for each CHUNK_BYTES of it: reading a chunk keeps all clients waiting
as long as some kilobytes of a body without chunks do."""


class LimitedConnection(h11.Connection):
    """h11's, which refuses a body of too many chunks."""

    _n_chunks = _n_bytes = 0  # of the body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = self._n_bytes = 0
        elif isinstance(event, h11.Data):
            self._n_chunks += event.chunk_end
            self._n_bytes += len(event.data)
            if self._n_chunks > MOST_CHUNKS + self._n_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many chunks")
        return event


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
            self.conn = LimitedConnection(h11.SERVER, HEAD_BYTES)
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


MOST_DISCARDED = 32 << 20  # bytes of a body that is too long


async def read_body(request: Request, n_most: int) -> bytes:
    """Raises Refusal for a body of more than `n_most` bytes. It is read to its end first, since many clients read no
    answer before they have sent all; a much longer one is not, nor one whose client waits for permission to send."""
    message = f"the request is longer than {n_most} bytes; say less, or start the server with a larger --max-body"
    length = request.headers.get("content-length", "0")
    n_declared = int(length) if length.isdecimal() else 0
    if n_declared > n_most + MOST_DISCARDED or (n_declared > n_most and "expect" in request.headers):
        raise Refusal(413, message)
    data, n_read = bytearray(), 0
    async for part in request.stream():
        n_read += len(part)
        if n_read <= n_most:
            data += part
        elif n_read > n_most + MOST_DISCARDED:
            break
    if n_read > n_most:
        raise Refusal(413, message)
    return bytes(data)
