"""The process beside rank 0 that holds a connection to every rank, and reports ranks that died or never came.

It runs in a session of its own, which the launcher does not kill, and imports only the standard library and files of
this package that do the same. Knows no MPI.
"""

import contextlib
import errno
import os
import selectors
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from pipeinfer.cluster.watch.deaths import Process, first_to_die, is_death, ranks_beside
from pipeinfer.cluster.watch.flow import Flow, Flows
from pipeinfer.cluster.watch.heartbeats import HeartbeatMonitor
from pipeinfer.cluster.watch.limits import BEATS, Limits
from pipeinfer.cluster.watch.listener import Listener
from pipeinfer.cluster.watch.protocol import Message, receive, send, title, write_line
from pipeinfer.cluster.watch.segments import remove_dead, segments_of, sweep
from pipeinfer.cluster.watch.step import end_step

EXIT_CODE = 1
ABORT_GRACE_S = 1.0
"""Time for rank 0 to end the job by MPI, before the sentinel kills it, which makes the launcher end the job."""

LAUNCHER_GRACE_S = 0.3
"""Time for the launcher to end the job after a death: it does so without the many lines of MPI_Abort."""

UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""How a connection to an unreachable host fails."""

LOOK_EVERY_S = 0.05
FIND_S = 1.0
"""Time to look for ranks on this host: a launcher starts them together."""
REMAINS_S = 2.0


class Sentinel:
    """Listens until every rank has joined or time is up; after that it talks to the ranks only."""

    def __init__(
        self, head: Connection, head_pid: int, host: str, size: int, join_s: float, limits: Limits, goes_on_from: str
    ) -> None:
        self._goes_on_from = goes_on_from
        self._head_pid = head_pid
        self._size = size
        self._join_s = join_s
        self._until_s = time.monotonic() + join_s
        self._limits = limits
        self._heartbeats, self._flows = HeartbeatMonitor(limits.silent_s), Flows(BEATS)
        self._key = ""
        self._listener: Listener | None = None
        self._links: dict[int, Connection] = {0: head}
        self._hosts = {0: host}
        self._abouts: dict[int, str] = {}
        self._processes = {0: Process(head_pid)}
        self._beside: dict[int, Process] = {}  # ranks on this host, until every rank has come
        self._find_until_s = time.monotonic() + FIND_S
        self._segments: set[Path] = set()
        self._stopping = False
        # epoll reports events in their order: the first death comes first, even if the launcher kills others meanwhile
        self._selector = selectors.DefaultSelector()
        self._selector.register(head, selectors.EVENT_READ, 0)

    def run(self) -> None:
        self._look()
        while True:
            for key, _ in self._selector.select(self._heartbeats.look_s if self._complete else LOOK_EVERY_S):
                if isinstance(key.data, Process):
                    self._ended(key.data)
                elif isinstance(key.data, Listener):
                    key.data.accept()
                else:
                    self._receive(key.data)
            if self._complete:
                self._listen()
            else:
                self._look()

    @property
    def _complete(self) -> bool:
        """Every rank has joined. Rank 0 sends the key once MPI has started."""
        return bool(self._key) and len(self._links) == self._size

    def _look(self) -> None:
        """While ranks are missing: find those on this host and rank 0's shared memory, admit ranks, check the time."""
        if len(self._beside) < self._size > 1 and time.monotonic() < self._find_until_s:
            self._find_ranks()
        self._segments |= segments_of(self._head_pid)
        if self._listener:
            self._admit(self._listener)
        if time.monotonic() > self._until_s:
            here = "" if self._key else f", nor does it run on host {self._hosts[0]}"
            late = f"{self._who_is_missing()} did not join within {self._join_s:g} s"
            self._end(f"{late}{here}; ending the job", died=False)

    def _listen(self) -> None:
        """Once all have joined: check for a rank without heartbeats."""
        silent = self._heartbeats.look(time.monotonic())
        if silent is not None:
            said = f"has said nothing for {self._limits.silent_s:g} s (--rank-timeout)"
            why = "its process or its host stands still, or the way to it is cut"
            self._end(f"{self._title(silent)} {said}: {why}; ending the job", died=False)

    def _admit(self, listener: Listener) -> None:
        """Take over the connections that have authenticated."""
        listener.reject_late()
        while not listener.admitted.empty():
            rank, link = listener.admitted.get()
            if rank in self._links or not 0 < rank < self._size:
                link.close()
                continue
            self._links[rank] = link
            self._selector.register(link, selectors.EVENT_READ, rank)
            send(link, {"head": self._title(0)})
        if self._complete:
            self._all_have_come()

    def _all_have_come(self) -> None:
        for process in self._beside.values():
            with contextlib.suppress(KeyError):  # it has ended
                self._selector.unregister(process)
        self._beside.clear()
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._heartbeats.begin(self._links, time.monotonic())

    # -- messages

    def _receive(self, rank: int) -> None:
        message: Message = {}
        try:
            message = receive(self._links[rank])
        except EOFError:
            self._lost(rank)
        except OSError as error:
            if error.errno in UNREACHABLE:
                self._end(f"{self._title(rank)} cannot be reached any more, its host or the way to it is down; "
                          "ending the job", died=True)  # fmt: skip
            self._lost(rank)
        self._heartbeats.hear(rank, time.monotonic())
        self._handle(rank, message)

    def _handle(self, rank: int, message: Message) -> None:
        if "fault" in message:
            self._end(f"{self._title(rank)}: {message['fault']}", died=False)
        elif "stop" in message:
            self._stopping = True
            send(self._links[0], message)
        elif "about" in message:
            self._abouts[rank] = message["about"]
            if rank == 0:
                self._tell_all({"head": self._title(0)})
        elif "flow" in message:
            if cut := self._flows.hear(rank, Flow(*message["flow"])):
                self._end_of_way(*cut)
        elif "pid" in message:
            self._processes[rank] = Process(message["pid"])
        elif "key" in message:  # from rank 0: MPI has started, the others may join
            self._key, self._size = message["key"], message["size"]
            self._hosts = dict(enumerate(message["hosts"]))
            self._segments |= segments_of(self._head_pid)
            listener = socket.socket(fileno=recv_handle(self._links[0]))
            if self._complete:
                listener.close()
                self._all_have_come()
            else:
                self._listener = Listener(listener, self._key, self._size, self._limits)
                self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        elif "bye" in message:
            if rank == 0:
                self._tell_all(message)
                os._exit(0)
            send(self._links[rank], message)
            self._heartbeats.forget(rank)
            self._selector.unregister(self._links[rank])

    # -- ends

    def _find_ranks(self) -> None:
        for rank, pid in ranks_beside(self._head_pid).items():
            process = Process(pid)
            if rank not in self._beside and process.fileno() >= 0:
                self._beside[rank] = process
                self._hosts[rank] = self._hosts[0]
                self._selector.register(process, selectors.EVENT_READ, process)

    def _ended(self, process: Process) -> None:
        """A rank on this host ended before all have joined. One that exits has said why itself."""
        self._selector.unregister(process)
        rank = next(rank for rank, other in self._beside.items() if other is process)
        how = process.how_it_ended()
        if not how:  # unknown on older kernels: the next one may not be the first to end
            del self._beside[rank]
        if rank in self._links or is_death(how):
            self._died(*first_to_die(self._beside, rank, how))

    def _lost(self, rank: int) -> None:
        if rank in self._beside:  # wait for the process: processes are reported in the order of their ends
            self._selector.unregister(self._links[rank])
        else:
            self._died(rank, self._processes[rank].how_it_ended() if rank in self._processes else "")

    def _died(self, rank: int, how: str) -> None:
        if self._stopping:
            self._end("", died=True)
        self._end(f"{self._who_died(rank)} died{how}; ending the job", died=True)

    def _end_of_way(self, source: int, dest: int) -> None:
        self._end(
            f"nothing comes from {self._title(source)} to {self._title(dest)} any more: a message has not come for "
            f"{self._limits.silent_s:g} s (--rank-timeout) though both are there; the way between their hosts is cut; "
            "ending the job", died=False,
        )  # fmt: skip

    def _end(self, line: str, died: bool) -> None:
        if line:
            way_out = f"; the same command goes on from {self._goes_on_from}" if self._goes_on_from else ""
            write_line(f"{line}{way_out}")
        self._tell_all({"end": True})
        if died:
            self._await_head(LAUNCHER_GRACE_S)
        send(self._links[0], {"end": True})
        self._await_head(ABORT_GRACE_S)
        if os.getppid() == self._head_pid:
            os.kill(self._head_pid, signal.SIGKILL)
        self._clear_up()
        if len(self._links) < self._size:
            end_step()  # missing ranks could not be told
        os._exit(EXIT_CODE)

    def _await_head(self, timeout_s: float) -> None:
        """Wait until rank 0 has ended, but no longer: the launcher waits for this process, which holds its pipe."""
        with contextlib.suppress(OSError, EOFError):
            while self._links[0].poll(timeout_s):
                self._links[0].recv_bytes()

    def _clear_up(self) -> None:
        """Remove the shared memory that killed ranks leave on this host. Nobody waits for it."""
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        deadline = time.monotonic() + REMAINS_S
        while not remove_dead(self._segments) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        time.sleep(LAUNCHER_GRACE_S)
        sweep()  # segments of other ranks, and those that rank 0 marked before it was looked at

    def _tell_all(self, message: Message) -> None:
        for rank in self._links:
            if rank > 0:
                send(self._links[rank], message)

    # -- texts

    def _who_died(self, rank: int) -> str:
        """If a rank dies before it has joined, only the launcher's kill of another one may be seen."""
        if self._size in (len(self._links), len(self._beside)):
            return self._title(rank)
        return f"{self._title(rank)}, or {self._who_is_missing()}, which had not joined yet,"

    def _who_is_missing(self) -> str:
        """Ranks that have not joined; before MPI has started, when none can, those that are not on this host."""
        here = set(self._links) if self._key else {0, *ranks_beside(self._head_pid)}
        missing = [rank for rank in range(self._size) if rank not in here]
        named = ", ".join(self._title(rank) if rank in self._hosts else f"rank {rank}" for rank in missing)
        return named or "a rank"

    def _title(self, rank: int) -> str:
        return title(rank, self._hosts.get(rank, ""), self._abouts.get(rank, ""))


def main(
    head_fd: str, head_pid: str, host: str, size: str, join_s: str, link_s: str, silent_s: str, goes_on_from: str
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    limits = Limits(float(link_s), float(silent_s))
    head = Connection(int(head_fd))
    Sentinel(head, int(head_pid), host, int(size), float(join_s), limits, goes_on_from).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
