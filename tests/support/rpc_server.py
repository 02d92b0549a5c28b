"""llama.cpp's RPC servers on this machine: devices without a GPU.

Run as `python -m tests.support.rpc_server PORT N_DEVICES BYTES [ADDRESS]`: lends the CPU as so many devices, with one
thread and, if they are not 0, so many bytes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.models.llama.amx_probe import CPU, POINTER, function
from pipeinfer.models.llama.ggml import ggml
from pipeinfer.models.llama.rpc import rpc_backend
from tests.support.jobs import environment, until

needs_rpc = pytest.mark.skipif(
    not rpc_backend(), reason="llama.cpp was compiled without -DGGML_RPC=on; `make llama.cpp` compiles it again"
)


class Server:
    """`endpoint`: as --rpc takes it."""

    def __init__(self, n_devices: int = 1, n_bytes: int = 0, port: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = port or free.getsockname()[1]
        self.endpoint = f"127.0.0.1:{port}"
        words = [sys.executable, "-m", "tests.support.rpc_server", str(port), str(n_devices), str(n_bytes)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment())
        until(self._listens)

    def _listens(self) -> bool:
        assert self.process.poll() is None, "the server ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(self.endpoint.rpartition(":")[2])), 1).close()
            return True
        return False

    def start_again(self) -> Server:
        """Another server in its place."""
        self.stop()
        return Server(port=int(self.endpoint.rpartition(":")[2]))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Counter:
    """Between a client and a server, counts the client's commands, by their numbers in llama.cpp. Each is followed by
    the number of further bytes, and these. The client waits for an answer to GET_TENSOR alone."""

    SET_TENSOR, GET_TENSOR, GRAPH_COMPUTE, GRAPH_RECOMPUTE = 6, 8, 10, 16

    def __init__(self, server: Server) -> None:
        self.counts: collections.Counter[int] = collections.Counter()
        self._server, self._listener = server, socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", int(self._server.endpoint.rpartition(":")[2])))
            for each in (self._answers, self._commands):
                threading.Thread(target=each, args=(client, server), daemon=True).start()

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while data := server.recv(1 << 20):
                client.sendall(data)

    def _commands(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as commands:
            while head := commands.read(9):
                command, n_bytes = struct.unpack("<BQ", head)
                self.counts[command] += 1  # before the client can have its answer
                server.sendall(head + commands.read(n_bytes))
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def servers(*n_devices: int, n_bytes: int = 0) -> Iterator[list[Server]]:
    """A server for each number of devices."""
    started = [Server(n, n_bytes) for n in n_devices]
    try:
        yield started
    finally:
        for each in started:
            each.stop()


def address_space(pid: int) -> int:
    """Bytes."""
    return int(re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10


def main(port: str, n_devices: int, n_bytes: int, address: str = "127.0.0.1") -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and ggml-rpc-server does not
    library = ggml()
    cpu = function(library, "ggml_backend_dev_by_type", ctypes.c_int)(CPU)
    if n_bytes:
        n_bytes += address_space(os.getpid())
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    start = function(
        library, "ggml_backend_rpc_start_server", ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_size_t] * 2, POINTER
    )
    start(f"{address}:{port}".encode(), None, 1, n_devices, (ctypes.c_void_p * n_devices)(*[cpu] * n_devices))
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
