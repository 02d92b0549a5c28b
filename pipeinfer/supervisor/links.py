"""Where rank 0 of each attempt finds the supervisor, and what it sends there."""

import contextlib
import os
import selectors
import socket
import threading
from multiprocessing.connection import Connection

from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.listener import Listener
from pipeinfer.cluster.watch.protocol import MAX_HELLO_BYTES
from pipeinfer.cluster.watch.rendezvous import Place, open_listener, own_place
from pipeinfer.job.process.supervised import ERRORS, FRONT, INTERRUPT, NOTES, OTHER_MODEL, OUTPUT, SAME_MODEL
from pipeinfer.job.requests.journal import Journal
from pipeinfer.supervisor.attempt import Output
from pipeinfer.supervisor.http import Http

READ_BYTES = 1 << 16
LOOK_S, ENDS_S = 0.1, 1.0


class Links:
    """Listens as long as the process lives."""

    def __init__(self, is_alone: bool, output: Output) -> None:
        """`is_alone`: all ranks run on this host."""
        here = own_place()
        self.rendezvous, listening = open_listener([here, *([] if is_alone else [Place("", "")])])
        self._listener = Listener(listening, self.rendezvous.key, 1, Limits())
        self.journal, self.http, self._output = Journal(), Http(self.rendezvous.key), output
        self.has_news = False
        """Whether the attempt has got on."""
        self._number = 0
        self._links: list[tuple[Connection, threading.Thread]] = []
        self._notes: Connection | None = None
        self._model = b""  # of the first attempt
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, number: int) -> None:
        """From now on rank 0 of this attempt is heard, and no other one."""
        with self._lock:
            self._number, self.has_news = number, False

    def end(self) -> None:
        """What rank 0 has sent is taken, and no more."""
        with self._lock:
            self._number, links, self._links, self._notes = 0, self._links, [], None
        for link, reading in links:
            reading.join(timeout=ENDS_S)
            if not link.closed:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as other_end:
                    other_end.shutdown(socket.SHUT_RDWR)  # where nobody gets to rank 0 it may still be there
                reading.join(timeout=ENDS_S)
                link.close()

    @property
    def numerics(self) -> str:
        """The name of those of the first attempt; empty before it has said so."""
        return self._model.decode().partition("-")[2] or self.http.numerics

    @property
    def is_heard(self) -> bool:
        """Whether rank 0 of the attempt has come."""
        return bool(self._links)

    def interrupt(self) -> bool:
        """Rank 0 shall do as if Ctrl-C were pressed there. False where it cannot be told."""
        with contextlib.suppress(OSError):
            if self._notes:
                self._notes.send_bytes(INTERRUPT)
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
            while (kind := link.recv_bytes(MAX_HELLO_BYTES)) not in (FRONT, NOTES, OUTPUT, ERRORS):
                pass  # its process id, as the watch wants it
            if kind == FRONT:
                self.http.take(link)
                self.has_news = True
            elif kind == OUTPUT:
                take = self._output.begin()
                while data := os.read(link.fileno(), READ_BYTES):
                    take(data)
            elif kind == ERRORS:
                while data := os.read(link.fileno(), READ_BYTES):
                    os.write(2, data)
            else:
                model = link.recv_bytes(MAX_HELLO_BYTES)
                self._model = self._model or model
                link.send_bytes(SAME_MODEL if model == self._model else OTHER_MODEL)
                for note in self.journal.notes():
                    link.send_bytes(note)
                link.send_bytes(b"")
                self._notes = link
                while True:
                    self.journal.take(link.recv_bytes())
                    self.has_news = True
