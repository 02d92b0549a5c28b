"""Messages between ranks and the sentinel, and how each end proves that it belongs to the job. Standard library alone.

Messages are JSON objects over `multiprocessing.connection`; nothing is unpickled. Each end proves by an HMAC over the
other's challenge that it holds the job's key, which is never sent. The two ends use different keys, so that a rank's
challenge cannot be answered by passing it on to another rank.
"""

import contextlib
import json
import os
import secrets
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

Message = dict[str, Any]
MAX_HELLO_BYTES = 256


def new_key() -> str:
    return secrets.token_hex(32)


def authenticate_rank(link: Connection, key: str) -> int:
    """The sentinel's part: the rank at the other end. Raises any of several exceptions if that is no rank."""
    deliver_challenge(link, f"rank {key}".encode())
    answer_challenge(link, f"sentinel {key}".encode())
    return int(link.recv_bytes(MAX_HELLO_BYTES))


def authenticate_sentinel(link: Connection, key: str, rank: int) -> None:
    """A rank's part. Raises any of several exceptions if the other end is not the sentinel."""
    answer_challenge(link, f"rank {key}".encode())
    deliver_challenge(link, f"sentinel {key}".encode())
    link.send_bytes(str(rank).encode())


def send(link: Connection, message: Message) -> bool:
    """Whether the message was sent; False if the connection is lost."""
    try:
        link.send_bytes(json.dumps(message).encode())
    except OSError:
        return False
    return True


def receive(link: Connection) -> Message:
    """The next message. Raises EOFError when the other end has closed, OSError when the connection is lost."""
    message: Message = json.loads(link.recv_bytes())
    return message


def title(rank: int, host: str, about: str) -> str:
    """`rank 2 (host b, stage 1, layers 8-15)`."""
    details = ", ".join(part for part in (host and f"host {host}", about) if part)
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def write_line(text: str) -> None:
    """Write one line in one system call, so that it is not torn or lost when the process is killed."""
    with contextlib.suppress(OSError):
        os.write(2, f"pipeinfer: {' '.join(text.split())}\n".encode())
