"""Notice that a rank died, say which one in one line, and end the job. Knows no MPI and no model.

Launchers kill the rest of a job when a rank dies, but say neither which machine nor which layers are gone, and they
would kill a thread of ours before it could. So rank 0 starts a *sentinel*: this file as a small process of its own,
in its own session, out of reach of the launcher's kill. Every rank holds a TCP connection to it (rank 0 a socket pair)
on which the kernel reports a death at once; keepalive reports a vanished host. Nobody polls.

    rank 1..n ── TCP ──> sentinel <── socket pair ── rank 0

Messages are JSON objects, one a line. Only the standard library may be imported here: the sentinel runs isolated.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

EXIT_CODE = 1
KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 6000}
"""A vanished host is noticed after 2 + 4 × 1 s; data it never acknowledged after 6 s."""

HELLO_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 20.0
ABORT_GRACE_S = 1.0
"""How long rank 0 has to end the job by MPI before the sentinel kills it, which makes the launcher end the job."""

LAUNCHER_GRACE_S = 0.3
"""How long the launcher has to end the job when a process died: it does so without the many lines of MPI_Abort."""

MAX_LINE_BYTES = 64 * 1024
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the sentinel listens; rank 0 broadcasts it."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str


class Watch:
    """One rank's link to the sentinel.

    As a context manager it says goodbye at the end of the block, and reports an exception that leaves the block as this
    rank's fault; `SystemExit` and `KeyboardInterrupt` are goodbyes.
    """

    def __init__(
        self, rank: int, link: socket.socket | None, abort: Callable[[int], object], on_stop: Callable[[str], object]
    ) -> None:
        self.rank = rank
        self._link = link
        self._abort = abort
        self._on_stop = on_stop
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._about = ""
        self._about_head = _title(0, "", "")
        self._closing = False
        self._sending = threading.RLock()  # a signal handler may interrupt a sender
        if link is not None:
            threading.Thread(target=self._listen, args=(link,), name="watch", daemon=True).start()

    @property
    def connected(self) -> bool:
        """False when the sentinel could not be reached: then only the launcher notices this rank's death."""
        return self._link is not None

    def describe(self, about: str) -> None:
        """What this rank does, for the line about its death: `stage 1, layers 8-15`."""
        self._about = about
        self._send({"about": about})

    def ask_stop(self, reason: str) -> None:
        """Ask rank 0 to stop the job in an orderly way: its `on_stop` is called. Deaths that follow are not reported.

        May be called in a signal handler, on rank 0 too.
        """
        self._send({"stop": reason})

    def fault(self, message: str) -> None:
        """Report why this rank cannot go on, once, and end the job. Does not return."""
        if not self._send({"fault": message}):
            _write_line(f"{_title(self.rank, socket.gethostname(), self._about)}: {message}")
            self._end()
        time.sleep(2 * ABORT_GRACE_S)
        self._end()

    def close(self) -> None:
        """Say goodbye: from now on this rank may end. Rank 0 calls it last, after the others were told to leave."""
        if self._closing:
            return
        self._closing = True
        self._send({"bye": True})
        if self._sentinel is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sentinel.wait(timeout=ABORT_GRACE_S)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.fault(f"{kind.__name__}: {error}")
        self.close()

    def _send(self, message: Message) -> bool:
        if self._link is None:
            return False
        try:
            with self._sending:
                self._link.sendall(_encode(message))
        except OSError:
            return False
        return True

    def _listen(self, link: socket.socket) -> None:
        for message in _messages(link):
            if "stop" in message:
                self._on_stop(message["stop"])
            elif "head" in message:
                self._about_head = message["head"]
            elif "bye" in message:
                return
            elif "end" in message:
                self._leave()
        if self._closing:
            return
        if self.rank == 0:
            _write_line("the process that watches the ranks was killed; ending the job")
        elif self.rank == 1:
            _write_line(f"{self._about_head} died; ending the job")
        self._end()

    def _leave(self) -> None:
        """The job ends: rank 0 does it through MPI; the others wait for that, but not for long."""
        if self.rank > 0:
            time.sleep(2 * ABORT_GRACE_S)
            os._exit(EXIT_CODE)
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # MPI_Abort prints a line of its own; ours has been printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            self._abort(EXIT_CODE)
        finally:
            os._exit(EXIT_CODE)


def start_watch(
    rank: int,
    size: int,
    broadcast: Callable[[Meeting | None], Meeting],
    abort: Callable[[int], object],
    on_stop: Callable[[str], object],
) -> Watch:
    """Start the watch on every rank together, before anything slow: loading is watched too.

    `broadcast` hands rank 0's argument to all ranks; `abort` is MPI's and is called from a thread; `on_stop(reason)` is
    called on rank 0, from a thread, when a rank asks for an orderly stop.
    """
    if rank > 0:
        return Watch(rank, _connect(broadcast(None), rank), abort, on_stop)
    with _listener(size) as listener:
        host = socket.gethostname()
        meeting = Meeting(host, (*_own_addresses(), host), listener.getsockname()[1], secrets.token_hex(16))
        link, sentinel = _start_sentinel(listener, meeting.token, size)
    broadcast(meeting)
    watch = Watch(0, link, abort, on_stop)
    watch._sentinel = sentinel
    return watch


def _start_sentinel(listener: socket.socket, token: str, size: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = (listener.fileno(), theirs.fileno())
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), *map(str, fds), str(os.getpid()), str(size)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
        )
    # The token travels on the socket pair: command lines are public.
    ours.sendall(_encode({"token": token, "host": socket.gethostname()}))
    return ours, process


def _connect(meeting: Meeting, rank: int) -> socket.socket | None:
    host = socket.gethostname()
    addresses = (("127.0.0.1",) if host == meeting.host else ()) + meeting.addresses
    hello = _encode({"token": meeting.token, "rank": rank, "host": host})
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    refused: set[str] = set()  # for good: the sentinel has listened since before the meeting was broadcast
    while time.monotonic() < deadline and not refused.issuperset(addresses):
        for address in addresses:
            try:
                link = socket.create_connection((address, meeting.port), timeout=HELLO_TIMEOUT_S)
                _keep_alive(link)
                link.sendall(hello)
                if link.recv(1) == b"\n":  # the sentinel's welcome: an empty line
                    link.settimeout(None)
                    return link
                link.close()
            except ConnectionRefusedError:
                refused.add(address)
            except OSError:
                pass
        time.sleep(0.2)
    return None


# The sentinel ---------------------------------------------------------------------------------------------------------


class Sentinel:
    """The process that holds a connection to every rank and speaks for those that died."""

    def __init__(self, listener: socket.socket, head: socket.socket, head_pid: int, size: int) -> None:
        self._listener = listener
        self._head_pid = head_pid
        self._size = size
        self._token = ""
        self._links: dict[int, socket.socket] = {0: head}
        self._hosts = {0: ""}
        self._abouts: dict[int, str] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._stopping = False
        # epoll reports in the order of the events: the first to die comes first, even if the launcher killed the others
        # before we woke.
        self._selector = selectors.DefaultSelector()
        self._selector.register(head, selectors.EVENT_READ, 0)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    self._welcome(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._receive(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            _keep_alive(link)
            self._selector.register(link, selectors.EVENT_READ, None)

    def _welcome(self, link: socket.socket) -> None:
        """Let a rank in that knows the token; drop everybody else at the first thing they send."""
        self._selector.unregister(link)
        try:
            link.settimeout(HELLO_TIMEOUT_S)
            hello = json.loads(link.recv(4096))
            rank = hello["rank"]
            if not hmac.compare_digest(hello["token"], self._token) or rank in self._links or not 0 < rank < self._size:
                raise ValueError("not one of us")
            self._hosts[rank] = hello["host"]
            link.sendall(b"\n" + _encode({"head": self._title(0)}))
        except (OSError, ValueError, KeyError, TypeError):
            link.close()
            return
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, rank)

    def _receive(self, rank: int) -> None:
        link = self._links[rank]
        try:
            data = link.recv(MAX_LINE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._end("" if self._stopping else f"{self._who_died(rank)} died; ending the job", died=True)
        *lines, self._partial[link] = (self._partial.get(link, b"") + data).split(b"\n")
        for line in lines:
            self._handle(rank, json.loads(line))

    def _handle(self, rank: int, message: Message) -> None:
        if "fault" in message:
            self._end(f"{self._title(rank)}: {message['fault']}", died=False)
        elif "stop" in message:
            self._stopping = True
            self._tell(0, message)
        elif "about" in message:
            self._abouts[rank] = message["about"]
            if rank == 0:
                self._tell_all({"head": self._title(0)})
        elif "token" in message:  # rank 0's first message; now the others may come
            self._token, self._hosts[0] = message["token"], message["host"]
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif "bye" in message:
            if rank == 0:
                self._tell_all(message)
                os._exit(0)
            self._tell(rank, message)
            self._selector.unregister(self._links[rank])

    def _end(self, line: str, died: bool) -> None:
        if line:
            _write_line(line)
        self._tell_all({"end": True})
        if died:
            self._await_head(LAUNCHER_GRACE_S)
        self._tell(0, {"end": True})
        self._await_head(ABORT_GRACE_S)
        if os.getppid() == self._head_pid:
            os.kill(self._head_pid, signal.SIGKILL)
        os._exit(EXIT_CODE)

    def _await_head(self, timeout_s: float) -> None:
        """Until rank 0 has ended. The launcher waits for us, the last to hold its pipe, so go as soon as possible."""
        head = self._links[0]
        head.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            while head.recv(MAX_LINE_BYTES):
                pass

    def _tell(self, rank: int, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._links[rank].send(_encode(message), socket.MSG_DONTWAIT)

    def _tell_all(self, message: Message) -> None:
        for rank in self._links:
            if rank > 0:
                self._tell(rank, message)

    def _who_died(self, rank: int) -> str:
        """A rank may die before it has joined; then the launcher's kill of another one is all we see."""
        absent = ", ".join(str(other) for other in range(self._size) if other not in self._links)
        return f"{self._title(rank)}, or a rank that had not joined yet ({absent})," if absent else self._title(rank)

    def _title(self, rank: int) -> str:
        return _title(rank, self._hosts[rank], self._abouts.get(rank, ""))


# What both ends need --------------------------------------------------------------------------------------------------


def _title(rank: int, host: str, about: str) -> str:
    details = ", ".join(part for part in (host and f"host {host}", about) if part)
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def _write_line(text: str) -> None:
    """One line in one system call: it cannot be torn, nor wait in a buffer for a process that is being killed."""
    with contextlib.suppress(OSError):
        os.write(2, f"pipeinfer: {' '.join(text.split())}\n".encode())


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _messages(link: socket.socket) -> Iterator[Message]:
    """Messages until the other end closes or is gone."""
    with contextlib.suppress(OSError), link.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and line != b"\n":
                yield json.loads(line)


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # macOS lacks some
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listener(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size + 16)
    return socket.create_server(("", 0), backlog=size + 16)


def _own_addresses() -> list[str]:
    """The IPv4 address of every interface that has one, loopback last left out."""
    siocgifaddr = 0x8915  # Linux
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in addresses if not address.startswith("127.")]


def _sentinel_main(listener_fd: int, head_fd: int, head_pid: int, size: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Sentinel(socket.socket(fileno=listener_fd), socket.socket(fileno=head_fd), head_pid, size).run()


if __name__ == "__main__":
    _sentinel_main(*map(int, sys.argv[1:]))
