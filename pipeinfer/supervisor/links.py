"""The links over which rank 0 of each attempt gets its input, sends its output and notes to the supervisor, and serves
clients."""

import contextlib
import json
import os
import pickle
import selectors
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from pipeinfer.cluster.watch.protocol import MAX_HELLO_BYTES, Limits
from pipeinfer.cluster.watch.rendezvous import Listener, Location, open_listener, own_location
from pipeinfer.errors import UserError
from pipeinfer.job.process.supervised import (
    ERRORS,
    EXIT,
    FRONT,
    INPUT,
    INTERRUPT,
    NOTES,
    OTHER_MODEL,
    OTHER_MODEL_TEXT,
    OUTPUT,
    SAME_MODEL,
    unseal,
)
from pipeinfer.job.requests.journal import Journal
from pipeinfer.server.front import HttpServer
from pipeinfer.supervisor.job import READ_BYTES, KeptInput, KeptOutput

LOOK_S, ENDS_S = 0.1, 1.0
CLIENTS_S = 5.0  # how long the HTTP process may take to tell its clients that no job follows


class Links:
    """All links of a supervisor. Listens from creation on, as long as the process lives."""

    def __init__(self, is_alone: bool, output: KeptOutput, mark: str) -> None:
        """`is_alone`: all ranks run on this host; `mark`: of lines for the supervisor, which is not shown."""
        self.input: KeptInput | None = None
        here = own_location()
        self.rendezvous, listening = open_listener([here, *([] if is_alone else [Location("", "")])])
        self._listener = Listener(listening, self.rendezvous.key, 1, Limits())
        self.has_progress = False  # whether the attempt has got anywhere
        self.exit_code: int | None = None  # its own, if rank 0 got to its end
        self._output, self._journal, self._mark = output, Journal(), mark.encode()
        self._server: HttpServer | None = None
        self._number = 0
        self._links: list[tuple[Connection, threading.Thread]] = []
        self._input_link: Connection | None = None
        self._notes: Connection | None = None
        self._model = ""  # of the first attempt
        self.fitted = ""  # what --fit chose for the newest attempt that got so far
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, number: int) -> None:
        """Accept links from rank 0 of this attempt, and no other one."""
        with self._lock:
            self._number, self.has_progress, self.exit_code = number, False, None
        self._output.drop()

    def end(self, must_end: Callable[[], bool] = lambda: False) -> None:
        """Read what rank 0 has sent, and close its links. Of an attempt that got to its end all output is written,
        however long its reader takes, unless `must_end`."""
        with self._lock:
            self._number, links, self._links, self._notes = 0, self._links, [], None
        for link, reading in links:
            deadline = time.monotonic() + ENDS_S
            while reading.is_alive() and time.monotonic() < deadline and not must_end():
                reading.join(timeout=LOOK_S)
                if self.exit_code is not None and self._output.is_writing:
                    deadline = time.monotonic() + ENDS_S
            if not link.closed:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as other_end:
                    other_end.shutdown(socket.SHUT_RDWR)  # rank 0 may still run on a host that is cut off
                reading.join(timeout=ENDS_S)
                link.close()

    def lose(self, why: str) -> None:
        """Clients of a service wait for the next attempt."""
        if self._server:
            self._server.detach(why)

    def close(self) -> None:
        """No attempt follows; clients of a service are told."""
        if self._server:
            self._server.close(CLIENTS_S)

    @property
    def numerics(self) -> str:
        """The name of the first attempt's numerics; empty if unknown."""
        return self._model.partition("-")[2]

    @property
    def is_connected(self) -> bool:
        """Whether rank 0 of the attempt has connected, for more than its input: it has not begun before."""
        return any(link is not self._input_link for link, _ in self._links)

    def interrupt(self) -> bool:
        """Tell rank 0 to act as on Ctrl-C. False if it cannot be told."""
        with contextlib.suppress(OSError):
            if notes := self._notes:  # which another thread may take away
                notes.send_bytes(INTERRUPT)
                return True
        return False

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                if selector.select(LOOK_S):
                    self._listener.accept()
                self._listener.reject_late()
                with contextlib.suppress(Exception):
                    while True:
                        self._admit(*self._listener.admitted.get(timeout=LOOK_S / 2))

    def _admit(self, number: int, link: Connection) -> None:
        with self._lock:
            if number != self._number:
                link.close()
                return
            reading = threading.Thread(target=self._read, args=(link,), daemon=True)
            self._links.append((link, reading))
            reading.start()

    def _read(self, link: Connection) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while (kind := link.recv_bytes(MAX_HELLO_BYTES)) not in (FRONT, NOTES, INPUT, OUTPUT, ERRORS, EXIT):
                pass  # its process id, which the watch wants
            if kind == INPUT:
                assert self.input, "attempts are told whether there is input"
                self._input_link = link
                self.input.feed(socket.socket(fileno=os.dup(link.fileno())))
            elif kind == FRONT:
                self._attach_server(link)
                self.has_progress = True
            elif kind == OUTPUT:
                _forward(link, self._output.begin())
            elif kind == ERRORS:
                _forward(link, lambda data: os.write(2, data.replace(self._mark, b"")))
            elif kind == EXIT:
                self.exit_code = int(link.recv_bytes(MAX_HELLO_BYTES))
                link.send_bytes(EXIT)
            else:
                self._exchange_notes(link)

    def _attach_server(self, link: Connection) -> None:
        """A service: open its port, or give the link to the process that answers there. Raises ValueError for a
        message of a stranger."""
        options, setup = pickle.loads(unseal(link.recv_bytes(), self.rendezvous.key))
        try:
            if not self._is_same(setup.version, setup.fitted):
                raise UserError(OTHER_MODEL_TEXT)
            self._server = self._server or HttpServer(options, is_followed=True, saves=setup.saves_texts)
        except UserError as error:
            link.send_bytes(json.dumps({"error": str(error)}).encode())
            return
        link.send_bytes(json.dumps({"address": self._server.address, "tunnel": self._server.tunnel}).encode())
        self._server.attach(setup, link.fileno())
        link.close()  # or rank 0 would not see the end of the process

    def _exchange_notes(self, link: Connection) -> None:
        """Send the notes of earlier attempts, then read new ones."""
        model, _, fitted = link.recv_bytes(READ_BYTES).decode().partition("\n")
        is_same = self._is_same(model, fitted)
        link.send_bytes(SAME_MODEL if is_same else OTHER_MODEL)
        for note in self._journal.notes():
            link.send_bytes(note)
        link.send_bytes(b"")
        self._notes = link
        while True:
            self._journal.take(link.recv_bytes())
            self.has_progress = True

    def _is_same(self, model: str, fitted: str) -> bool:
        """Whether an attempt has the model and numerics of the first one."""
        self._model, self.fitted = self._model or model, fitted
        return model == self._model


def _forward(link: Connection, write: Callable[[bytes], object]) -> None:
    while data := os.read(link.fileno(), READ_BYTES):
        write(data)
