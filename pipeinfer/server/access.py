"""Who may ask: keys, pages of other sites that a browser shows, bodies of two lengths. Knows no request's body."""

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from pipeinfer.server.errors import Refusal
from pipeinfer.server.pages import KINDS
from pipeinfer.server.respond import Receive, Send, send_refusal

OPEN_PATHS = (*KINDS, "/health", "/v1/health")
"""What needs no key: a page without secrets, and whether the server lives."""

LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")

ELSEWHERE = ("cross-site", "same-site")
"""What a browser says in Sec-Fetch-Site of a page of another host, or of another port of this one."""

ASKED_HEADERS = b"access-control-request-headers"
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"86400"),
]  # fmt: skip
"""What a page may send, beside the headers that it names."""

Headers = Mapping[bytes, bytes]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class Access:
    """An ASGI application that lets those through to another one who may ask it. `host`: where it was told to listen;
    `address`: where it does. `origins`: whose pages may ask (CORS); *: all."""

    def __init__(self, app: App, keys: Sequence[str], host: str, address: str, origins: Sequence[str] = ()) -> None:
        self.origins = origins
        self.app, self.keys, self.host = app, [key.encode() for key in keys], host.lower()
        self.is_local = is_loopback(address)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if self._may_ask(_text(headers, b"origin")):
                send = _sharing(send, headers[b"origin"])
                if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                    await _allow(send, headers)
                    return
            try:
                self._check(scope["method"], scope["path"], headers)
            except Refusal as refusal:
                await send_refusal(send, refusal)
                return
        await self.app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # a proxy before this server may go by the other one, and take what is left for somebody's next request
            raise Refusal(400, "Content-Length and Transfer-Encoding both say how long the body is; send one of them",
                          closes=True)  # fmt: skip
        self._check_name(_text(headers, b"host"))
        if not self._may_ask(_text(headers, b"origin")) and (page := _other_page(method, path, headers)):
            raise Refusal(403, f"{page[:200]} may not ask this server")
        if not self.keys or path in OPEN_PATHS:
            return
        given = headers.get(b"x-api-key", b"")
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            given = token.strip()
        if not any([hmac.compare_digest(given, key) for key in self.keys]):
            raise Refusal(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")

    def _may_ask(self, origin: str) -> bool:
        """Whether a page of this origin may, although it is another site's."""
        return bool(origin) and ("*" in self.origins or origin in self.origins)

    def _check_name(self, host: str) -> None:
        """A page of another site may be shown whose name was made to lead here since: to the browser it asks its own
        site. Only the name tells, and which names a host has is known of the loopback interface alone."""
        if self.keys or not self.is_local or not host:
            return
        name = _name_in(f"//{host}")
        if name is None or not (name == self.host or is_loopback(name)):
            raise Refusal(403, f"{host[:200]} is no name of this host, and without a key this server answers to those "
                          "alone; ask localhost, or start it with --api-key")  # fmt: skip


async def _allow(send: Send, headers: Headers) -> None:
    """The answer to a browser that asks what a page may send."""
    allowed = (b"access-control-allow-headers", headers.get(ASKED_HEADERS, b"content-type"))
    await send({"type": "http.response.start", "status": 204, "headers": [*PREFLIGHT, allowed]})
    await send({"type": "http.response.body", "body": b""})


def _sharing(send: Send, origin: bytes) -> Send:
    """`send`, for answers that a page of this origin may read."""

    async def sharing(message: Any) -> None:
        if message["type"] == "http.response.start":
            shared = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            message = {**message, "headers": [*message["headers"], *shared]}
        await send(message)

    return sharing


def is_loopback(name: str) -> bool:
    """Whether a name or an address is that of this host on every host."""
    try:
        return name in LOOPBACK_NAMES or ip_address(name).is_loopback
    except ValueError:
        return False


def _other_page(method: str, path: str, headers: Headers) -> str:
    """For which page of another site a browser asks; empty if for none, or if nothing says so."""
    origin, host = _text(headers, b"origin"), _text(headers, b"host")
    if origin:
        return "" if _place_in(origin) == host else f"a page of {origin}"
    site = _text(headers, b"sec-fetch-site")
    if site:
        return "a page of another site" if site in ELSEWHERE and not _follows_link(method, headers) else ""
    # browsers say no more to a host that they reach without TLS, but for this one
    referer = _text(headers, b"referer")
    is_other = referer and path not in OPEN_PATHS and _place_in(referer) != host
    return f"a page of {_place_in(referer) or 'another site'}" if is_other else ""


def _follows_link(method: str, headers: Headers) -> bool:
    """Whether what comes is shown to the user in place of the page that has the link: no script reads it."""
    shown = (_text(headers, b"sec-fetch-mode"), _text(headers, b"sec-fetch-dest"))
    return method in ("GET", "HEAD") and shown == ("navigate", "document")


def _text(headers: Headers, name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _place_in(url: str) -> str | None:
    """Host and port."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _name_in(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
