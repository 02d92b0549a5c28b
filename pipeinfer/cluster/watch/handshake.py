"""What both ends of the watch speak: who proves what to whom, and lines of bounded length. Standard library alone.

Nobody but the ranks of a job knows its key, which never travels over a connection. The sentinel sends a nonce; a rank
answers with its number, a nonce of its own and the proof that it knows the key; the sentinel proves the same. Only then
is anything else read. Messages are JSON objects, one a line.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

MAX_LINE_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 256
Message = dict[str, Any]


def new_key() -> str:
    return secrets.token_hex(32)


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof(key: str, speaker: str, rank: int, challenge: str, nonce: str) -> str:
    """What only a holder of the key can say to this challenge; `speaker` keeps the two ends' apart."""
    text = f"{speaker} {rank} {challenge} {nonce}"
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def answer(key: str, rank: int, challenge: str, nonce: str) -> bytes:
    """A rank's line."""
    return f"{rank} {nonce} {proof(key, 'rank', rank, challenge, nonce)}\n".encode()


def read_answer(line: bytes, key: str, challenge: str) -> tuple[int, bytes] | None:
    """(rank, the sentinel's line in return) if the line proves that the rank knows the key."""
    with contextlib.suppress(ValueError):  # UnicodeDecodeError too
        number, nonce, given = line.decode("ascii").split(" ")
        rank = int(number) if number.isdecimal() and len(number) < 10 else -1
        if rank >= 0 and hmac.compare_digest(given, proof(key, "rank", rank, challenge, nonce)):
            return rank, proof(key, "sentinel", rank, challenge, nonce).encode() + b"\n"
    return None


def introduce(link: socket.socket, key: str, rank: int) -> bool:
    """A rank's part, on a socket with a time limit: False when who answers does not know the key."""
    challenge = _read_line(link).decode("ascii", "replace")
    nonce = new_nonce()
    link.sendall(answer(key, rank, challenge, nonce))
    expected = proof(key, "sentinel", rank, challenge, nonce).encode()
    return hmac.compare_digest(_read_line(link), expected)


def _read_line(link: socket.socket) -> bytes:
    """Byte by byte: what follows the line belongs to who reads next. Raises OSError when it does not end in time."""
    line = bytearray()
    while len(line) < MAX_ANSWER_BYTES:
        byte = link.recv(1)
        if not byte:
            raise ConnectionError("closed in the middle of a line")
        if byte == b"\n":
            return bytes(line)
        line += byte
    raise ConnectionError(f"a line of more than {MAX_ANSWER_BYTES} bytes")


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """{} for what is no message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def messages(link: socket.socket) -> Iterator[Message]:
    """Messages until the other end closes. Raises OSError when it is gone without having closed."""
    with link.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            yield decode(line)


def title(rank: int, host: str, about: str) -> str:
    """`rank 2 (host b, stage 1, layers 8-15)`."""
    details = ", ".join(part for part in (host and f"host {host}", about) if part)
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def write_line(text: str) -> None:
    """One line in one system call: it cannot be torn, nor wait in a buffer for a process that is being killed."""
    with contextlib.suppress(OSError):
        os.write(2, f"pipeinfer: {' '.join(text.split())}\n".encode())
