"""One address does not keep others out of a server: texts, connections, long work."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from tests.support.paces import pace_words, slow_runs
from tests.support.server_fuzz import request
from tests.support.server_hostile import ADDRESS
from tests.support.serving import Served, open_texts

N_CONNECTIONS = 12
WORDS = ["--parallel", "2", "--queue", "62", "--max-connections", str(N_CONNECTIONS), "-md", "none"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(1, WORDS) as server:
        yield server


def connect(served: Served) -> socket.socket:
    """As another client: this machine has many addresses of its own."""
    return socket.create_connection(("127.0.0.1", served.port), timeout=60, source_address=(ADDRESS, 0))


def asked_by_another(link: socket.socket, **body: object) -> None:
    link.sendall(request("POST", "/v1/completions", json.dumps(body).encode()))


def test_texts_of_other_addresses_begin_in_turns(tmp_path: Path) -> None:
    """Of 40 texts that one client asks at once, most wait longer than one that another client asks then."""

    def n_open() -> int:
        return len(open_texts(paced.http))

    pace = pace_words(tmp_path, slow_runs(25))  # so that two of the 40 take more than a second
    with Served(1, [*WORDS, *pace]) as paced, connect(paced) as link:
        asked_by_another(link, prompt="x", n=40, max_tokens=60, ignore_eos=True, stream=True)
        paced.until(lambda: n_open() > 30)
        paced.complete(prompt="y", max_tokens=4)
        assert n_open() > 20
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_one_address_may_not_fill_the_queue(served: Served) -> None:
    with connect(served) as first, connect(served) as link:
        asked_by_another(first, prompt="x", n=40, max_tokens=200, ignore_eos=True, stream=True)
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
        asked_by_another(link, prompt="x", n=20, max_tokens=4)
        response = b"".join(iter(lambda: link.recv(1 << 16), b""))
    assert response.startswith(b"HTTP/1.1 429") and b"of this address" in response


def test_one_address_may_not_take_all_connections(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(2 * N_CONNECTIONS):
            stack.enter_context(connect(served))
        assert served.http.get("/health").status_code == 200


def test_priorities_are_refused_unless_the_server_takes_them(served: Served) -> None:
    refused = served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "priority": -5})
    assert refused.status_code == 400 and "--priorities" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "priority"
    assert served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "priority": 0}).status_code == 200


def test_long_contents_are_not_tokenised(served: Served) -> None:
    refused = served.http.post("/tokenize", json={"content": "a" * 200_000, "with_pieces": True})
    assert refused.status_code == 400 and "up to 131072" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "x", "json_schema": {"$ref": "#"}}', "the JSON schema refers to itself"),
        (b'{"prompt": "x", "grammar": "root ::= root"}', "a rule of the grammar refers to itself"),
    ],
)
def test_an_error_says_what_to_do(served: Served, body: bytes, words: str) -> None:
    refused = served.http.post("/v1/completions", content=body)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
