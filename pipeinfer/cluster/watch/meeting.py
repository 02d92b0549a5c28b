"""Where the ranks of a job meet: the door that rank 0 opens and its sentinel keeps, and a rank's way to it.

Knows sockets and hosts, no MPI.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.cluster.watch.door import keep_alive
from pipeinfer.cluster.watch.handshake import encode, introduce, new_key
from pipeinfer.cluster.watch.limits import Limits

CONNECT_TIMEOUT_S = 20.0
HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Meeting:
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


def open_door(places: Sequence[Place]) -> tuple[Meeting, socket.socket]:
    """What to tell the others, and the socket on which they come: on this host alone if all ranks are here."""
    alone = len({place.where for place in places}) == 1
    listener = _listener(len(places), alone)
    addresses = ("127.0.0.1",) if alone else (*_own_addresses(), places[0].host)
    return Meeting(places[0].where, addresses, listener.getsockname()[1], new_key()), listener


def go_to(meeting: Meeting, rank: int, limits: Limits) -> socket.socket | None:
    """A link on which each end has proved to the other that it is of this job; None when there is no way to it."""
    here = own_place().where == meeting.place
    addresses = tuple(dict.fromkeys(("127.0.0.1",) * here + meeting.addresses))
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    refused: set[str] = set()  # for good: the sentinel has listened since before the meeting was broadcast
    while time.monotonic() < deadline and not refused.issuperset(addresses):
        for address in addresses:
            try:
                link = socket.create_connection((address, meeting.port), timeout=HELLO_TIMEOUT_S)
                if introduce(link, meeting.key, rank):
                    keep_alive(link, limits)
                    link.settimeout(None)
                    if here:
                        link.sendall(encode({"pid": os.getpid()}))
                    return link
                link.close()
            except ConnectionRefusedError:
                refused.add(address)
            except OSError:
                pass
        time.sleep(0.2)
    return None


def _listener(size: int, alone: bool) -> socket.socket:
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
