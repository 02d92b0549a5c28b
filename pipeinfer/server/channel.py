"""The messages of `job.front` over a socket pair: a JSON object a line. Knows no HTTP and no engine."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.serve.front import (
    Alive,
    Ask,
    Begun,
    Came,
    Closing,
    Draining,
    Drop,
    Ended,
    FromFront,
    FromHead,
    Listening,
    Picture,
    Read,
    Ready,
    Waits,
    Watch,
)

READ_BYTES = 1 << 20
FINISH_S = 1.0
STARTS_S = 30.0
"""How long the process that speaks HTTP may take to start; on a link to one that runs it stands still as long."""


def _ask(said: dict[str, Any]) -> Ask:
    spans = said["spans"]
    return Ask(**said | {
        **{name: tuple(said[name]) for name in ("prompt", "begun", "ends", "stops")},
        "sampling": SamplingParams(**said["sampling"]), "spans": spans and tuple(Span(*span) for span in spans),
    })  # fmt: skip


MAKE: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "Ask": _ask,
    **{kind.__name__: lambda said, kind=kind: kind(**said)  # type: ignore[misc]
       for kind in (Alive, Begun, Came, Closing, Draining, Drop, Ended, Listening, Picture, Read, Ready, Waits, Watch)},
}  # fmt: skip


def encode(message: FromFront | FromHead) -> bytes:
    said = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps([type(message).__name__, said], default=asdict).encode() + b"\n"


def decode(line: bytes) -> Any:
    name, said = json.loads(line)
    return MAKE[name](said)


class HeadEnd:
    """Rank 0's end. Never waits: what the socket does not take now is sent when something is looked for."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.closed = link, False
        self._heard_s = time.monotonic() + STARTS_S  # when something came last
        link.setblocking(False)
        self._partial, self._unsent = bytearray(), bytearray()
        self._lines: list[bytes] = []

    def has_news(self) -> bool:
        """Whether something has come; asked in every wait."""
        if self._unsent:
            self._flush()
        if not self.closed and (data := self._receive()):
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = bytes(self._partial) + lines[0]
                self._partial = bytearray()
                self._lines += lines
            self._partial += rest
        return bool(self._lines)

    def _receive(self) -> bytes:
        try:
            data = self.link.recv(READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.closed = not data
        self._heard_s = time.monotonic()
        return data

    @property
    def silent_s(self) -> float:
        """How long nothing has come; before the first time, since the other end should have started."""
        return max(0.0, time.monotonic() - self._heard_s)

    def take(self) -> list[FromFront]:
        lines, self._lines = (self._lines, []) if self.has_news() else ([], [])
        return [decode(line) for line in lines]

    def tell(self, message: FromHead) -> None:
        self._unsent += encode(message)
        self._flush()

    def finish(self) -> None:
        """Send what is left, and then no more: the other end comes to its own. Waits for it, but not for long."""
        self.link.settimeout(FINISH_S)
        with contextlib.suppress(OSError):
            self.link.sendall(self._unsent)
            self.link.shutdown(socket.SHUT_WR)

    def _flush(self) -> None:
        try:
            del self._unsent[: self.link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # nobody is there to read it
