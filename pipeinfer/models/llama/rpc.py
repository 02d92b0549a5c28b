"""llama.cpp's RPC servers as devices of this process. Knows no rank.

A server serves one client at a time, so a connection that was made stays until this process ends.
"""

import ctypes
import socket
import struct
from collections.abc import Sequence

from pipeinfer.errors import UserError
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.amx_probe import POINTER, function

TIMEOUT_S = 5.0
HELLO = struct.pack("<BQ24x", 14, 24)
"""The first command of a client: its number, and the bytes that follow, which offer no other transport than TCP."""

N_ANSWER = 8 + 28
LOST = (
    "its RPC server {servers} is gone or does not fit ({line}); see what it printed, start it again, of the same "
    "llama.cpp, and then the job"
)

_servers: list[str] = []


def knows_rpc() -> bool:
    """Whether this build can use RPC servers."""
    return bool(_registered())


def _registered() -> int | None:
    return function(ggml.ggml(), "ggml_backend_reg_by_name", ctypes.c_char_p)(b"RPC")


def connect(servers: Sequence[str]) -> None:
    """Make the devices of each server, HOST:PORT, devices of libllama: RPC0, RPC1 and so on. Those that are stay so.

    Raises UserError if this build knows no RPC, or a server does not answer.
    """
    new = [server for server in servers if server not in _servers]
    if new and not knows_rpc():
        needs = "a llama-cpp-python that was compiled with CMAKE_ARGS=-DGGML_RPC=on"
        raise UserError(f"--rpc {new[0]} needs {needs}; `make llama.cpp` compiles it again")
    for server in new:
        _check(server)
        if not _servers:
            ggml.explain_aborts(_explain)
        _servers.append(server)
        _register(server)


def _register(server: str) -> None:
    base = ggml.ggml()
    find = function(base, "ggml_backend_reg_get_proc_address", POINTER, ctypes.c_char_p)
    add = ctypes.CFUNCTYPE(POINTER, ctypes.c_char_p)(find(_registered(), b"ggml_backend_rpc_add_server"))
    devices = add(server.encode())
    function(base, "ggml_backend_register", POINTER)(devices)
    first = function(base, "ggml_backend_reg_dev_get", POINTER, ctypes.c_size_t)(devices, 0)
    function(base, "ggml_backend_dev_init", POINTER, POINTER)(first, None)  # is never freed: it holds the connection


def _check(server: str) -> None:
    """Raises UserError if it does not answer in time; libllama would wait for ever."""
    try:
        with _open(server) as connection:
            connection.sendall(HELLO)
            answered = bool(connection.recv(N_ANSWER, socket.MSG_WAITALL))
    except TimeoutError:
        why = f"does not answer in {TIMEOUT_S:g} s: it serves one client at a time; give each rank a server of its own"
    except OSError as error:
        why = f"cannot be reached: {error.strerror or error}; start llama.cpp's ggml-rpc-server there"
    else:
        if answered:
            return
        why = "closes the connection: it is none of llama.cpp's RPC servers"
    raise UserError(f"--rpc {server} {why}")


def _open(server: str) -> socket.socket:
    host, _, port = server.partition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def _explain(line: str) -> str:
    """Of an abort; empty if no server is its cause."""
    gone = list(filter(_is_gone, _servers)) or _servers
    return LOST.format(servers=" or ".join(gone), line=line) if "RPC" in line else ""


def _is_gone(server: str) -> bool:
    try:
        _open(server).close()
    except OSError:
        return True
    return False
