"""The process beside rank 0 that holds a connection to every rank, and reports ranks that died or never joined. It runs
in a session of its own, which the launcher does not kill, and imports only the standard library and files of this
package that do the same. Knows no MPI."""

import contextlib
import errno
import json
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from pipeinfer.cluster.hosts.launch import n_ranks_here
from pipeinfer.cluster.hosts.launcher import hosts_by_rank
from pipeinfer.cluster.watch import processes, protocol, shared_memory
from pipeinfer.cluster.watch.processes import Inquiry, Process, ranks_beside
from pipeinfer.cluster.watch.protocol import ENDING, Flow, Limits, Message, send, write_line
from pipeinfer.cluster.watch.rendezvous import Listener
from pipeinfer.launchers import is_stopped

EXIT_CODE = 1
ABORT_GRACE_S = 1.0
"""Time for rank 0 to end the job by MPI, before the sentinel kills it, which makes the launcher end the job."""

HEAD_GRACE_S = 5.0  # time for rank 0 to end the job after another rank has ended: it reports an error that both found
LAUNCHER_GRACE_S = 0.3
"""Time for the launcher to end the job after a death: it does so without the many lines of MPI_Abort."""

UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # how a connection to an unreachable host fails
LOOK_EVERY_S = 0.05
FIND_S = 1.0  # time to look for ranks on this host: a launcher starts them together

NOTICE_S, NOTICE_HERE_S = 3.0, 10.0
"""Time after which missing ranks are reported; if all of them are on this host, of which many start slowly."""

COUNT_S = 8.0  # a launcher has started its ranks on this host by then
MAX_SHOWN = 8  # missing ranks that are named
REMAINS_S = 2.0


@dataclass(eq=False)
class Sentinel:
    """Listens until every rank has joined or time is up; after that it talks to the ranks only.

    head         the connection to rank 0; `head_pid`, `host`: its process and host
    join_s       how long ranks may take to join
    resume_file  with which the same command goes on, or empty
    inquiry      the command of `Inquiry`"""

    head: Connection
    limits: Limits
    head_pid: int
    host: str
    size: int
    join_s: float
    resume_file: str
    inquiry: Sequence[str]

    def __post_init__(self) -> None:
        self._silence = f"{self.limits.silent_s:g} s (--rank-timeout)"
        self._start_s, self._steps = time.monotonic(), processes.slurm_steps(self.head_pid)
        self._notice_s, self._count_s = NOTICE_S, COUNT_S
        self._heartbeats = protocol.HeartbeatMonitor(self.limits.silent_s)
        self._flows = protocol.FlowMonitor(protocol.BEATS)
        self._key = ""
        self._listener: Listener | None = None
        self._links: dict[int, Connection] = {0: self.head}
        self._hosts = {0: self.host}
        self._abouts: dict[int, str] = {}
        self._processes = {0: Process(self.head_pid)}
        self._beside: dict[int, Process] = {}  # ranks on this host, until every rank has joined
        self._early_end, self._early_end_s = "", math.inf  # a line on a rank that ended before all joined, and when
        self._segments, self._lost_ranks, self._stopping = set[Path](), set[int](), False
        # epoll reports events in their order: the first death comes first, even if the launcher kills others meanwhile
        self._selector = selectors.DefaultSelector()
        self._inquiry = Inquiry(self.inquiry, self._selector)
        self._selector.register(self.head, selectors.EVENT_READ, 0)

    def run(self) -> None:
        self._look()
        while True:
            for key, _ in self._selector.select(self._heartbeats.look_s if self._complete else LOOK_EVERY_S):
                if isinstance(key.data, Process):
                    self._ended(key.data)
                elif isinstance(key.data, Listener):
                    key.data.accept()
                elif isinstance(key.data, Inquiry):
                    self._cannot_start(*key.data.hear())
                else:
                    self._receive(key.data)
            if self._complete:
                self._check_heartbeats()
            else:
                self._look()

    @property
    def _complete(self) -> bool:
        """Every rank has joined. Rank 0 sends the key once MPI has started."""
        return bool(self._key) and len(self._links) == self.size

    def _look(self) -> None:
        """While ranks are missing: find those on this host and rank 0's shared memory, admit ranks, check the time."""
        waited_s = time.monotonic() - self._start_s
        if len(self._beside) < self.size > 1 and waited_s < FIND_S:
            self._find_ranks()
        self._segments |= shared_memory.segments_of(self.head_pid)
        if self._listener:
            self._admit(self._listener)
        if time.monotonic() > self._early_end_s + HEAD_GRACE_S:
            self._end(self._early_end)
        if waited_s > self.join_s:
            about = "".join(f"; {line}" for line in (*self._standing_still(), *self._inquiry.lines))
            is_beside = self._key or len(self._beside) == self.size
            here = "" if is_beside else f", nor does it run on host {self._hosts[0]}"
            self._end(f"{self._missing()} did not join within {self.join_s:g} s{here}{about}")
        if waited_s > self._notice_s:
            self._report_missing(waited_s)
        if waited_s > self._count_s:
            self._count_s, n_here = math.inf, n_ranks_here()
            if not self._key and (n := processes.n_started(self.head_pid, n_here)) < n_here:
                self._end(f"{n} of {n_here} ranks run on host {self._hosts[0]}: the start of others has failed")

    def _standing_still(self) -> list[str]:
        """A line for each rank of this host whose process is stopped."""
        stopped = [rank for rank, each in self._beside.items() if is_stopped(each.pid)]
        return [f"{self._title(rank)} stands still: process {self._beside[rank].pid} is stopped" for rank in stopped]

    def _report_missing(self, waited_s: float) -> None:
        """Name the ranks that are missing after some seconds, and start the inquiry into their hosts."""
        missing = self._missing_ranks()
        if not missing and waited_s < NOTICE_HERE_S:
            self._notice_s = NOTICE_HERE_S
            return
        self._notice_s = math.inf
        launched = hosts_by_rank(*processes.launcher_of(self.head_pid), self.size)
        here = {0, *ranks_beside(self.head_pid)}
        if {rank for rank, host in enumerate(launched) if host == launched[0]} != here:
            launched = []  # this launcher places ranks in another way
        if not self._key:
            self._hosts = dict(enumerate(launched)) | self._hosts
        who = self._missing() if missing else f"MPI to start; all ranks run on host {self._hosts[0]}"
        write_line(f"waiting for {who}, {self.join_s:g} s at most ({protocol.JOIN_VARIABLE})")
        hosts = dict(enumerate(launched)) or self._hosts
        others = dict.fromkeys(hosts[rank] for rank in missing if hosts.get(rank, hosts[0]) != hosts[0])
        self._inquiry.start(self.size, hosts[0], list(others))

    def _cannot_start(self, host: str, why: str) -> None:
        if ranks := [rank for rank in self._missing_ranks() if host and self._hosts.get(rank) == host]:
            self._end(f"{self._listed(ranks)} cannot start: {why}", then="")

    def _find_ranks(self) -> None:
        for rank, pid in ranks_beside(self.head_pid).items():
            process = Process(pid)
            if rank not in self._beside and process.fileno() >= 0:
                self._beside[rank] = process
                self._hosts[rank] = self._hosts[0]
                self._selector.register(process, selectors.EVENT_READ, process)

    def _admit(self, listener: Listener) -> None:
        """Take over the connections that have authenticated."""
        listener.reject_late()
        while not listener.admitted.empty():
            rank, link = listener.admitted.get()
            if rank in self._links or not 0 < rank < self.size:
                link.close()
                continue
            self._links[rank] = link
            self._selector.register(link, selectors.EVENT_READ, rank)
            send(link, {"head": self._title(0)})
        if self._complete:
            self._selector.unregister(listener)
            listener.close()
            self._listener = None
            self._begin()

    def _begin(self) -> None:
        """All have joined: from now on the connections report deaths, and heartbeats are checked."""
        beside, self._beside = self._beside, {}
        for rank, process in beside.items():
            with contextlib.suppress(KeyError):  # it has ended
                self._selector.unregister(process)
            if rank in self._lost_ranks:  # their processes were waited for
                self._died(rank, process.how_it_ended())
        self._inquiry.end()
        self._heartbeats.begin(self._links, time.monotonic())

    def _check_heartbeats(self) -> None:
        silent = self._heartbeats.look(time.monotonic())
        if silent is not None:
            why = "its process or its host stands still, or the way to it is cut"
            self._end(f"{self._title(silent)} has said nothing for {self._silence}: {why}")

    # -- messages

    def _receive(self, rank: int) -> None:
        message: Message = {}
        try:
            message = protocol.receive(self._links[rank])
        except EOFError:
            self._lost(rank)
        except OSError as error:
            if error.errno in UNREACHABLE:
                why = "cannot be reached any more, its host or the way to it is down"
                self._end(f"{self._title(rank)} {why}", died=True)
            self._lost(rank)
        self._heartbeats.hear(rank, time.monotonic())
        self._handle(rank, message)

    def _handle(self, rank: int, message: Message) -> None:
        if "fault" in message:
            self._end(f"{self._title(rank)}: {message['fault']}", then="")
        elif "stop" in message:
            self._stopping = self._stopping or rank == 0  # it may have the service drain first
            send(self.head, message)
        elif "about" in message:
            self._abouts |= dict(enumerate(message["abouts"]))
            self._abouts[rank] = message["about"]
            if rank == 0:
                self._tell_all({"head": self._title(0)})
        elif "flow" in message:
            if cut := self._flows.hear(rank, Flow(*message["flow"])):
                source, dest = map(self._title, cut)
                lost = f"a message has not come for {self._silence} though both are there"
                why = "the way between their hosts is cut"
                self._end(f"nothing comes from {source} to {dest} any more: {lost}; {why}")
        elif "pid" in message:
            self._processes[rank] = Process(message["pid"])
        elif "key" in message:
            self._invite(message)
        elif "bye" in message:
            if rank == 0:
                self._tell_all(message)
                os._exit(0)
            send(self._links[rank], message)
            self._heartbeats.forget(rank)
            self._selector.unregister(self._links[rank])

    def _invite(self, message: Message) -> None:
        """Rank 0: MPI has started, the others may join at the socket that it sends."""
        self._key, self.size = message["key"], message["size"]
        self._hosts = dict(enumerate(message["hosts"]))
        self._segments |= shared_memory.segments_of(self.head_pid)
        listener = Listener(socket.socket(fileno=recv_handle(self.head)), self._key, self.size, self.limits)
        if self._complete:
            listener.close()
            self._begin()
        else:
            self._listener = listener
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def _tell_all(self, message: Message) -> None:
        for rank in self._links.keys() - {0}:
            send(self._links[rank], message)

    # -- ends

    def _ended(self, process: Process) -> None:
        """A rank on this host ended before all have joined. One that exits has said why itself."""
        self._selector.unregister(process)
        rank = next(rank for rank, other in self._beside.items() if other is process)
        how = process.how_it_ended()
        if not how:  # unknown on older kernels: the next one may not be the first to end
            del self._beside[rank]
        if rank in self._links or processes.is_death(how):
            self._died(*processes.first_to_die(self._beside, rank, how))
        self._note_end(f"{self._title(rank)} ended{how} before all have joined")

    def _note_end(self, line: str) -> None:
        if not self._early_end:
            self._early_end, self._early_end_s = line, time.monotonic()

    def _lost(self, rank: int) -> None:
        if rank in self._beside:  # wait for the process: processes are reported in the order of their ends
            self._selector.unregister(self._links[rank])
            self._lost_ranks.add(rank)
        else:
            self._died(rank, self._processes[rank].how_it_ended() if rank in self._processes else "")

    def _died(self, rank: int, how: str) -> None:
        who = self._title(rank)
        if self.size not in (len(self._links), len(self._beside)):
            # if a rank dies before it has joined, only the launcher's kill of another one may be seen
            who += f", or {self._missing()}, which had not joined yet,"
        self._end("" if self._stopping else f"{who} died{how}", died=True)

    def _end(self, line: str, died: bool = False, then: str = ENDING) -> None:
        """Print the line, if any, end the job, and this process."""
        self._inquiry.end()
        if line:
            resume = f"; the same command goes on from {self.resume_file}" if self.resume_file else ""
            write_line(f"{line}{then}{resume}")
        self._tell_all({"end": True})
        if died:
            self._await_head(LAUNCHER_GRACE_S)
        send(self.head, {"end": True})
        self._await_head(ABORT_GRACE_S)
        if os.getppid() == self.head_pid:
            os.kill(self.head_pid, signal.SIGKILL)
        self._clear_up()
        if len(self._links) < self.size:
            processes.end_slurm_steps(self._steps)  # missing ranks could not be told
        os._exit(EXIT_CODE)

    def _await_head(self, timeout_s: float) -> None:
        """Wait until rank 0 has ended, but no longer: the launcher waits for this process, which holds its pipe."""
        with contextlib.suppress(OSError, EOFError):
            while self.head.poll(timeout_s):
                self.head.recv_bytes()

    def _clear_up(self) -> None:
        """Remove the shared memory that killed ranks leave on this host. Nothing waits for it."""
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        deadline = time.monotonic() + REMAINS_S
        while not shared_memory.remove_dead(self._segments) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        time.sleep(LAUNCHER_GRACE_S)
        shared_memory.sweep()  # segments of other ranks, and those that rank 0 marked before it was looked at

    # -- texts

    def _missing_ranks(self) -> list[int]:
        """Ranks that have not joined; before MPI has started, when none can, those that are not on this host."""
        here = set(self._links) if self._key else {0, *ranks_beside(self.head_pid)}
        return [rank for rank in range(self.size) if rank not in here]

    def _missing(self) -> str:
        return self._listed(self._missing_ranks()) or "a rank"

    def _listed(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - MAX_SHOWN} more" if len(ranks) > MAX_SHOWN else ""
        return ", ".join(map(self._title, ranks[:MAX_SHOWN])) + more

    def _title(self, rank: int) -> str:
        return protocol.title(rank, self._hosts.get(rank, ""), self._abouts.get(rank, ""))


def main(arguments: str) -> None:
    """`arguments`: those of `Sentinel` as JSON, the file descriptor of the connection to rank 0 for the first one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    head_fd, limits, *others = json.loads(arguments)
    Sentinel(Connection(head_fd), Limits(*limits), *others).run()
