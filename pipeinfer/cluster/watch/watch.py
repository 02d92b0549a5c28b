"""A rank's end of the watch: detect that a rank died, report it in one line, and end the job. Knows no MPI.

Launchers kill the rest of a job when a rank dies, but do not say which host and layers are lost, and may kill the
process that would say so. So rank 0 starts a *sentinel*, a small process of its own, before MPI, which may wait for a
rank that never comes. Every rank holds a TCP connection to the sentinel (rank 0 a socket pair), on which the kernel
reports a death at once; keepalive reports a vanished host. Each rank sends heartbeats, which reveal a process that
hangs. A heartbeat has the numbers of messages received and passed on, which reveal a cut link between two ranks
(`protocol`).

    rank 1..n ── TCP ──> sentinel <── socket pair ── rank 0
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from pipeinfer.cluster.hosts.launch import is_launched, show_cursor
from pipeinfer.cluster.watch import protocol
from pipeinfer.cluster.watch.processes import Process, first_to_close, ranks_beside
from pipeinfer.cluster.watch.protocol import JOIN_VARIABLE, Flow, Limits, Message, join_limit_s, send, write_line
from pipeinfer.cluster.watch.rendezvous import Location, Rendezvous, connect, open_listener
from pipeinfer.cluster.watch.sentinel import ABORT_GRACE_S, EXIT_CODE
from pipeinfer.errors import UserError

NOTICE_S = 10.0  # time after which rank 1 says that it waits; rank 0 is faster, if it is there
HEAD_FIRST_S = 3.0  # how much longer the others wait than rank 0, which can name the missing ranks
START = "import sys; sys.path.append(sys.argv[1]); from pipeinfer.cluster.watch.sentinel import main; main(sys.argv[2])"


@dataclass(eq=False)
class Watch:
    """One rank's connection to the sentinel: `open` before MPI starts, `join` once it has started. As a context manager
    it leaves in order at the end of the block, also on `SystemExit` and `KeyboardInterrupt`; any other exception is
    reported as this rank's fault. `end_all(code)` ends all ranks; it is called from a thread and may return. `limits`
    must be the same on every rank. `resume_file`, `inquiry`: see `Sentinel`."""

    rank: int
    size: int
    end_all: Callable[[int], object]
    limits: Limits = field(default_factory=Limits)
    resume_file: Path | None = None
    inquiry: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._on_stop: Callable[[str], object] = lambda reason: None
        self._link: Connection | None = None
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._about = ""
        self.flow = Flow()  # this rank's part in a pipeline, which is sent with every heartbeat
        self._head_title = protocol.title(0, "", "")
        self._sending = threading.RLock()  # a signal's thread may send too
        self._joined = threading.Event()
        self._closed = threading.Event()

    def open(self, on_stop: Callable[[str], object]) -> "Watch":
        """Watch the launcher's process from now on, and on rank 0 start the sentinel. `on_stop` is called on rank 0,
        from a thread, when a rank asks for an orderly stop."""
        self._on_stop = on_stop
        if is_launched():
            self._start(self._await_launcher, Process(os.getppid()))
        if self.rank == 0:
            ours, theirs = Pipe()
            self._link = first_to_close(ours)
            self._sentinel = self._start_sentinel(theirs)
            self._start(self._listen, self._link)
        else:
            self._start(self._await_joining)
        return self

    @property
    def joined(self) -> bool:
        """Whether this rank has joined, so that the others can be told what happens here."""
        return self._joined.is_set()

    def join(self, locations: Sequence[Location], broadcast: Callable[[Rendezvous | None], Rendezvous]) -> None:
        """Connect to the sentinel. Collective, to be called before anything slow, such as loading. `locations`: of
        every rank; `broadcast` returns rank 0's argument on all ranks."""
        if self.rank == 0:
            broadcast(self._invite(locations))
        else:
            link = connect(broadcast(None), self.rank, self.limits)
            if link:
                self._link = first_to_close(link)
                self._start(self._listen, self._link)
        self._start(self._beat)
        self._joined.set()

    def describe(self, about: str, of_all: Sequence[str] = ()) -> None:
        """Set what this rank does, for the line about its death: `stage 1, layers 8-15`. `of_all`: what each rank does,
        from rank 0, which may know it before a rank that dies has said so."""
        self._about = about
        self._send({"about": about, "abouts": list(of_all)})

    def ask_stop(self, reason: str) -> None:
        """Ask rank 0 to stop the job in order: its `on_stop` is called. Later deaths are not reported."""
        self._send({"stop": reason})

    def fault(self, message: str) -> None:
        """Report why this rank cannot go on, once, and end the job. Does not return."""
        if not self._send({"fault": message}):
            write_line(f"{protocol.title(self.rank, socket.gethostname(), self._about)}: {message}")
            self._end()
        time.sleep(2 * ABORT_GRACE_S)
        self._end()

    def close(self) -> None:
        """Leave: from now on this rank may end. Rank 0 calls it last, after the others were told to leave."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._joined.set()
        self._send({"bye": True})
        if self._sentinel is not None:
            try:
                self._sentinel.wait(timeout=ABORT_GRACE_S)
            except subprocess.TimeoutExpired:
                # the launcher waits for it: one that was stopped (SIGSTOP) would keep the job for ever
                self._sentinel.send_signal(signal.SIGCONT)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.fault(str(error) if issubclass(kind, UserError) else f"{kind.__name__}: {error}")
        self.close()

    def _invite(self, locations: Sequence[Location]) -> Rendezvous:
        """Open the listening socket and hand it, with the key, to the sentinel."""
        assert self._link and self._sentinel
        rendezvous, listener = open_listener(locations)
        with listener, self._sending:
            hosts = [location.host for location in locations]
            send(self._link, {"key": rendezvous.key, "size": len(hosts), "hosts": hosts})
            send_handle(self._link, listener.fileno(), self._sentinel.pid)
        return rendezvous

    def _start_sentinel(self, theirs: Connection) -> subprocess.Popen[bytes]:
        here = os.getpid(), socket.gethostname()
        texts = str(self.resume_file or ""), self.inquiry
        arguments = json.dumps([theirs.fileno(), astuple(self.limits), *here, self.size, join_limit_s(), *texts])
        command = [sys.executable, "-I", "-S", "-c", START, str(Path(__file__).parents[3]), arguments]
        fds, none = (theirs.fileno(),), subprocess.DEVNULL
        with theirs:
            return subprocess.Popen(command, stdin=none, stdout=none, pass_fds=fds, start_new_session=True)

    def _start(self, act: Callable[..., object], *arguments: Any) -> None:
        threading.Thread(target=act, args=arguments, name="watch", daemon=True).start()

    def _send(self, message: Message) -> bool:
        with self._sending:
            return self._link is not None and send(self._link, message)

    def _beat(self) -> None:
        """Send heartbeats. They stop only with the process: no thread holds the interpreter's lock for long."""
        while not self._closed.wait(self.limits.beat_s) and self._send({"flow": astuple(self.flow)}):
            pass

    def _await_joining(self) -> None:
        """MPI may wait forever for a rank that has ended. Rank 0's sentinel reports that first, if it has started."""
        limit_s, here = join_limit_s() + HEAD_FIRST_S, protocol.title(self.rank, socket.gethostname(), "")
        first_s = NOTICE_S if self.rank == 1 and limit_s > NOTICE_S else 0.0
        if first_s and not self._joined.wait(first_s) and 0 not in ranks_beside(os.getpid()):
            write_line(f"{here} has waited {first_s:g} s for rank 0, {limit_s:g} s at most ({JOIN_VARIABLE})")
        if not self._joined.wait(limit_s - first_s):
            write_line(
                f"{here} has waited {limit_s:g} s for the other ranks to join, and rank 0 says nothing; ending the job"
            )
            self._end()

    def _await_launcher(self, launcher: Process) -> None:
        """Without the launcher's process on this host nothing would end this rank, or report its end."""
        if launcher.wait() and not self._closed.is_set():
            self.fault(f"the launcher's process on this host died{launcher.how_it_ended()}; ending the job")

    def _listen(self, link: Connection) -> None:
        try:
            while "bye" not in (message := protocol.receive(link)):
                if "stop" in message:
                    self._on_stop(message["stop"])
                elif "head" in message:
                    self._head_title = message["head"]
                elif "end" in message:
                    self._leave()
            return
        except EOFError:
            lost = "ended"
        except OSError as error:
            lost = f"cannot be reached any more ({error.strerror or error})"
        if not self._closed.is_set():
            self._lost_sentinel(lost)

    def _lost_sentinel(self, how: str) -> None:
        """Rank 0 reports what became of its sentinel; the others do so only if rank 0 does not."""
        if self.rank == 0:
            write_line(f"the watch, the process that notices dead ranks,{self._sentinel_end()}; ending the job")
            self._end()
        time.sleep(2 * ABORT_GRACE_S)
        if self.rank == 1:
            write_line(f"the watch on the host of {self._head_title} {how}, and rank 0 says nothing; ending the job")
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
        show_cursor()
        with contextlib.suppress(OSError):  # hides the line of MPI_Abort; ours has been printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            self.end_all(EXIT_CODE)
        finally:
            os._exit(EXIT_CODE)
