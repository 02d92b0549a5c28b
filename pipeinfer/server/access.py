"""Access to the server: keys, CORS, and defence against other sites' pages in a browser. Reads no request's body."""

import contextlib
import hmac
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send

from pipeinfer.server.errors import Headers, Refusal

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
        return "a page of another site" if site in ELSEWHERE and not _follows_link(method, headers) else ""
    # without TLS browsers send no other header
    referer = headers.get("referer", "")
    is_other = referer and path not in OPEN_PATHS and _place_in(referer) != host
    return f"a page of {_place_in(referer) or 'another site'}" if is_other else ""


def _follows_link(method: str, headers: Headers) -> bool:
    """Whether the response replaces the page that has the link: no script reads it."""
    target = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    return method in ("GET", "HEAD") and target == ("navigate", "document")


def _place_in(url: str) -> str | None:
    """Host and port of a URL."""
    with contextlib.suppress(ValueError):
        return urlsplit(url).netloc
    return None
