"""The sentinel's listener: accept connections, and admit those that prove to be ranks. Standard library alone.

Each pending connection is authenticated in a thread of its own, so no stranger delays the sentinel.
"""

import contextlib
import socket
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue

from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.protocol import authenticate_rank

PENDING_S = 5.0
"""Time that a connection has to authenticate."""

MAX_PENDING = 32
"""Pending connections beyond the number of ranks; the oldest is closed for a newer one."""


class Listener:
    """Listens from creation until `close`."""

    def __init__(self, listener: socket.socket, key: str, size: int, limits: Limits) -> None:
        self._listener, self._key, self._limits = listener, key, limits
        self._max_pending = size + MAX_PENDING
        self._pending: dict[socket.socket, float] = {}  # -> when it was accepted; whoever removes one decides its fate
        listener.setblocking(False)
        self.admitted = SimpleQueue[tuple[int, Connection]]()
        """Authenticated connections with the rank that each claims."""

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> None:
        """Accept a connection that is waiting."""
        with contextlib.suppress(OSError, RuntimeError):  # the other end has gone, or no thread can be started
            link, _ = self._listener.accept()
            link.setblocking(True)
            self._pending[link] = time.monotonic()
            keep_alive(link, self._limits)
            threading.Thread(target=self._authenticate, args=(link,), daemon=True).start()
        while len(self._pending) > self._max_pending:
            self._reject(list(self._pending)[0])  # noqa: RUF015 (another thread may change it meanwhile)

    def reject_late(self) -> None:
        """Close connections that have not authenticated in time."""
        now_s = time.monotonic()
        for link, since_s in list(self._pending.items()):
            if now_s - since_s > PENDING_S:
                self._reject(link)

    def close(self) -> None:
        self._listener.close()
        for link in list(self._pending):
            self._reject(link)

    def _authenticate(self, link: socket.socket) -> None:
        with link, contextlib.suppress(Exception):  # a stranger can cause many kinds
            connection = Connection(link.dup().detach())
            rank = authenticate_rank(connection, self._key)
            if self._pending.pop(link, None) is not None:
                self.admitted.put((rank, connection))
        self._pending.pop(link, None)

    def _reject(self, link: socket.socket) -> None:
        """Shut the connection down, which ends its thread."""
        if self._pending.pop(link, None) is not None:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


def keep_alive(link: socket.socket, limits: Limits) -> None:
    """Let the kernel end the connection when the other end's host has vanished."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in limits.keepalive.items():
        if hasattr(socket, name):  # macOS lacks some
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
