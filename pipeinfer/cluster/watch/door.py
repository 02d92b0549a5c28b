"""The sentinel's door: strangers knock, ranks prove who they are and are let in. Standard library alone.

What somebody says before the proof is never looked into; who says nothing, or too much, is turned away.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass

from pipeinfer.cluster.watch.handshake import MAX_ANSWER_BYTES, new_nonce, read_answer
from pipeinfer.cluster.watch.limits import Limits

PENDING_S = 5.0
MAX_PENDING = 32
"""Connections above those of the ranks that may be open while nobody has proved anything; the oldest gives way."""


@dataclass(slots=True)
class Stranger:
    """A connection whose other end has not proved to be a rank."""

    link: socket.socket
    challenge: str
    since_s: float
    said: bytes = b""


class Door:
    """Open from `open` to `close`. Its sockets are in the sentinel's selector, with a Stranger, or None, as data."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, limits: Limits) -> None:
        self._listener, self._selector, self._limits = listener, selector, limits
        self._key, self._size = "", 0
        self._strangers: dict[socket.socket, Stranger] = {}
        listener.setblocking(False)

    def open(self, key: str, size: int) -> None:
        self._key, self._size = key, size
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def close(self) -> None:
        """All ranks are here: nobody else can connect from now on."""
        with contextlib.suppress(KeyError, ValueError):  # not open, or closed before
            self._selector.unregister(self._listener)
        self._listener.close()
        for stranger in list(self._strangers.values()):
            self._dismiss(stranger)

    def hear(self, stranger: Stranger | None, known: Collection[int]) -> tuple[int, socket.socket, bytes] | None:
        """Go on where there is something to read; (rank, link, what it said after the proof) of one that has come in.

        `known`: ranks that are here already.
        """
        if stranger is None:
            self._accept()
            return None
        try:
            data = stranger.link.recv(MAX_ANSWER_BYTES)
        except OSError:
            data = b""
        stranger.said += data
        line, end, rest = stranger.said.partition(b"\n")
        if end and len(line) < MAX_ANSWER_BYTES:
            return self._welcome(stranger, line, rest, known)
        if not data or len(stranger.said) >= MAX_ANSWER_BYTES:
            self._dismiss(stranger)
        return None

    def dismiss_silent(self) -> None:
        now_s = time.monotonic()
        for stranger in [each for each in self._strangers.values() if now_s - each.since_s > PENDING_S]:
            self._dismiss(stranger)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            stranger = Stranger(link, new_nonce(), time.monotonic())
            self._strangers[link] = stranger
            self._selector.register(link, selectors.EVENT_READ, stranger)
            keep_alive(link, self._limits)
            link.send(stranger.challenge.encode() + b"\n")
        if len(self._strangers) > self._size + MAX_PENDING:
            self._dismiss(next(iter(self._strangers.values())))

    def _welcome(
        self, stranger: Stranger, line: bytes, rest: bytes, known: Collection[int]
    ) -> tuple[int, socket.socket, bytes] | None:
        read = read_answer(line, self._key, stranger.challenge)
        if read is None or read[0] in known or not 0 < read[0] < self._size:
            self._dismiss(stranger)
            return None
        del self._strangers[stranger.link]
        self._selector.unregister(stranger.link)
        with contextlib.suppress(OSError):
            stranger.link.send(read[1])
        return read[0], stranger.link, rest

    def _dismiss(self, stranger: Stranger) -> None:
        if self._strangers.pop(stranger.link, None):
            self._selector.unregister(stranger.link)
            stranger.link.close()


def keep_alive(link: socket.socket, limits: Limits) -> None:
    """Let the kernel end the connection when the other end's host has vanished."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in limits.keepalive.items():
        if hasattr(socket, name):  # macOS lacks some
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
