"""The process that speaks HTTP outlives the jobs behind it: it gets the links to their heads one after the other."""

import contextlib
import json
import pickle
import socket
from multiprocessing.connection import Connection

from pipeinfer.errors import UserError
from pipeinfer.job.process.supervised import OTHER_MODEL_TEXT, unseal
from pipeinfer.job.serve.front import Setup
from pipeinfer.server.front import HttpProcess
from pipeinfer.server.process import CONTROL_BYTES

ANSWERS_S = 2.0
"""How long it may stand still before it is killed; then another one begins, and clients have to come again."""

LAST_WORDS_S = 5.0


class Http:
    """Made when the supervisor starts; the port is opened, and the process begun, when rank 0 says how."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._http: HttpProcess | None = None
        self._control: socket.socket | None = None
        self._setup: Setup | None = None

    def take(self, link: Connection) -> None:
        """Rank 0's, of a new attempt. Raises OSError, EOFError and ValueError where it is lost."""
        options, version = pickle.loads(unseal(link.recv_bytes(), self._key))
        try:
            if self._setup and self._setup.version != version:
                raise UserError(OTHER_MODEL_TEXT)
            self._http = self._http or HttpProcess(options)
        except UserError as error:
            link.send_bytes(json.dumps({"error": str(error)}).encode())
            return
        link.send_bytes(json.dumps({"address": self._http.address, "tunnel": self._http.tunnel}).encode())
        self._setup = pickle.loads(unseal(link.recv_bytes(), self._key))
        if not self._http.is_alive:
            self._begin()
        assert self._control
        socket.send_fds(self._control, [b"head"], [link.fileno()])
        link.close()  # or rank 0 would not see when the process ends

    @property
    def numerics(self) -> str:
        """The name of those of the first job; empty before it."""
        return self._setup.version.partition("-")[2] if self._setup else ""

    def _begin(self) -> None:
        assert self._http and self._setup
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._http.start(self._setup, theirs, by_links=True)

    def lost(self, why: str) -> None:
        """The job behind it. Returns when it knows; where it is lost too, another one begins."""
        if not (self._http and self._control):
            return
        with contextlib.suppress(OSError):
            self._control.setblocking(False)
            while self._control.recv(CONTROL_BYTES):
                pass  # an answer from before
        with contextlib.suppress(OSError):
            self._control.settimeout(ANSWERS_S)
            self._control.send(why.encode()[:CONTROL_BYTES])
            if self._control.recv(CONTROL_BYTES):
                return
        self._control.close()
        self._http.end(0.0)
        self._begin()
        self._control.send(why.encode()[:CONTROL_BYTES])

    def close(self) -> None:
        """No job comes any more: clients are told so."""
        if self._control:
            self._control.close()
        if self._http:
            self._http.close()
            self._http.end(LAST_WORDS_S)
