"""Connections between every two hosts, both ways, and how fast they are. Knows sessions, and no check."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from pipeinfer.job.doctor.agent import REPLY_S
from pipeinfer.job.doctor.host_session import HostSession, NoAnswer

CONNECT_S = 8.0
"""Time for a system to take a connection, whatever its programs do: it is tried four times, in 7 s."""

BRIEF_S, FULL_S = 0.02, 1.0
"""Seconds of data each way: as a rule, and with --bandwidth."""

AGAIN_S, SLOWER_BRIEFLY = 0.2, 20.0
"""A way looks slow after a moment whose bandwidth is this part of the median: it is timed again."""

OTHER_S = 1.0
"""Time to connect to another address of a host, which may be in a network that this one is not in."""

TOKEN = secrets.token_hex(8)
"""Of this process's connections: agents close others."""

ANSWER_S = CONNECT_S + REPLY_S + 10.0
OPEN, SILENT, REFUSED = "open", "silent", "refused"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Way:
    """From one host to another. `state`: OPEN, SILENT, REFUSED or an error; `resolved`: the other's address, as the
    first finds it by its name; `interface`: of the first, which was taken. 0: not measured; port 0: the first takes no
    connections itself."""

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
    """From each host to one other over every further address of that, where another interface is taken. `addresses`: of
    each host's interfaces."""
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
