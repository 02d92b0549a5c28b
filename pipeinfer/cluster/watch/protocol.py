"""Messages between ranks and the sentinel: how each end proves that it belongs to the job, how long each may be silent,
and what heartbeats show.

Messages are JSON objects over `multiprocessing.connection`; nothing is unpickled. Each end proves by an HMAC over the
other's challenge that it holds the job's key, which is never sent. The two ends use different keys, so that a rank's
challenge cannot be answered by passing it on to another rank. Standard library alone."""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

Message = dict[str, Any]
MAX_HELLO_BYTES = 256
JOIN_S = 60.0  # how long ranks wait for each other at the start, unless the environment variable JOIN_VARIABLE is set
JOIN_VARIABLE = "PIPEINFER_JOIN_TIMEOUT"
SUPERVISOR = "PIPEINFER_SUPERVISOR"  # the environment variable by which a job knows its supervisor, JSON
ENDING = "; ending the job"
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
    """The value of JOIN_VARIABLE, up to MOST_S, or JOIN_S."""
    with contextlib.suppress(ValueError):
        return min(MOST_S, max(1.0, float(os.environ.get(JOIN_VARIABLE, JOIN_S))))
    return JOIN_S


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
    """Write one line in one system call, so that it is not torn or lost when the process is killed. One that says why
    the job ends is marked for its supervisor."""
    mark = ""
    if ENDING in text:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # there is none
            mark = mark_of(json.loads(os.environ.get(SUPERVISOR, ""))["job"])
    with contextlib.suppress(OSError):
        os.write(2, f"pipeinfer: {' '.join(text.split())}{mark}\n".encode())


def mark_of(job: str) -> str:
    """What no text of a request can end with: the supervisor has drawn the job's name."""
    return f" [{job}]"


# -- heartbeats


class HeartbeatMonitor:
    """Finds a rank without heartbeats for `limit_s`. When no rank is heard, or `look` was not called in time, the whole
    job was suspended (Ctrl-Z, a closed laptop). Then no rank is at fault, and every rank's time starts again when one
    is heard."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s: dict[int, float] = {}
        self._looked_s = -1.0
        self._suspended = False

    @property
    def look_s(self) -> float:
        """Seconds between calls of `look`."""
        return self.limit_s / 12

    def begin(self, ranks: Iterable[int], now_s: float) -> None:
        """Monitor these ranks from now on."""
        self._heard_s = dict.fromkeys(ranks, now_s)
        self._looked_s = now_s

    def hear(self, rank: int, now_s: float) -> None:
        if rank in self._heard_s:
            self._heard_s[rank] = now_s

    def forget(self, rank: int) -> None:
        """Stop monitoring a rank that leaves in order."""
        self._heard_s.pop(rank, None)

    def look(self, now_s: float) -> int | None:
        """The rank that has been silent the longest, if for `limit_s` while another one was heard; else None."""
        was_away = now_s - self._looked_s > self.limit_s / 2
        self._looked_s = now_s
        if not self._heard_s:
            return None
        if now_s - max(self._heard_s.values()) > self.limit_s / 2:
            self._suspended = True
            return None
        if was_away or self._suspended:
            self.begin(self._heard_s, now_s)
            self._suspended = False
        first = min(self._heard_s, key=lambda rank: self._heard_s[rank])
        return first if now_s - self._heard_s[first] >= self.limit_s else None


@dataclass(slots=True)
class Flow:
    """A rank's part in a pipeline: how many messages it has received from `source` and passed on to `dest`, and whether
    it waits for the next one, so that MPI moves messages. The head reports none."""

    source: int = -1
    dest: int = -1
    n_taken: int = 0
    n_passed: int = 0
    waits: bool = False


class FlowMonitor:
    """Finds a cut link between two ranks, of which only MPI notices, and waits forever: ranks have watch connections to
    the sentinel, not to each other."""

    def __init__(self, n_beats: int) -> None:
        """`n_beats`: a message is lost if it has not arrived after so many heartbeats of the waiting rank. Heartbeats
        are counted, not seconds, because a job may be suspended."""
        self._n_beats = n_beats
        self._flows: dict[int, Flow] = {}
        self._n_waited: dict[int, int] = {}

    def hear(self, rank: int, flow: Flow) -> tuple[int, int] | None:
        """(rank, next rank) between which a message is lost, if the latter's report shows one."""
        before, self._flows[rank] = self._flows.get(rank), replace(flow)
        source = self._flows.get(flow.source)
        is_sent = source is not None and source.dest == rank and source.waits and source.n_passed > flow.n_taken
        lacks = is_sent and flow.waits and flow == before
        self._n_waited[rank] = self._n_waited.get(rank, 0) + 1 if lacks else 0
        return (flow.source, rank) if self._n_waited[rank] >= self._n_beats else None
