"""Clients that err, lie, leave and dawdle, at random: what a server must take without a fault. A case is its number."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

from tests.support.serving import LISTENS, Served

ALLOWED = {200, 400, 403, 404, 405, 408, 413, 429, 431, 503}
"""Never 500: that is a fault of the server."""

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/health",
    "/slots",
    "/metrics",
    "/",
    "/events",
    "/v1/embeddings",
    "/../etc/passwd",
    "/%00",
    "/v1/models/%ff",
    "/?a=b#c",
)
EXPECTED = (
    "has no chat template",
    "a request is served without a part of it",
    "guesses cost time here",
    "guesses save time again",
)
"""Lines of the log that clients may cause."""

METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "G\0T", "get")
FIELDS = (
    "prompt",
    "messages",
    "max_tokens",
    "n_predict",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "best_of",
    "ignore_eos",
    "presence_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "user",
    "model",
    "tools",
    "response_format",
    "json_schema",
    "grammar",
    "logit_bias",
    "timings_per_token",
    "return_progress",
    "cache_prompt",
    "content",
    "tokens",
    "with_pieces",
    "unknown",
    "\ud800",
    "",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**32 - 1,
    2**63,
    -(2**70),
    0.5,
    1e308,
    -1e-300,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "\0",
    "x" * 5000,
    "é🙂" * 50,
    [],
    [1, 2],
    [[1], ["a"]],
    ["a", "b"],
    [None],
    {},
    {"a": {}},
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "tool"}],
    [{"content": "a"}],
    {"include_usage": True},
    [5] * 900,
    [10**9],
    "<|im_start|>",
    [[[[]]]],
    {"type": "json_object"},
    {"5": -1},
    [[5, False]],
    'root ::= "a" [b\u00e9]*',
)


def body_of(rng: random.Random) -> bytes:
    """Nearly a request."""
    asked: dict[str, Any] = {"max_tokens": rng.randint(1, 6), "seed": rng.randrange(99)}
    asked |= (
        {"prompt": "def f" * rng.randint(1, 9)}
        if rng.random() < 0.7
        else {"messages": [{"role": "user", "content": "a" * rng.randint(0, 30)}]}
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        asked[rng.choice(FIELDS)] = rng.choice(VALUES)
    data = bytearray(json.dumps(asked).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 3, 30))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.1 else data)


def send(served: Served, data: bytes, rng: random.Random, patience_s: float = 20) -> bytes:
    """Send it in pieces, and read until the end, or leave before."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=patience_s) as link:
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it was sent
            for start in range(0, len(data), step := rng.choice((1 << 20, 1 << 20, 400, 37))):
                link.sendall(data[start : start + step])
        leaves = rng.random()
        if leaves < 0.15:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # without a goodbye
            return b""
        if leaves < 0.3:
            link.settimeout(rng.random() * 0.05)
            with contextlib.suppress(TimeoutError, ConnectionError):
                link.recv(rng.choice((1, 100, 5000)))
            return b""
        said = b""
        with contextlib.suppress(ConnectionError):
            while more := link.recv(1 << 16):
                said += more
        return said


def check(said: bytes) -> None:
    """Whatever came is HTTP, with a status that a client can do something with."""
    if not said:
        return
    head, _, body = said.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert head.startswith(b"HTTP/1.1 ") and status in ALLOWED, said[:2000]
    if status >= 400 and b"application/json" in head and body:
        error = json.loads(body)["error"]
        assert error["message"] and error["code"] in (status, "context_length_exceeded"), said[:2000]
    if status in (429, 503):
        assert b"retry-after: " in head.lower()


def request(method: str, path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    lines += (
        []
        if any("chunked" in header for header in headers)
        else [f"content-length: {len(body) if length is None else length}"]
    )
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body


# -- kinds of cases


def asks(served: Served, rng: random.Random) -> None:
    check(send(served, request("POST", rng.choice(PATHS[:4]), body_of(rng)), rng))


def wanders(served: Served, rng: random.Random) -> None:
    method, path = rng.choice(METHODS), rng.choice([path for path in PATHS if path != "/events"])
    check(send(served, request(method, path, body_of(rng)), rng))


def babbles(served: Served, rng: random.Random) -> None:
    data = rng.choice((b"", b"POST / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"))
    check(send(served, data + rng.randbytes(rng.randint(0, 300)) + b"\r\n\r\n", rng))


def lies_about_its_length(served: Served, rng: random.Random) -> None:
    body = body_of(rng)
    length = rng.choice((0, 1, len(body) - 1, -1, 10**12, 3 << 20))
    data = request("POST", PATHS[0], body, length=length)
    if length > len(body) and length < 10**12:
        data += b" " * (length - len(body))  # it does send so much
    elif length > len(body):
        pass  # it is refused at once
    check(send(served, data, rng))


def sends_chunks(served: Served, rng: random.Random) -> None:
    body = body_of(rng)
    size = rng.choice((f"{len(body):x}", "zz", f"{len(body) + 5:x}", "0"))
    data = f"{size}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    check(send(served, request("POST", PATHS[0], data, "transfer-encoding: chunked"), rng))


def sends_many_headers(served: Served, rng: random.Random) -> None:
    headers = [f"x-{i}: {'y' * rng.choice((1, 100, 9000))}" for i in range(rng.choice((1, 20, 90)))]
    check(send(served, request("GET", "/health", b"", *headers), rng))


def leaves_a_stream(served: Served, rng: random.Random) -> None:
    asked = {
        "prompt": "def ",
        "max_tokens": rng.choice((20, 200, 700)),
        "ignore_eos": True,
        "stream": True,
        "n": rng.choice((1, 1, 3)),
        "seed": rng.randrange(99),
    }
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        link.sendall(request("POST", PATHS[0], json.dumps(asked).encode()))
        link.settimeout(rng.random() * 0.2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(rng.randint(0, 5)):
                link.recv(rng.choice((1, 500, 50_000)))


def watches_a_moment(served: Served, rng: random.Random) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        link.sendall(request("GET", "/events", b""))
        link.settimeout(rng.random() * 0.3)
        with contextlib.suppress(TimeoutError, ConnectionError):
            link.recv(4096)


def falls_silent(served: Served, rng: random.Random) -> None:
    """In the middle of what it says; it is gone when the case ends."""
    data = request("POST", PATHS[0], body_of(rng))
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        link.sendall(data[: rng.randrange(len(data))])
        link.settimeout(rng.random() * 0.05)
        with contextlib.suppress(TimeoutError, ConnectionError):
            link.recv(100)


KINDS: tuple[Callable[[Served, random.Random], None], ...] = (
    asks,
    asks,
    asks,
    asks,
    wanders,
    babbles,
    lies_about_its_length,
    sends_chunks,
    sends_many_headers,
    leaves_a_stream,
    watches_a_moment,
    falls_silent,
)


def faults_of(served: Served) -> str:
    """What the server says of itself after it listens, but for what it may."""
    lines = served.lines[1 + next(at for at, line in enumerate(served.lines) if line.startswith(LISTENS)) :]
    return "".join(line for line in lines if not any(said in line for said in EXPECTED))


def run_case(served: Served, number: int) -> str:
    """Returns what kind it was; raises AssertionError for an answer that no client could understand."""
    rng = random.Random(number)
    kind = rng.choice(KINDS)
    try:
        kind(served, rng)
    except Exception as error:
        raise AssertionError(f"case {number}, {kind.__name__}: {type(error).__name__}: {error}") from error
    return kind.__name__
