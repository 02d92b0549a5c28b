"""The page at /: files that a browser gets as they are, and may load nothing else."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
KINDS = {
    "/": ("index.html", "text/html"),
    **{f"/page/{name}": (name, "text/javascript") for name in ("markdown.js", "page.js")},
    "/page/page.css": ("page.css", "text/css"),
}  # fmt: skip
HEADERS = {
    "cache-control": "no-cache", "x-frame-options": "DENY", "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:",
}  # fmt: skip


async def show_page(request: Request) -> Response:
    name, kind = KINDS[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=HEADERS)
