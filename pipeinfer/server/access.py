"""Who may ask: keys, and pages of other sites that a browser shows. Knows no requests."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeinfer.server.errors import Refusal
from pipeinfer.server.respond import Receive, Send, send_refusal

OPEN_PATHS = ("/", "/health", "/v1/health")
"""What needs no key: a page without secrets, and whether the server lives."""

LOCAL = ("127.0.0.1", "::1", "localhost")
"""Names of this host. That of another site may lead here too, once its page has been loaded."""

App = Callable[[Any, Receive, Send], Awaitable[None]]


class Access:
    """An ASGI application that lets those through to another one who may ask it. `host`: where it listens."""

    def __init__(self, app: App, keys: Sequence[str], host: str) -> None:
        self.app, self.keys, self.is_local = app, [key.encode() for key in keys], host in LOCAL

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], dict(scope["headers"]))
            except Refusal as refusal:
                await send_refusal(send, refusal)
                return
        await self.app(scope, receive, send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._is_own(origin, headers.get(b"host", b"").decode("latin-1")):
            raise Refusal(403, f"a page of {origin[:200]} may not ask this server")
        if not self.keys or path in OPEN_PATHS:
            return
        given = headers.get(b"x-api-key", b"")
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            given = token.strip()
        if not any([hmac.compare_digest(given, key) for key in self.keys]):
            raise Refusal(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page is this server's own."""
        try:
            parts = urlsplit(origin)
            return parts.netloc == host and (bool(self.keys) or not self.is_local or parts.hostname in LOCAL)
        except ValueError:
            return False
