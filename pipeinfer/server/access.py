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

App = Callable[[Any, Receive, Send], Awaitable[None]]


class Access:
    """An ASGI application that lets those through to another one who may ask it."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

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
        if origin and urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
            raise Refusal(403, f"a page of {origin} may not ask this server")
        if not self.keys or path in OPEN_PATHS:
            return
        given = headers.get(b"x-api-key", b"")
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            given = token.strip()
        if not any([hmac.compare_digest(given, key) for key in self.keys]):
            raise Refusal(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
