"""Connections between every two hosts, both ways, and how fast they are; and a message once round a rank on each host,
in an MPI job under the launcher: whether MPI itself works there. Knows no check."""

import json
import math
import os
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import IO, Any, NamedTuple, TypeVar

from pipeinfer.child import python_command
from pipeinfer.cluster.hosts.roster import library_name
from pipeinfer.job.doctor.agent import REPLY_S
from pipeinfer.job.doctor.host_list import HostList, full_words
from pipeinfer.job.doctor.host_session import CONNECT_S, HostSession, NoAnswer

BRIEF_S, FULL_S = 0.02, 1.0  # seconds of data each way: as a rule, and with --bandwidth
AGAIN_S, SLOWER_BRIEFLY = 0.2, 20.0  # ways that look slower by this factor after a moment are timed again
OTHER_S = 1.0  # time to connect to another address of a host, which may be in a network that this one is not in
TOKEN = secrets.token_hex(8)  # of this process's connections: agents close others
ANSWER_S = CONNECT_S + REPLY_S + 10.0
OPEN, SILENT, REFUSED = "open", "silent", "refused"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Way:
    """A connection between hosts. `state`: OPEN, SILENT, REFUSED or an error; `resolved`: the address of `to`, and
    `interface`: the one taken, at `start`. Figures are 0 if not measured, `port` if `start` takes no connections."""

    start: str
    to: str
    port: int
    state: str
    resolved: str = ""
    interface: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0


def at_once(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """In a thread each."""
    items = list(items)
    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(act, items))


def connect_all(sessions: Mapping[str, HostSession], addresses: Mapping[str, str]) -> list[Way]:
    """A connection from every host to every other, at ports that the system chooses, as those of MPI and the watch.
    `addresses`: of hosts whose names do not resolve there."""
    if len(sessions) < 2:
        return []
    answers = at_once(lambda session: _ask(session, "listen", token=TOKEN), sessions.values())
    lost = {host: str(each.get("error")) for host, each in zip(sessions, answers, strict=True) if not each.get("port")}
    ports = {host: int(each["port"]) for host, each in zip(sessions, answers, strict=True) if host not in lost}

    def connect(host: str) -> list[Way]:
        if host in lost:
            return [Way(host, to, 0, lost[host]) for to in sessions if to != host]
        targets = [(to, addresses[to], port) for to, port in ports.items() if to != host]
        answer = _ask(sessions[host], "connect", targets=targets, token=TOKEN, limit_s=CONNECT_S)
        if "links" not in answer:
            return [Way(host, to, port, str(answer.get("error"))) for to, _, port in targets]
        return [Way(host, port=ports[link["to"]], **link) for link in answer["links"]]

    return [way for ways in at_once(connect, sessions) for way in ways]


def measure_all(sessions: Mapping[str, HostSession], ways: Sequence[Way], seconds: float) -> None:
    """Latency and bandwidth of every open way. Pairs without a common host at the same time."""
    by_ends = {(way.start, way.to): way for way in ways if way.state == OPEN}

    def measure(pair: tuple[str, str]) -> None:
        for start, to in (pair, pair[::-1]):
            if way := by_ends.get((start, to)):
                _time(sessions[start], way, to, seconds)

    for pairs in rounds(list(sessions)):
        at_once(measure, pairs)


def measure_again(sessions: Mapping[str, HostSession], ways: Sequence[Way], addresses: Mapping[str, str]) -> None:
    """Ways that looked slow, until one of a host does so again: a busy host, or a lost packet, makes some look so."""
    rates = [way.bytes_per_s for way in ways if way.bytes_per_s]
    least = median(rates) / SLOWER_BRIEFLY if rates else 0.0
    slow: dict[str, list[Way]] = {}
    for way in ways:
        if 0 < way.bytes_per_s < least:
            slow.setdefault(way.start, []).append(way)

    def measure(host: str) -> None:
        for way in slow[host]:
            targets = [(way.to, addresses[way.to], way.port)]
            _ask(sessions[host], "connect", targets=targets, token=TOKEN, limit_s=CONNECT_S)
            answer = _ask(sessions[host], "measure", host=way.to, seconds=AGAIN_S)
            way.bytes_per_s = max(way.bytes_per_s, answer.get("bytes_per_s", 0.0))
            if way.bytes_per_s < least:
                return

    at_once(measure, slow)


def measure_others(
    sessions: Mapping[str, HostSession], ways: Sequence[Way], addresses: Mapping[str, Sequence[str]], seconds: float
) -> list[Way]:
    """From each host to one other over all `addresses` of its interfaces, where another interface is taken."""
    first: dict[str, Way] = {}
    for way in ways:
        if way.state == OPEN and len(addresses[way.start]) > 1 and len(addresses[way.to]) > 1:
            first.setdefault(way.start, way)

    def measure(start: str) -> list[Way]:
        way, result = first[start], []
        targets = [(address, address, way.port) for address in addresses[way.to] if address != way.resolved]
        answer = _ask(sessions[start], "connect", targets=targets, token=TOKEN, limit_s=OTHER_S)
        for link in answer.get("links", ()):
            if link["state"] == OPEN:
                result.append(other := replace(way, resolved=link["resolved"], interface=link["interface"]))
                _time(sessions[start], other, link["to"], seconds)
        return [other for other in result if other.interface != way.interface]

    return [way for ways in at_once(measure, first) for way in ways]


def _time(session: HostSession, way: Way, name: str, seconds: float) -> None:
    """`name`: that of the way's open connection."""
    answer = _ask(session, "measure", host=name, seconds=seconds)
    way.latency_s, way.bytes_per_s = answer.get("latency_s", 0.0), answer.get("bytes_per_s", 0.0)


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which no host is twice (the circle method)."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    result = []
    for _ in range(len(circle) - 1):
        ends = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        result.append([(a, b) for a, b in ends if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return result


def _ask(session: HostSession, action: str, **values: Any) -> dict[str, Any]:
    try:
        return session.ask(action, ANSWER_S, **values)
    except NoAnswer as error:
        return {"error": str(error) or "no answer"}


SILENT_S, LIMIT_S = 30.0, 180.0  # the longest between two signs of its ranks, and the longest in all
SHARED_CORE = {"openmpi": ["--map-by", ":OVERSUBSCRIBE"], "srun": ["--overcommit"]}
"""Launcher -> the words with which two ranks may share a core."""

CODE = """
import json, os, signal, socket, sys, time
signal.alarm(int(sys.argv[1]))
def say(text):
    os.write(1, (text + "\\n").encode())
def fail(kind, error, trace):  # a launcher may wait for the others
    say(json.dumps({"failed": f"{kind.__name__}: {error}"}))
sys.excepthook = fail
say("started")
from mpi4py import MPI
say("joined")
from pipeinfer.cluster.hosts.launch import check_size
from pipeinfer.cluster.idle import Idle
world = MPI.COMM_WORLD
check_size(world.Get_size())
def receive(source):
    Idle().until(lambda: world.iprobe(source) or None)
    return world.recv(None, source)
rank, size, start_s = world.Get_rank(), world.Get_size(), time.monotonic()
name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
here = [[name, MPI.Get_library_version()]]
ranks = [] if rank == 0 else receive(rank - 1)[0]
if size > 1:
    world.send((ranks + here, bytes(1 << 18)), (rank + 1) % size)
if rank == 0:
    ranks = receive(size - 1)[0] if size > 1 else here
    say(json.dumps({"ring": ranks, "s": time.monotonic() - start_s}))
"""


class Ring(NamedTuple):
    """`names`: of the ranks' hosts; empty: it failed, with `error`, or is `late`. `libraries`: of MPI there."""

    names: Sequence[str]
    seconds: float
    error: str
    late: bool
    libraries: Sequence[str] = ()


def run_ring(hosts: HostList, names: Sequence[str], environ: Mapping[str, str] = os.environ) -> Ring:
    """On a rank a host; on one host there are two."""
    n_ranks = dict.fromkeys(names, 1 if len(names) > 1 else 2)
    words = full_words([*hosts.words(names, n_ranks), *python_command(CODE, math.ceil(LIMIT_S) + 1)])
    words[1:1] = SHARED_CORE.get(hosts.launcher, []) if len(names) == 1 else []
    try:
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        job = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environ)
    except OSError as error:
        return Ring((), 0.0, f"{words[0]}: {error.strerror}", False)
    lines, errors, answer = queue.SimpleQueue[str](), list[str](), dict[str, Any]()
    for stream, take in ((job.stdout, lines.put), (job.stderr, errors.append)):
        threading.Thread(target=_read, args=(stream, take), daemon=True).start()
    end_s = time.monotonic() + LIMIT_S
    try:
        while line := lines.get(timeout=min(SILENT_S, max(0.0, end_s - time.monotonic()))):
            if line.startswith('{"failed"'):
                job.kill()
                return Ring((), 0.0, json.loads(line)["failed"], False)
            if line.startswith('{"ring"'):
                answer = json.loads(line)
        job.wait(SILENT_S)
    except (queue.Empty, subprocess.TimeoutExpired):
        job.kill()
        return Ring((), 0.0, "", True)
    if answer:
        ranks, libraries = zip(*answer["ring"], strict=True)
        return Ring(ranks, answer["s"], "", False, [library_name(each) for each in libraries])
    return Ring((), 0.0, _error_line("".join(errors)) or f"exit code {job.returncode}", False)


def _read(stream: IO[str], take: Callable[[str], object]) -> None:
    """Its lines; an empty one at the end."""
    for line in stream:
        take(line)
    take("")


def _error_line(errors: str) -> str:
    """The last line that says more than that the launcher ends."""
    lines = [line.strip(" =-") for line in errors.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("srun: error: ", "[mpiexec@"))]
    return (telling or [line for line in lines if line] or [""])[-1]
