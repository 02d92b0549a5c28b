"""The watch over real sockets and real deaths: first with plain processes, then under the installed mpirun."""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.launch import SHOW_CURSOR
from pipeinfer.cluster.watch.processes import MAX_HOSTS, Inquiry, Process, first_to_die
from pipeinfer.cluster.watch.protocol import (
    LEAST_S,
    MOST_S,
    Flow,
    FlowMonitor,
    HeartbeatMonitor,
    Limits,
    authenticate_sentinel,
)
from pipeinfer.cluster.watch.rendezvous import (
    CONNECT_TIMEOUT_S,
    Listener,
    Rendezvous,
    _own_addresses,
    connect,
    own_location,
)
from pipeinfer.cluster.watch.sentinel import NOTICE_S
from pipeinfer.cluster.watch.watch import Watch
from tests.support.jobs import until

LIMITS = Limits()
PROGRAM = """
import json, os, socket, sys, time
from dataclasses import astuple
from pathlib import Path
from pipeinfer.cluster.watch.rendezvous import Rendezvous, own_location
from pipeinfer.cluster.watch.protocol import Limits
from pipeinfer.cluster.watch.watch import Watch

rank, size, place, what = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
limits = Limits.of(float(sys.argv[5])) if len(sys.argv) > 5 else Limits()
rendezvous_file = place / "rendezvous"

def broadcast(rendezvous):  # through a file
    if rendezvous:
        (place / "part").write_text(json.dumps(astuple(rendezvous)))
        (place / "part").rename(rendezvous_file)
        return rendezvous
    until_exists(rendezvous_file)
    where, addresses, port, key = json.loads(rendezvous_file.read_text())
    return Rendezvous(where, tuple(addresses), port, key)

def on_stop(reason):
    os.write(2, f"asked to stop: {reason}\\n".encode())
    (place / ("draining" if what == "drain" else "stopping")).touch()

def until_exists(path):
    while not path.exists():
        time.sleep(0.01)

def wait_for(name):
    for other in range(size):
        until_exists(place / f"{name}{other}")

(place / f"started{rank}").touch()
wait_for("started")  # a rank that takes long to start would be said to be late
with Watch(rank, size, os._exit, limits).open(on_stop) as watch:
    if what == "absent" and rank == 2:
        os._exit(2)
    if what == "before MPI":
        time.sleep(60)
    if what == "lost" and rank == 2:
        until_exists(place / "lost")
        time.sleep(0.3)  # the sentinel has heard of it
    watch.join([own_location()] * size, broadcast)
    if what == "lost" and rank == 1:
        socket.socket(fileno=os.dup(watch._link.fileno())).shutdown(socket.SHUT_WR)
        (place / "lost").touch()
        time.sleep(60)
    assert watch._link, "the sentinel can be reached"
    abouts = [f"stage {each}, layers {8 * each}-{8 * each + 7}" for each in range(size)]
    if what != "described by rank 0":
        watch.describe(abouts[rank])
    elif rank == 0:
        watch.describe(abouts[0], abouts)
    while rank and "stage 0" not in watch._head_title:
        time.sleep(0.01)  # the sentinel tells who has joined, once rank 0 has said what it does
    (place / f"ready{rank}").touch()
    wait_for("ready")  # a rank that joins later would add lines of its own
    if what == "fault" and rank == 1:
        watch.fault("the slice does\\nnot fit")
    if what == "raise" and rank == 1:
        raise RuntimeError("no such tensor")
    if what in ("stop", "drain") and rank == 1:
        watch.ask_stop("SIGTERM")
    while not (place / "stopping").exists():
        time.sleep(0.02)
    if rank == 0:
        time.sleep(0.3)
"""


ENDS_S = 45.0
"""By then a job has ended: before heartbeats would be missed, whatever else this host does."""


class Job:
    """Ranks as plain child processes, without a launcher: the watch alone must end them."""

    def __init__(self, place: Path, what: str, *further: str, size: int = 3, launched: bool = False) -> None:
        """`launched`: with the variables of a launcher."""
        self.place = place
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), str(size), str(place), what, *further],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | ({"PMI_RANK": str(rank), "PMI_SIZE": str(size)} if launched else {}),
            )
            for rank in range(size)
        ]

    def wait_ready(self) -> None:
        until(lambda: all((self.place / f"ready{rank}").exists() for rank in range(len(self.ranks))))

    def errors(self) -> list[str]:
        """All lines on stderr, once every rank and the sentinel (the pipe's last holder) have ended."""
        started = time.monotonic()
        lines = [line for rank in self.ranks for line in self.said_by(rank)]
        assert time.monotonic() - started < ENDS_S
        return lines

    def said_by(self, rank: subprocess.Popen[str]) -> list[str]:
        """But for whom it waits for, which it says on a busy host."""
        lines = rank.communicate(timeout=ENDS_S)[1].splitlines()
        return [line for line in lines if line and not line.startswith("pipeinfer: waiting for ")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_one(what: str, *further: str, launched: bool = False) -> Job:
        (place := tmp_path / str(len(jobs))).mkdir()
        jobs.append(Job(place, what, *further, launched=launched))
        return jobs[-1]

    yield start_one
    for job in jobs:
        for rank in job.ranks:
            rank.kill()


HOST = socket.gethostname()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_and_the_others_end(start: Callable[[str], Job], victim: int) -> None:
    job = start("wait")
    job.wait_ready()
    job.ranks[victim].kill()
    about = f"host {HOST}, stage {victim}, layers {8 * victim}-{8 * victim + 7}"
    assert job.errors() == [f"pipeinfer: rank {victim} ({about}) died of SIGKILL; ending the job"]
    assert all(rank.returncode for rank in job.ranks)


def test_a_stopped_head_is_ended_by_the_sentinel(start: Callable[[str], Job]) -> None:
    """Rank 0 may hold the GIL for long, so that its thread cannot end the job; SIGSTOP is the extreme of it."""
    job = start("wait")
    job.wait_ready()
    job.ranks[0].send_signal(signal.SIGSTOP)
    job.ranks[2].kill()
    assert [line.split(" (")[0] for line in job.errors()] == ["pipeinfer: rank 2"]
    assert job.ranks[0].returncode == -signal.SIGKILL


def test_a_head_that_stands_still_is_named_after_its_time(start: Callable[..., Job]) -> None:
    job = start("wait", "5")
    job.wait_ready()
    stopped_s = time.monotonic()
    job.ranks[0].send_signal(signal.SIGSTOP)
    assert all(rank.wait(timeout=ENDS_S) for rank in job.ranks)
    assert time.monotonic() - stopped_s > 2, "5 s, less the time since it said something"
    (line,) = job.errors()
    assert line.startswith(f"pipeinfer: rank 0 (host {HOST}, stage 0, layers 0-7) has said nothing for 5 s (--rank-")


def test_a_job_that_is_suspended_as_a_whole_goes_on(start: Callable[..., Job]) -> None:
    job = start("wait", "6")
    job.wait_ready()
    for rank in job.ranks:
        rank.send_signal(signal.SIGSTOP)
    time.sleep(7)
    for rank in reversed(job.ranks):
        rank.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    time.sleep(1)
    (job.place / "stopping").touch()
    assert job.errors() == []
    assert [rank.returncode for rank in job.ranks] == [0, 0, 0]


def test_who_is_silent_is_known_from_times_alone() -> None:
    monitor = HeartbeatMonitor(12)
    monitor.begin([0, 1, 2], 0)
    for now_s in range(1, 30):
        monitor.hear(0, now_s)
        if now_s < 8:
            monitor.hear(2, now_s)
        assert monitor.look(now_s) == (None if now_s < 12 else 1), now_s
    monitor.forget(1)
    assert monitor.look(29.5) == 2
    monitor.begin([0, 1], 100)
    for now_s in range(101, 200):  # nobody speaks
        assert monitor.look(now_s) is None
    monitor.hear(1, 200)
    assert [monitor.look(200 + after) for after in (0, 5)] == [None, None]
    monitor.hear(1, 206)
    assert [monitor.look(206 + after) for after in (0, 5, 6)] == [None, None, 0], "the time of 0 began at 200"
    monitor.begin([0, 1], 300)
    monitor.hear(1, 400)  # who listens was stopped itself
    assert monitor.look(400) is None


def test_a_message_that_does_not_come_is_told_from_counts_alone() -> None:
    monitor = FlowMonitor(n_beats=3)

    def beat(taken: int, passed: int, waits: tuple[bool, bool] = (True, True)) -> tuple[int, int] | None:
        """Of rank 2, after rank 1's: how many messages it has taken of those that rank 1 passed on."""
        assert monitor.hear(0, Flow()) is None, "the head is in no pipeline"
        assert monitor.hear(1, Flow(0, 2, passed, passed, waits[0])) is None
        return monitor.hear(2, Flow(1, -1, taken, 0, waits[1]))

    assert [beat(7, 7) for _ in range(9)] == [None] * 9, "nothing to do"
    assert [beat(7, 8) for _ in range(3)] == [None, None, (1, 2)], "after three beats that show no change"
    for taken, waits in ((8, (True, True)), (8, (False, True)), (8, (True, False))):
        assert beat(taken, 9, waits) is None, "it took one in, or one of them computes"
        assert [beat(taken, 9) for _ in range(3)][:2] == [None, None], "it is counted anew"
    mine = Flow(1, -1, 7, 0, True)
    monitor = FlowMonitor(1)
    assert monitor.hear(2, mine) is None and monitor.hear(2, mine) is None, "rank 1 has said nothing"


def test_limits_are_what_kernels_take() -> None:
    for asked_s in (LEAST_S, 4.4, 6, 17, 600, MOST_S):
        found = Limits.of(asked_s).keepalive
        assert found["TCP_USER_TIMEOUT"] == 1000 * asked_s
        assert found["TCP_KEEPIDLE"] <= 32767 and found["TCP_KEEPINTVL"] <= 32767 and found["TCP_KEEPCNT"] <= 127
        total_s = found["TCP_KEEPIDLE"] + found["TCP_KEEPCNT"] * found["TCP_KEEPINTVL"]
        assert abs(total_s - asked_s) <= max(1, asked_s / 10)
        with socket.socket() as link:
            for name, value in found.items():
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def test_a_fault_is_reported_once_on_one_line(start: Callable[[str], Job]) -> None:
    line = f"pipeinfer: rank 1 (host {HOST}, stage 1, layers 8-15): the slice does not fit"
    job = start("fault")
    job.wait_ready()
    assert job.errors() == [line]


def test_a_rank_that_has_not_said_what_it_does_is_named_with_its_layers(start: Callable[[str], Job]) -> None:
    job = start("described by rank 0")
    job.wait_ready()
    job.ranks[2].kill()
    line = f"pipeinfer: rank 2 (host {HOST}, stage 2, layers 16-23) died of SIGKILL; ending the job"
    assert line in job.errors()


def test_an_exception_that_leaves_the_block_is_a_fault(start: Callable[[str], Job]) -> None:
    job = start("raise")
    job.wait_ready()
    assert job.errors()[0].endswith("layers 8-15): RuntimeError: no such tensor")


def test_a_fault_shows_the_cursor_of_a_terminal() -> None:
    code = "import os; from pipeinfer.cluster.watch.watch import Watch; Watch(0, 1, os._exit).fault('no such tensor')"
    ours, terminal = os.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=terminal, timeout=60)
    os.close(terminal)
    assert b"no such tensor" in (said := os.read(ours, 4096)) and SHOW_CURSOR in said
    os.close(ours)


def test_a_request_to_stop_reaches_rank_0_and_goodbyes_are_no_deaths(start: Callable[[str], Job]) -> None:
    job = start("stop")
    job.wait_ready()
    assert job.errors() == ["asked to stop: SIGTERM"]
    assert [rank.returncode for rank in job.ranks] == [0, 0, 0]


def test_a_death_is_named_while_a_service_drains_because_another_rank_was_asked_to_stop(
    start: Callable[[str], Job],
) -> None:
    job = start("drain")
    until((job.place / "draining").exists)
    job.ranks[2].kill()
    line = f"pipeinfer: rank 2 (host {HOST}, stage 2, layers 16-23) died of SIGKILL; ending the job"
    assert job.errors() == ["asked to stop: SIGTERM", line]


def test_the_sentinel_ignores_signals_and_leaves_with_rank_0() -> None:
    watch, rendezvous = head_alone(1)
    sentinel = watch._sentinel
    assert sentinel is not None
    until(lambda: is_closed(rendezvous.port))  # all have joined: it has begun
    sentinel.send_signal(signal.SIGTERM)
    sentinel.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert sentinel.poll() is None
    watch.close()
    assert sentinel.wait(timeout=60) == 0


def test_a_stopped_sentinel_does_not_outlive_the_job() -> None:
    """The launcher waits for it, as it holds its pipe."""
    watch, _ = head_alone(1)
    sentinel = watch._sentinel
    assert sentinel is not None
    sentinel.send_signal(signal.SIGSTOP)
    watch.close()
    assert sentinel.wait(timeout=60) == 0


def test_a_killed_sentinel_is_not_taken_for_a_rank(start: Callable[[str], Job]) -> None:
    job = start("wait")
    job.wait_ready()
    os.kill(sentinels_of(job.ranks[0].pid)[0], signal.SIGKILL)
    first, *others = job.errors()
    assert first == "pipeinfer: the watch, the process that notices dead ranks, was killed by SIGKILL; ending the job"
    assert not any("died" in line for line in others)
    assert all(rank.returncode for rank in job.ranks)


def sentinels_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_rank_killed_by_the_launcher_is_not_named_for_the_one_that_died(number: signal.Signals) -> None:
    """The kernel reported the end of rank 2, which the launcher had killed, before that of rank 1."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    processes = {rank: Process(child.pid) for rank, child in enumerate(children)}
    children[2].kill()
    children[1].send_signal(number)
    assert all(processes[rank].wait() for rank in (1, 2))
    named = first_to_die(processes, 2, processes[2].how_it_ended())
    children[0].kill()
    for child in children:
        child.wait()
    assert named == ((1, " of SIGSEGV") if number == signal.SIGSEGV else (2, " of SIGKILL"))


def test_a_rank_that_never_comes_is_named(start: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s in (2, 20):  # more only if rank 1 took too long
        monkeypatch.setenv("PIPEINFER_JOIN_TIMEOUT", str(limit_s))
        job = start("absent")
        errors = job.errors()
        if (job.place / "ready1").exists():
            break
    assert errors == [f"pipeinfer: rank 2 (host {HOST}) did not join within {limit_s} s; ending the job"]
    assert job.ranks[0].returncode and job.ranks[1].returncode


def test_a_rank_that_is_late_is_named_after_three_seconds(
    start: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEINFER_JOIN_TIMEOUT", "12")
    begun_s, job = time.monotonic(), start("absent")
    assert job.ranks[0].stderr
    late = f"rank 2 (host {HOST})"
    notice = job.ranks[0].stderr.readline()
    assert notice.startswith("pipeinfer: waiting for ")
    assert notice.endswith(f"{late}, 12 s at most (PIPEINFER_JOIN_TIMEOUT)\n"), "rank 1 may take as long"
    assert time.monotonic() - begun_s >= NOTICE_S
    assert job.errors()[0].endswith(f"{late} did not join within 12 s; ending the job")


def test_what_an_inquiry_prints_is_said_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with selectors.DefaultSelector() as selector:
        inquiry = Inquiry(["sh", "-c", 'printf "%s\\n" "$@"; exec sleep 60', "sh"], selector)
        inquiry.start(20, "a", [f"b{number}" for number in range(20)])
        while len(inquiry.lines) < MAX_HOSTS + 2:
            ((key, _),) = selector.select(60)
            assert key.data is inquiry
            key.data.hear()
        inquiry.end()
        assert not selector.get_map()
    assert inquiry.lines == ["20", "a", *(f"b{number}" for number in range(MAX_HOSTS))]
    assert capfd.readouterr().err == "".join(f"pipeinfer: {line}\n" for line in inquiry.lines)


def test_an_inquiry_that_ends_or_does_not_start_is_left_alone() -> None:
    with selectors.DefaultSelector() as selector:
        for command in ([], ["/no/such/program"], ["true"]):
            inquiry = Inquiry(command, selector)
            inquiry.start(2, "a", ["b"])
            for key, _ in selector.select(60 if command == ["true"] else 0):
                key.data.hear()
            assert not selector.get_map() and not inquiry.lines, command


@pytest.mark.parametrize(("what", "missing"), [("before MPI", "rank 1, rank 2"), ("absent", f"rank 2 (host {HOST})")])
def test_a_death_before_all_have_joined_names_who_is_missing(
    start: Callable[[str], Job], what: str, missing: str
) -> None:
    """The launcher may have killed rank 0 because a rank on another host ended first."""
    job = start(what)
    until(lambda: bool(sentinels_of(job.ranks[0].pid)) and (what != "absent" or (job.place / "ready1").exists()))
    time.sleep(0.5)
    job.ranks[0].kill()
    about = f"host {HOST}" + (", stage 0, layers 0-7" if what == "absent" else "")
    line = f"pipeinfer: rank 0 ({about}), or {missing}, which had not joined yet, died of SIGKILL; ending the job"
    assert job.said_by(job.ranks[0]) == [line]


def test_a_rank_that_is_lost_before_all_have_joined_and_has_not_ended(start: Callable[..., Job]) -> None:
    """Its connection closes first, and its process is waited for until the others have joined."""
    job = start("lost", launched=True)
    assert f"pipeinfer: rank 1 (host {HOST}) died; ending the job" in job.said_by(job.ranks[0])


def head_alone(n_ranks: int) -> tuple[Watch, Rendezvous]:
    """Rank 0 and its sentinel, waiting for others."""
    invitations: list[Rendezvous] = []

    def broadcast(rendezvous: Rendezvous | None) -> Rendezvous:
        assert rendezvous is not None
        invitations.append(rendezvous)
        return rendezvous

    watch = Watch(0, n_ranks, os._exit).open(print)
    watch.join([own_location()] * n_ranks, broadcast)
    return watch, invitations[0]


def is_closed(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return False
    return True


def is_turned_away(stranger: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1000):
            pass
    return True


def test_strangers_are_turned_away_and_stop_nothing() -> None:
    """Random bytes, lengths without content, answers with a wrong key, and the right key with impossible ranks."""
    rng = random.Random(5)
    watch, rendezvous = head_alone(3)
    with watch:
        address = ("127.0.0.1", rendezvous.port)
        words = [b"[" * 4000 + b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\n", b"\xff\xff\n", b"", b"1 2\n", b"x" * 10_000]
        words += [struct.pack("!i", 2**31 - 1), struct.pack("!iQ", -1, 2**62), struct.pack("!i", 0)]
        words += [struct.pack("!i", 16) + bytes(16)]
        words += [rng.randbytes(rng.randrange(1, 600)) + b"\n" for _ in range(200)]
        for number in (0, 3, 10**8, -1):
            with socket.create_connection(address, timeout=60) as stranger:
                authenticate_sentinel(connection_of(stranger), rendezvous.key, number)
                assert is_turned_away(stranger)
        with socket.create_connection(address, timeout=60) as stranger, pytest.raises(AuthenticationError):
            authenticate_sentinel(connection_of(stranger), "another key", 1)
        for said in words:
            with socket.create_connection(address, timeout=60) as stranger:
                with contextlib.suppress(OSError):  # it may have been turned away already
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                assert is_turned_away(stranger)
        assert watch._sentinel is not None and watch._sentinel.poll() is None
        link = connect(rendezvous, 1, LIMITS)  # kept: without its connection the rank would count as dead
        assert link is not None, "ranks can still join"


def connection_of(stranger: socket.socket) -> Connection:
    stranger.settimeout(None)
    return Connection(stranger.dup().detach())


def test_a_connection_that_says_nothing_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(listening, "key", 2, LIMITS)
    monkeypatch.setattr("pipeinfer.cluster.watch.rendezvous.PENDING_S", 60.0)
    with socket.create_connection(listening.getsockname(), timeout=60) as stranger:
        select.select([listening], [], [], 60)
        listener.accept()
        stranger.sendall(b"\0")  # the first byte of a length
        listener.reject_late()
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            is_turned_away(stranger)
        monkeypatch.setattr("pipeinfer.cluster.watch.rendezvous.PENDING_S", 0.0)
        listener.reject_late()
        stranger.settimeout(60)
        assert is_turned_away(stranger)
    assert listener.admitted.empty()
    listener.close()


def test_many_ranks_join_at_once() -> None:
    watch, rendezvous = head_alone(33)
    with watch, ThreadPoolExecutor(32) as pool:
        links = list(pool.map(lambda rank: connect(rendezvous, rank, LIMITS), range(1, 33)))
        assert all(links)


def test_silent_strangers_are_few_and_keep_nobody_out() -> None:
    watch, rendezvous = head_alone(3)
    with watch, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", rendezvous.port))) for _ in range(60)]
        links = [connect(rendezvous, rank, LIMITS) for rank in (1, 2)]
        assert all(links)
        # now that all ranks are here, nobody else is: those that waited are turned away, no other can come
        assert all(map(is_turned_away, strangers))
        until(lambda: is_closed(rendezvous.port))
        assert watch._sentinel is not None and watch._sentinel.poll() is None


def test_a_job_on_one_host_listens_on_that_host_alone() -> None:
    watch, rendezvous = head_alone(2)
    with watch:
        assert rendezvous.addresses == ("127.0.0.1",)
        for address in _own_addresses():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, rendezvous.port), timeout=10)


def test_a_rank_trusts_nobody_who_passes_its_challenge_on_to_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeinfer.cluster.watch.rendezvous.HELLO_TIMEOUT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = Rendezvous("elsewhere", ("127.0.0.1",), listener.getsockname()[1], "the key")
        with ThreadPoolExecutor(2) as pool:
            ranks = [pool.submit(connect, rendezvous, rank, LIMITS) for rank in (1, 2)]
            first, second = (connection_of(listener.accept()[0]) for _ in ranks)
            first.send_bytes(b"#CHALLENGE#" + bytes(20))
            first.recv_bytes()
            first.send_bytes(b"#WELCOME#")
            second.send_bytes(first.recv_bytes())
            said = second.recv_bytes()
            first.send_bytes(said)
            assert first.recv_bytes() == b"#FAILURE#"
            assert b"the key" not in said
            first.close()
            second.close()
            listener.close()
            assert [rank.result() for rank in ranks] == [None, None]


def test_a_rank_that_comes_after_the_sentinel_ended_does_not_wait_for_it() -> None:
    with socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))  # nobody else takes the port meanwhile
        started = time.monotonic()
        rendezvous = Rendezvous("elsewhere", ("127.0.0.1",), ended.getsockname()[1], "key")
        assert connect(rendezvous, 1, LIMITS) is None
    assert time.monotonic() - started < CONNECT_TIMEOUT_S


# Under mpirun ---------------------------------------------------------------------------------------------------------

MPI_PROGRAM = """
import ctypes, os, sys, time
from pathlib import Path
from functools import partial
from mpi4py import MPI
from pipeinfer.cluster.hosts.launch import end_job
from pipeinfer.cluster.transport import abort
from pipeinfer.cluster.watch.rendezvous import own_location
from pipeinfer.cluster.watch.watch import Watch

comm, place, kind = MPI.COMM_WORLD, Path(sys.argv[1]), sys.argv[2]
watch = Watch(comm.rank, comm.size, partial(end_job, abort=abort)).open(print)
watch.join([own_location()] * comm.size, comm.bcast)
watch.describe(f"stage {comm.rank}")
while comm.rank and "stage 0" not in watch._head_title:
    time.sleep(0.01)  # until the sentinel knows who has joined, and rank 0 what it does
comm.Barrier()
(place / f"pid{comm.rank}").write_text(str(os.getpid()))
comm.Barrier()  # a fault ends who has not written yet
if kind == "fault" and comm.rank == 1:
    watch.fault("out of memory")
end = time.monotonic() + 120  # longer than anybody waits for the job's end
while time.monotonic() < end:
    if kind == "python":
        sum(range(1_000_000))
    elif kind == "holding the GIL":
        ctypes.PyDLL(None).sleep(120)
    else:
        ctypes.CDLL(None).sleep(120)
"""


def mpirun_command() -> list[str]:
    mpirun = shutil.which("mpirun", path=os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""))
    if mpirun is None:
        pytest.skip("no mpirun")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    return [mpirun, "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else [mpirun]


def start_mpi(place: Path, kind: str) -> subprocess.Popen[str]:
    pytest.importorskip("mpi4py")
    environ = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [*mpirun_command(), "-np", "3", sys.executable, "-c", MPI_PROGRAM, str(place), kind]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


def pids_of(place: Path) -> list[Path]:
    """The files of the ranks' process ids, once all ranks have come so far."""
    files = [place / f"pid{rank}" for rank in range(3)]
    until(lambda: all(path.exists() and path.read_text() for path in files), 120)
    return files


@pytest.mark.parametrize("kind", ["python", "sleeping in C", "holding the GIL"])
@pytest.mark.parametrize("victim", [0, 2])
def test_under_mpirun_a_killed_rank_is_named(tmp_path: Path, kind: str, victim: int) -> None:
    job, pids = start_mpi(tmp_path, kind), pids_of(tmp_path)
    time.sleep(0.3)
    os.kill(int(pids[victim].read_text()), signal.SIGKILL)
    errors = job.communicate(timeout=ENDS_S)[1]
    assert (
        errors.count(f"pipeinfer: rank {victim} (host {HOST}, stage {victim}) died of SIGKILL; ending the job\n") == 1
    )
    assert errors.count("pipeinfer:") == 1
    assert job.returncode


def test_under_mpirun_a_fault_is_reported(tmp_path: Path) -> None:
    job = start_mpi(tmp_path, "fault")
    pids_of(tmp_path)  # until then it only starts, which takes long where much else is at work
    errors = job.communicate(timeout=ENDS_S)[1]
    assert errors.count(f"pipeinfer: rank 1 (host {HOST}, stage 1): out of memory\n") == 1
    assert errors.count("pipeinfer:") == 1
    assert job.returncode in (1, 9, 137), "9, 137: rank 0 took more than a second to end it, and was killed"
