"""A hub on this machine: the part of its HTTP interface that downloading uses, over the folders ROOT/user/model.
`python -m tests.support.hub_server ROOT` prints its address.

A model with a file `.gated` in its folder wants the token TOKEN; one with `.broken` breaks downloads off that
begin at the first byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
API = re.compile(r"/api/models/([^/]+/[^/]+)")


class HubServer(ThreadingHTTPServer):
    """`requests`: what was asked, "METHOD path range"."""

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.root, self.requests = root, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def downloads(self) -> list[str]:
        """Requests for contents of files."""
        return [request for request in self.requests if request.startswith("GET") and "/resolve/" in request]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        file, api = FILE.fullmatch(path), API.fullmatch(path)
        found = file or api
        folder = self.server.root / found[1] if found else None
        if folder is None or not folder.is_dir():
            self._refuse(401, "RepoNotFound")
        elif (folder / ".gated").exists() and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif file and not (folder / file[3]).is_file():
            self._refuse(404, "EntryNotFound")
        elif file:
            self._send_file(folder / file[3], with_body)
        else:
            assert api
            self._send_json({"id": api[1], "sha": COMMIT, "siblings": _files(folder)})

    def _refuse(self, code: int, why: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("X-Error-Message", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_file(self, path: Path, with_body: bool) -> None:
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            mark = path.parent / ".broken"
            if mark.exists() and not wanted:
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
            else:
                self.wfile.write(data[start:])


def _files(folder: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return [{"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size} for path in files]


@contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    with HubServer(root) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


if __name__ == "__main__":
    with HubServer(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) as hub:
        print(hub.url, flush=True)
        hub.serve_forever()
