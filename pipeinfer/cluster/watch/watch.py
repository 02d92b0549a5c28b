"""A rank's end of the watch: detect that a rank died, report it in one line, and end the job. Knows no MPI.

Launchers kill the rest of a job when a rank dies, but do not say which host and layers are lost, and may kill the
process that would say so. So rank 0 starts a *sentinel*, a small process of its own, before MPI, which may wait for a
rank that never comes. Every rank holds a TCP connection to the sentinel (rank 0 a socket pair), on which the kernel
reports a death at once; keepalive reports a vanished host. Each rank sends heartbeats, which reveal a process that
hangs. A heartbeat has the numbers of messages received and passed on, which reveal a cut link between two ranks
(`flow`).

    rank 1..n ── TCP ──> sentinel <── socket pair ── rank 0
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.watch.deaths import Process, first_to_close
from pipeinfer.cluster.watch.flow import Flow
from pipeinfer.cluster.watch.limits import Limits, join_limit_s
from pipeinfer.cluster.watch.protocol import Message, receive, send, title, write_line
from pipeinfer.cluster.watch.rendezvous import Place, Rendezvous, connect, open_listener
from pipeinfer.cluster.watch.sentinel import ABORT_GRACE_S, EXIT_CODE
from pipeinfer.errors import UserError

HEAD_FIRST_S = 3.0
"""How much longer the others wait than rank 0, which can name the missing ranks."""

START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from pipeinfer.cluster.watch.sentinel import main; main(*sys.argv[1:])"
)


class Watch:
    """One rank's connection to the sentinel: `open` before MPI starts, `join` once it has started.

    As a context manager it leaves in order at the end of the block, also on `SystemExit` and `KeyboardInterrupt`; any
    other exception is reported as this rank's fault.
    """

    def __init__(
        self, rank: int, size: int, end: Callable[[int], object], on_stop: Callable[[str], object],
        limits: Limits = Limits(), goes_on_from: Path | None = None,  # noqa: B008 (it is frozen)
    ) -> None:  # fmt: skip
        """`end(code)` ends all ranks; it is called from a thread and may return. `on_stop` is called on rank 0, from a
        thread, when a rank asks for an orderly stop. `limits` must be the same on every rank. `goes_on_from`: the file
        with which the same command goes on."""
        self.rank, self._size, self._limits, self._goes_on_from = rank, size, limits, goes_on_from
        self._end_all = end
        self._on_stop = on_stop
        self._link: Connection | None = None
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._about = ""
        self.flow = Flow()
        """This rank's part in a pipeline, which is sent with every heartbeat."""
        self._about_head = title(0, "", "")
        self._closing = False
        self._sending = threading.RLock()  # a signal's thread may send too
        self._joined = threading.Event()
        self._closed = threading.Event()

    def open(self) -> "Watch":
        """Watch the launcher's process from now on, and on rank 0 start the sentinel."""
        if is_launched():
            self._start(self._await_launcher, Process(os.getppid()))
        if self.rank == 0:
            ours, theirs = Pipe()
            self._link = first_to_close(ours)
            self._sentinel = _start_sentinel(theirs, self._size, self._limits, self._goes_on_from)
            self._start(self._listen, self._link)
        else:
            self._start(self._await_joining)
        return self

    @property
    def joined(self) -> bool:
        """Whether this rank has joined, so that the others can be told what happens here."""
        return self._joined.is_set()

    def join(self, places: Sequence[Place], broadcast: Callable[[Rendezvous | None], Rendezvous]) -> None:
        """Connect to the sentinel. Collective, to be called before anything slow, such as loading.

        `places`: of every rank; `broadcast` returns rank 0's argument on all ranks.
        """
        if self.rank == 0:
            broadcast(self._invite(places))
        else:
            link = connect(broadcast(None), self.rank, self._limits)
            if link:
                self._link = first_to_close(link)
                self._start(self._listen, self._link)
        self._start(self._beat)
        self._joined.set()

    def describe(self, about: str) -> None:
        """Set what this rank does, for the line about its death: `stage 1, layers 8-15`."""
        self._about = about
        self._send({"about": about})

    def ask_stop(self, reason: str) -> None:
        """Ask rank 0 to stop the job in order: its `on_stop` is called. Later deaths are not reported."""
        self._send({"stop": reason})

    def fault(self, message: str) -> None:
        """Report why this rank cannot go on, once, and end the job. Does not return."""
        if not self._send({"fault": message}):
            write_line(f"{title(self.rank, socket.gethostname(), self._about)}: {message}")
            self._end()
        time.sleep(2 * ABORT_GRACE_S)
        self._end()

    def close(self) -> None:
        """Leave: from now on this rank may end. Rank 0 calls it last, after the others were told to leave."""
        if self._closing:
            return
        self._closing = True
        self._joined.set()
        self._closed.set()
        self._send({"bye": True})
        if self._sentinel is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sentinel.wait(timeout=ABORT_GRACE_S)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.fault(str(error) if issubclass(kind, UserError) else f"{kind.__name__}: {error}")
        self.close()

    def _invite(self, places: Sequence[Place]) -> Rendezvous:
        """Open the listening socket and hand it, with the key, to the sentinel."""
        assert self._link and self._sentinel
        rendezvous, listener = open_listener(places)
        with listener, self._sending:
            send(self._link, {"key": rendezvous.key, "size": len(places), "hosts": [place.host for place in places]})
            send_handle(self._link, listener.fileno(), self._sentinel.pid)
        return rendezvous

    def _start(self, what: Callable[..., object], *arguments: Any) -> None:
        threading.Thread(target=what, args=arguments, name="watch", daemon=True).start()

    def _send(self, message: Message) -> bool:
        with self._sending:
            return self._link is not None and send(self._link, message)

    def _beat(self) -> None:
        """Send heartbeats. They stop only with the process: no thread holds the interpreter's lock for long."""
        while not self._closed.wait(self._limits.beat_s) and self._send({"flow": astuple(self.flow)}):
            pass

    def _await_joining(self) -> None:
        """MPI may wait forever for a rank that has ended. Rank 0's sentinel reports that first, if rank 0 has
        started."""
        limit_s = join_limit_s() + HEAD_FIRST_S
        if not self._joined.wait(limit_s):
            here = title(self.rank, socket.gethostname(), "")
            write_line(
                f"{here} has waited {limit_s:g} s for the other ranks to join, and rank 0 says nothing; ending the job"
            )
            self._end()

    def _await_launcher(self, launcher: Process) -> None:
        """Without the launcher's process on this host nothing would end this rank, or report its end."""
        if launcher.wait() and not self._closing:
            self.fault(f"the launcher's process on this host died{launcher.how_it_ended()}; ending the job")

    def _listen(self, link: Connection) -> None:
        try:
            while "bye" not in (message := receive(link)):
                if "stop" in message:
                    self._on_stop(message["stop"])
                elif "head" in message:
                    self._about_head = message["head"]
                elif "end" in message:
                    self._leave()
            return
        except EOFError:
            lost = "ended"
        except OSError as error:
            lost = f"cannot be reached any more ({error.strerror or error})"
        if not self._closing:
            self._lost_sentinel(lost)

    def _lost_sentinel(self, how: str) -> None:
        """Rank 0 reports what became of its sentinel; the others do so only if rank 0 does not."""
        if self.rank == 0:
            write_line(f"the watch, the process that notices dead ranks,{self._sentinel_end()}; ending the job")
            self._end()
        time.sleep(2 * ABORT_GRACE_S)
        if self.rank == 1:
            write_line(f"the watch on the host of {self._about_head} {how}, and rank 0 says nothing; ending the job")
        self._end()

    def _sentinel_end(self) -> str:
        assert self._sentinel
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._sentinel.wait(timeout=ABORT_GRACE_S)
            return f" was killed by {signal.Signals(-code).name}" if code < 0 else f" ended with exit code {code}"
        return " does not answer"

    def _leave(self) -> None:
        """The job ends: rank 0 ends it through MPI; the others wait for that, with a limit."""
        if self.rank > 0:
            time.sleep(2 * ABORT_GRACE_S)
            os._exit(EXIT_CODE)
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # hides the line of MPI_Abort; ours has been printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            self._end_all(EXIT_CODE)
        finally:
            os._exit(EXIT_CODE)


def _start_sentinel(
    theirs: Connection, size: int, limits: Limits, goes_on_from: Path | None
) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[3])
    about = [theirs.fileno(), os.getpid(), socket.gethostname(), size, join_limit_s(), limits.link_s, limits.silent_s,
             goes_on_from or ""]  # fmt: skip
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, root, *map(str, about)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
