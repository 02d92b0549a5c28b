"""How ranks find the sentinel: the socket that rank 0 opens, who is admitted there, how a rank connects. Knows sockets
and hosts, no MPI. Standard library alone."""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from pipeinfer.cluster.watch.protocol import Limits, authenticate_rank, authenticate_sentinel, send

CONNECT_TIMEOUT_S = 20.0
HELLO_TIMEOUT_S = 5.0
PENDING_S = 5.0  # time that a connection has to authenticate
MAX_PENDING = 32  # pending connections beyond the number of ranks; the oldest is closed for a newer one


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the sentinel listens; rank 0 broadcasts it."""

    place: str
    addresses: tuple[str, ...]
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank is. `where` differs between hosts, also of one name, and between networks of one host."""

    host: str
    where: str


def own_location() -> Location:
    where = socket.gethostname()
    with contextlib.suppress(OSError):
        where += Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    return Location(socket.gethostname(), where)


def open_listener(locations: Sequence[Location]) -> tuple[Rendezvous, socket.socket]:
    """What to broadcast, and the listening socket: on the loopback interface alone if all ranks are on this host."""
    alone = len({location.where for location in locations}) == 1
    listener = _listen(len(locations), alone)
    addresses = ("127.0.0.1",) if alone else (*_own_addresses(), locations[0].host)
    return Rendezvous(locations[0].where, addresses, listener.getsockname()[1], secrets.token_hex(32)), listener


def connect(rendezvous: Rendezvous, rank: int, limits: Limits) -> Connection | None:
    """An authenticated connection to the sentinel; None if it cannot be reached."""
    here = own_location().where == rendezvous.place
    addresses = tuple(dict.fromkeys(("127.0.0.1",) * here + rendezvous.addresses))
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    refused: set[str] = set()  # for good: the sentinel has listened since before the broadcast
    while time.monotonic() < deadline and not refused.issuperset(addresses):
        for address in addresses:
            try:
                link = _connect(address, rendezvous, rank, limits)
            except ConnectionRefusedError:
                refused.add(address)
            except Exception:  # lost, too slow, or not the sentinel
                pass
            else:
                if here:
                    send(link, {"pid": os.getpid()})
                return link
        time.sleep(0.2)
    return None


class Listener:
    """Accepts connections from creation until `close`, and authenticates each in a thread: no stranger delays it."""

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


def _connect(address: str, rendezvous: Rendezvous, rank: int, limits: Limits) -> Connection:
    with socket.create_connection((address, rendezvous.port), timeout=HELLO_TIMEOUT_S) as link:
        keep_alive(link, limits)
        link.settimeout(None)  # Connection needs a blocking socket; the kernel ends a read that takes too long
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(HELLO_TIMEOUT_S), 0))
        connection = Connection(link.dup().detach())
        authenticate_sentinel(connection, rendezvous.key, rank)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection


def _listen(size: int, alone: bool) -> socket.socket:
    if alone:
        return socket.create_server(("127.0.0.1", 0), backlog=size + 16)
    with contextlib.suppress(OSError, ValueError):  # there is no IPv6
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size + 16)
    return socket.create_server(("", 0), backlog=size + 16)


def _own_addresses() -> list[str]:
    """The IPv4 address of every interface that has one, without loopback."""
    siocgifaddr = 0x8915  # Linux
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in addresses if not address.startswith("127.")]
