"""Messages between ranks and the sentinel: how each end proves that it belongs to the job, how long each may be silent.

Messages are JSON objects over `multiprocessing.connection`; nothing is unpickled. Each end proves by an HMAC over the
other's challenge that it holds the job's key, which is never sent. The two ends use different keys, so that a rank's
challenge cannot be answered by passing it on to another rank. Standard library alone.
"""

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

Message = dict[str, Any]
MAX_HELLO_BYTES = 256
JOIN_S = 60.0  # how long ranks wait for each other at the start, unless the environment variable JOIN_VARIABLE is set
JOIN_VARIABLE = "PIPEINFER_JOIN_TIMEOUT"
BEATS = 6  # heartbeats of a rank in `silent_s`
LEAST_S, MOST_S = 3, 86400  # range of --rank-timeout: a host that loads a large model is sometimes silent for a second


@dataclass(frozen=True, slots=True)
class Limits:
    """`link_s`: time without network packets after which a host is lost; `silent_s`: time without heartbeats after
    which a process is. A slow process is not lost, so the latter's default is longer."""

    link_s: float = 6.0
    silent_s: float = 60.0

    @classmethod
    def of(cls, timeout_s: float | None) -> "Limits":
        """Both limits set to `timeout_s`; None: the defaults."""
        return cls() if timeout_s is None else cls(timeout_s, timeout_s)

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats."""
        return self.silent_s / BEATS

    @property
    def keepalive(self) -> dict[str, int]:
        """Socket options of a connection that fails after `link_s` without packets: the first probe after a third of
        it, then one every sixth, in whole seconds; unacknowledged data fails it as soon."""
        idle_s = max(1, round(self.link_s / 3))
        every_s = max(1, round(self.link_s / 6))
        count = max(1, round((self.link_s - idle_s) / every_s))
        return {
            "TCP_KEEPIDLE": idle_s,
            "TCP_KEEPINTVL": every_s,
            "TCP_KEEPCNT": count,
            "TCP_USER_TIMEOUT": round(1000 * self.link_s),
        }


def join_limit_s() -> float:
    """The value of JOIN_VARIABLE, or JOIN_S."""
    with contextlib.suppress(ValueError):
        return max(1.0, float(os.environ.get(JOIN_VARIABLE, JOIN_S)))
    return JOIN_S


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
