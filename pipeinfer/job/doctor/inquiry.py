"""What is asked of hosts, all at once: the system, the program's facts, hashes of whole files. Judges nothing."""

import contextlib
import ipaddress
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeinfer.job.doctor.facts import FACTS_S, facts_command
from pipeinfer.job.doctor.findings import HostReport
from pipeinfer.job.doctor.hashes import hashes_command
from pipeinfer.job.doctor.host_list import HostList
from pipeinfer.job.doctor.host_session import CONNECT_S, HostSession, NoAnswer, remote_words
from pipeinfer.job.doctor.pairs import at_once
from pipeinfer.job.options.options import RunOptions
from pipeinfer.observe.report import transfer_bar

ANSWER_S = CONNECT_S + 15.0
"""Until a host must have answered: a busy one takes its time. ssh ends after CONNECT_S without a connection."""

SILENT_S, HASHES_S = 120.0, 24 * 3600.0
"""The longest between two lines while files are hashed, and the longest in all."""


def open_sessions(hosts: HostList, disk: Path) -> dict[str, HostReport]:
    """`disk`: the folder for slices."""
    reports = {name: HostReport(name, name in hosts.here) for name in hosts.names}
    at_once(partial(_open, launcher=hosts.launcher, disk=disk), reports.values())
    return reports


def close_sessions(reports: Iterable[HostReport]) -> None:
    at_once(HostSession.close, [report.session for report in reports if report.session])


def _open(report: HostReport, launcher: str, disk: Path) -> None:
    try:
        report.address = str(socket.getaddrinfo(report.name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        report.has_address = False  # ssh may know it all the same
    start_s = time.monotonic()
    # hydra and srun hand the whole environment on
    environ = dict(os.environ) if launcher == "mpich" and not report.is_here else {}
    values: dict[str, Any] = {
        "python": sys.executable,
        "folder": os.getcwd(),
        "disk": str(disk.expanduser()),
        "environ": environ,
    }
    try:
        report.session = HostSession(remote_words(launcher, report.name, report.is_here))
        sent_s = time.time()
        report.base = report.session.ask("base", ANSWER_S, **values)
        if report.base:
            report.clock_s = _beyond(report.base["time_s"], sent_s, time.time())
            if _is_of_one_host(report.address):
                report.address = next((each for each, _ in report.base["addresses"].values()), report.address)
    except NoAnswer as error:
        report.failure = error
    if report.session and not report.base:
        report.session.close()
        report.session = None
    report.connect_s = time.monotonic() - start_s


def _is_of_one_host(address: str) -> bool:
    """Whether it means something else on another host (Debian gives 127.0.1.1 to a machine's own name), or nothing."""
    number = ipaddress.ip_address(address.partition("%")[0]) if address else None
    return number is None or number.is_loopback or number.is_link_local


def _beyond(time_s: float, first_s: float, last_s: float) -> float:
    """How far a clock's time lies outside of the interval in which it was read."""
    return min(0.0, time_s - first_s) + max(0.0, time_s - last_s)


def read_facts(reports: Iterable[HostReport], options: RunOptions) -> None:
    """Of hosts with this Python."""
    words = facts_command(options)

    def read(report: HostReport) -> None:
        same = report.base.get("interpreter", "").split(".")[:2] == [str(each) for each in sys.version_info[:2]]
        if report.session and same and not report.base["program"]:
            report.facts_failure = _run(
                report, words, FACTS_S + 5, FACTS_S, lambda line: report.facts.update([json.loads(line)])
            )

    at_once(read, reports)


def read_hashes(reports: Iterable[HostReport], paths: Sequence[Path], n_bytes: int) -> None:
    """`n_bytes`: of all files on one host, for the bar."""
    words, reachable = hashes_command(paths), [report for report in reports if report.session]
    bar, lock = (
        transfer_bar(Console(stderr=True), time.monotonic, "SHA-256", n_bytes * len(reachable)),
        threading.Lock(),
    )

    def read(report: HostReport) -> None:
        def take(line: str) -> None:
            answer = json.loads(line)
            if "path" in answer:
                report.hashes[answer.pop("path")] = answer
            with lock:
                bar.advance(answer.get("progress", 0))

        report.hashes_failure = _run(report, words, SILENT_S, HASHES_S, take)

    try:
        at_once(read, reachable)
    finally:
        bar.close()


def _run(
    report: HostReport, words: Sequence[str], silent_s: float, limit_s: float, on_line: Callable[[str], object]
) -> NoAnswer | None:
    """Run a program that prints JSON on a host. Returns what is wrong with its end."""
    assert report.session

    def take(line: str) -> None:
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # a library may print too
            on_line(line)

    try:
        end = report.session.ask("run", silent_s, take, words=words, limit_s=limit_s)
    except NoAnswer as error:
        return error
    if end.get("late") or end.get("code", 1):  # without a code the agent has ended
        return NoAnswer(None if end.get("late") else end.get("code", 1), str(end.get("errors", "")))
    return None
