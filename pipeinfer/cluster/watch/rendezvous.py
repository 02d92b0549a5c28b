"""Where the ranks of a job find the sentinel: the socket that rank 0 opens for it, and how a rank connects.

Knows sockets and hosts, no MPI.
"""

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.listener import keep_alive
from pipeinfer.cluster.watch.protocol import authenticate_sentinel, new_key, send

CONNECT_TIMEOUT_S = 20.0
HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the sentinel listens; rank 0 broadcasts it."""

    place: str
    addresses: tuple[str, ...]
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is. `where` differs between hosts, also of one name, and between networks of one host."""

    host: str
    where: str


def own_place() -> Place:
    where = socket.gethostname()
    with contextlib.suppress(OSError):
        where += Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    return Place(socket.gethostname(), where)


def open_listener(places: Sequence[Place]) -> tuple[Rendezvous, socket.socket]:
    """What to broadcast, and the listening socket: on the loopback interface alone if all ranks are on this host."""
    alone = len({place.where for place in places}) == 1
    listener = _listen(len(places), alone)
    addresses = ("127.0.0.1",) if alone else (*_own_addresses(), places[0].host)
    return Rendezvous(places[0].where, addresses, listener.getsockname()[1], new_key()), listener


def connect(rendezvous: Rendezvous, rank: int, limits: Limits) -> Connection | None:
    """An authenticated connection to the sentinel; None if it cannot be reached."""
    here = own_place().where == rendezvous.place
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


def _connect(address: str, rendezvous: Rendezvous, rank: int, limits: Limits) -> Connection:
    with socket.create_connection((address, rendezvous.port), timeout=HELLO_TIMEOUT_S) as link:
        keep_alive(link, limits)
        link.settimeout(None)  # Connection needs a blocking socket; the kernel ends a read that takes too long
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(HELLO_TIMEOUT_S), 0))
        connection = Connection(link.dup().detach())
        try:
            authenticate_sentinel(connection, rendezvous.key, rank)
        except BaseException:
            connection.close()
            raise
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection


def _listen(size: int, alone: bool) -> socket.socket:
    if alone:
        return socket.create_server(("127.0.0.1", 0), backlog=size + 16)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
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
