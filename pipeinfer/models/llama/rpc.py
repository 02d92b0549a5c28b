"""llama.cpp's RPC servers as devices of this process. Knows no rank. A server serves one client at a time, so a
connection that was made stays until this process ends."""

import ctypes
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeinfer.child import python_command
from pipeinfer.errors import UserError
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.amx_probe import POINTER, function

TIMEOUT_S = 5.0
BUSY = (
    "--rpc {server} does not answer in {limit:g} s: it serves one client at a time; give each rank and each job a "
    "server of its own"
)
HELLO = struct.pack("<BQ24x", 14, 24)
"""The first command of a client: its number, and the bytes that follow, which offer no other transport than TCP."""

N_ANSWER = 28
ANSWER = struct.pack("<Q", N_ANSWER)
"""What a server says then, in front of so many bytes, which begin with its protocol's version."""

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 120_000}
"""Options of libllama's connections, which fail 2 minutes after the other host is lost. Not sooner: data may also wait
while a server computes."""

LOOK_S = 0.5
START_S, LEAST_S, SLOWER = 600.0, 60.0, 10.0
"""The longest that a server may work at what it was told, in seconds: before runs are timed, when it may have kernels
to compile; after that, unless LEAST_S is longer, SLOWER times the run of most rows in an empty cache. A server that
computes neither reads nor says anything, so that nothing tells it from one that stands still."""

STILL = (
    "its RPC server {server} has not answered for {limit:.0f} s (--rank-timeout, or {slower:g} times the longest run): "
    "it stands still; end it, start it again, and then the job"
)

LOST = (
    "its RPC server {servers} is gone or does not fit ({line}); see what it printed, start it again, of the same "
    "llama.cpp, and then the job"
)

_servers: list[str] = []
_connections: list[socket.socket] = []


@dataclass(slots=True)
class _Work:
    """How long servers may work, in seconds. `longest_run_s`: 0 before runs are timed."""

    least_s: float = LEAST_S
    longest_run_s: float = 0.0

    @property
    def limit_s(self) -> float:
        return max(self.least_s, SLOWER * self.longest_run_s if self.longest_run_s else START_S)


_work = _Work()


def rpc_backend() -> int | None:
    """libllama's RPC backend; None in a build without it."""
    return function(ggml.ggml(), "ggml_backend_reg_by_name", ctypes.c_char_p)(b"RPC")


def connect(
    servers: Sequence[str],
    least_s: float = LEAST_S,
    refused_s: float = 0.0,
    on_wait: Callable[[str], object] = lambda server: None,
) -> None:
    """Make the devices of each server, HOST:PORT, devices of libllama: RPC0, RPC1 and so on. Those that are stay so.
    `least_s`: see `expect`; `refused_s`: how long one that does not listen is waited for, in seconds; `on_wait` is
    told its name then. Raises UserError if this build knows no RPC, or a server does not answer."""
    _work.least_s = least_s
    new = [server for server in dict.fromkeys(servers) if server not in _servers]
    if new and not rpc_backend():
        needs = "a llama-cpp-python that was compiled with CMAKE_ARGS=-DGGML_RPC=on"
        raise UserError(f"--rpc {new[0]} needs {needs}; `make llama.cpp` compiles it again")
    for server in new:
        _check(server, refused_s, on_wait)
        if not _servers:
            ggml.explain_aborts(_explain)
        _servers.append(server)
        register(server)


def register(server: str) -> None:
    """As `connect` of one that is known to answer; else libllama aborts. Raises UserError if another was faster."""
    before, backends = _open_sockets(), list[int]()
    opening = threading.Thread(target=lambda: backends.append(_open(server)), daemon=True)
    opening.start()
    opening.join(TIMEOUT_S)
    for number in _open_sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.getpeername()[1] == _address(server)[1]:
                _connections.append(connection.dup())
                _end_by_reset(connection, True)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in KEEPALIVE.items():
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if not backends:
        raise UserError(BUSY.format(server=server, limit=TIMEOUT_S))
    threading.Thread(target=_watch, args=(server, backends[0]), daemon=True).start()


def _open(server: str) -> int:
    """The backend of its first device, which is never freed: it holds the connection."""
    base = ggml.ggml()
    find = function(base, "ggml_backend_reg_get_proc_address", POINTER, ctypes.c_char_p)
    add = ctypes.CFUNCTYPE(POINTER, ctypes.c_char_p)(find(rpc_backend(), b"ggml_backend_rpc_add_server"))
    devices = add(server.encode())
    function(base, "ggml_backend_register", POINTER)(devices)
    first = function(base, "ggml_backend_reg_dev_get", POINTER, ctypes.c_size_t)(devices, 0)
    return int(function(base, "ggml_backend_dev_init", POINTER, POINTER)(first, None))


def expect(longest_run_s: float) -> None:
    """From now on servers work for SLOWER times the longest run of this process's models at most, or for `least_s`.
    `longest_run_s`: of one of them, in seconds."""
    _work.longest_run_s = max(_work.longest_run_s, longest_run_s)
    for connection in _connections:  # data wait meanwhile
        timeout_ms = max(KEEPALIVE["TCP_USER_TIMEOUT"], round(1000 * _work.limit_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _watch(server: str, backend: int) -> None:
    """Report a server that works for too long. Looks are counted, not seconds: this process may be suspended."""
    synchronize = function(ggml.ggml(), "ggml_backend_synchronize", POINTER)  # sends nothing
    while True:
        done, n_looks = threading.Event(), 0

        def wait(done: threading.Event = done) -> None:
            synchronize(backend)
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        while not done.wait(LOOK_S):
            n_looks += 1
            if n_looks * LOOK_S > _work.limit_s:
                ggml.report_fault(STILL.format(server=server, limit=_work.limit_s, slower=SLOWER))
        time.sleep(LOOK_S)


def _open_sockets() -> set[int]:
    """Their file numbers."""
    numbers = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself is closed
            if path.readlink().name.startswith("socket:"):
                numbers.add(int(path.name))
    return numbers


def _end_by_reset(connection: socket.socket, by_reset: bool) -> None:
    """How it ends, even by a signal. An answer to a client that has closed its connection ends a server by SIGPIPE, one
    to a client that has reset it does not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", by_reset, 0))


def _check(server: str, refused_s: float, on_wait: Callable[[str], object]) -> None:
    """Raises UserError if it does not answer in time, or is none of this libllama's, which would wait or abort."""
    try:
        connection = _reach(server, refused_s, on_wait)
    except OSError as error:
        why = f"cannot be reached: {error.strerror or error}; start llama.cpp's ggml-rpc-server there"
        raise UserError(f"--rpc {server} {why}") from None
    with connection:
        _end_by_reset(connection, True)  # a server that has another client reads all this once that one has gone
        try:
            connection.sendall(HELLO)
            answer = _receive(connection, len(ANSWER) + N_ANSWER)
        except TimeoutError:
            raise UserError(BUSY.format(server=server, limit=TIMEOUT_S)) from None
        except OSError:
            answer = b""
        if not answer:
            raise UserError(f"--rpc {server} closes the connection: it is none of llama.cpp's RPC servers")
        _end_by_reset(connection, False)
    is_whole = answer.startswith(ANSWER) and len(answer) == len(ANSWER) + N_ANSWER
    if not is_whole or not _accepts(answer):
        version = f"its protocol is {answer[8]}.{answer[9]}" if is_whole else "it answers otherwise"
        way_out = f"start the ggml-rpc-server of this version there ({ggml.describe_build()})"
        raise UserError(f"--rpc {server} is none of this llama.cpp's RPC servers: {version}; {way_out}")


def _reach(server: str, refused_s: float, on_wait: Callable[[str], object]) -> socket.socket:
    """Raises OSError."""
    start_s, waits = time.monotonic(), False
    while True:
        try:
            return socket.create_connection(_address(server), TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > start_s + refused_s:
                raise
        if not waits:
            on_wait(server)
        waits = True
        time.sleep(LOOK_S)


def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    """So many, or all that come before the end. Raises OSError; TimeoutError where they take longer than TIMEOUT_S."""
    end_s, received = time.monotonic() + TIMEOUT_S, b""
    while len(received) < n_bytes:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        if not (data := connection.recv(n_bytes - len(received))):
            break
        received += data
    return received


@cache
def _accepts(answer: bytes) -> bool:
    """Whether this libllama takes a server that answers so: tried in another process, where one here says the same."""
    command = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from pipeinfer.models.llama.rpc import register; register(sys.argv[1])"
    )
    nothing = subprocess.DEVNULL
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ggml.PROBE_TIMEOUT_S)
        words = python_command(command, f"127.0.0.1:{listener.getsockname()[1]}")
        with subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing) as child:
            try:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as commands:
                    connection.settimeout(ggml.PROBE_TIMEOUT_S)
                    commands.read(len(HELLO))
                    connection.sendall(answer)
                    return bool(commands.read(1))  # the next one
            except TimeoutError:  # the machine is too busy to tell
                return True
            except OSError:
                return False
            finally:
                child.kill()


def _address(server: str) -> tuple[str, int]:
    host, _, port = server.partition(":")
    return host, int(port)


def _explain(line: str) -> str:
    """Of an abort; empty if no server is its cause."""
    if "RPC" not in line:
        return ""
    gone = list[str]()
    for server in _servers:
        try:
            socket.create_connection(_address(server), TIMEOUT_S).close()
        except OSError:
            gone.append(server)
    return LOST.format(servers=" or ".join(gone or _servers), line=line)
