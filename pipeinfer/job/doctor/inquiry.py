"""What is asked of hosts, all at once: the system, the program's facts, hashes of whole files; `pipeinfer models
verify`, which compares these."""

import ipaddress
import json
import os
import pickle
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeinfer.child import python_command
from pipeinfer.cluster.hosts.roster import version_text
from pipeinfer.errors import UserError
from pipeinfer.job.doctor.connections import at_once
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, HostReport, errors
from pipeinfer.job.doctor.hashes import MANIFEST, read_manifest
from pipeinfer.job.doctor.host_checks import name, python, ssh
from pipeinfer.job.doctor.host_list import HostList, read_host_list
from pipeinfer.job.doctor.host_session import FACTS_S, HostSession, NoAnswer, remote_words
from pipeinfer.job.options.options import RunOptions
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.observe.report import ProgressBar
from pipeinfer.outputs import working_folder

ALL_FACTS_S = 300.0
HASH_S, ALL_HASHES_S = 120.0, 24 * 3600.0  # the longest between two lines of hashes, and in all
AGENT_S = 10.0  # how much longer the agent may take that ends the program


@contextmanager
def host_sessions(
    hosts: HostList, disk: Path = Path("/"), facts: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Iterator[dict[str, HostReport]]:
    """Reports, with sessions until the end. `disk`: for slices; `facts`: their command; `environ`: the launcher's."""
    ranks = {name: [rank for rank, node in enumerate(hosts.nodes) if node.host.name == name] for name in hosts.names}
    reports = {name: HostReport(name, name in hosts.here, ranks=ranks[name]) for name in hosts.names}

    def look(report: HostReport) -> None:
        _open(report, hosts.launcher, disk, environ)
        if facts:
            _read_facts(report, facts)

    try:
        at_once(look, reports.values())
        yield reports
    finally:
        at_once(HostSession.close, [report.session for report in reports.values() if report.session])


def _open(report: HostReport, launcher: str, disk: Path, launcher_environ: Mapping[str, str]) -> None:
    try:
        report.address = str(socket.getaddrinfo(report.name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        report.has_address = False  # ssh may know it all the same
    start_s = time.monotonic()
    # hydra and srun hand the whole environment on
    environ = dict(os.environ) if launcher == "mpich" and not report.is_here else {}
    home_disk = os.path.expanduser(disk)
    place: dict[str, Any] = {"python": sys.executable, "folder": str(working_folder()), "disk": home_disk}
    try:
        report.session = HostSession(remote_words(launcher, report.name, report.is_here, launcher_environ))
        sent_s = time.time()
        report.base = report.session.ask("base", **place, environ=environ)
        if report.base:  # its clock was read between two readings of this one
            ahead_s, behind_s = report.base["time_s"] - time.time(), report.base["time_s"] - sent_s
            report.clock_s = max(0.0, ahead_s) + min(0.0, behind_s)
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


def read_facts(reports: Iterable[HostReport], command: Sequence[str]) -> None:
    """Read facts of hosts with this Python. `command`: see `facts_command`."""
    at_once(partial(_read_facts, words=command), reports)


def read_libraries(reports: Iterable[HostReport]) -> None:
    """Read the name of the MPI library, loaded in a process of its own, of hosts where the program starts."""
    words = python_command("from pipeinfer.job.inspect.host_facts import tell_library; tell_library()")
    present = [report for report in reports if "version" in report.facts]
    at_once(lambda report: _run(report, words, FACTS_S, FACTS_S, partial(_take, report.facts)), present)


def facts_command(options: RunOptions, names: Sequence[str] = ()) -> Sequence[str]:
    """The command that prints a host's facts. `options`: of a job, with files for names; only the same version
    reads them. `names`: of each rank's host."""
    arguments = version_text(), b64encode(pickle.dumps((options, names))).decode()
    return python_command("from pipeinfer.job.inspect.host_facts import main; main()", *arguments)


def _read_facts(report: HostReport, words: Sequence[str]) -> None:
    same = report.base.get("interpreter", "").split(".")[:2] == [str(each) for each in sys.version_info[:2]]
    for rank in report.ranks if report.session and same and not report.base["program"] else ():
        is_first = rank == report.ranks[0]
        if not is_first and (report.facts_failure or "servers" not in report.facts):
            break
        facts = report.facts if is_first else report.other_facts.setdefault(rank, {})
        report.facts_failure = _run(report, [*words, str(rank)], FACTS_S, ALL_FACTS_S, partial(_take, facts))


def _take(facts: dict[str, Any], fact: tuple[str, Any]) -> None:
    facts.update([fact])


def read_hashes(reports: Iterable[HostReport], paths: Sequence[Path]) -> None:
    """Read hashes of files at the same paths on all hosts. The progress bar takes them to be as long there as here."""
    words = python_command("from pipeinfer.job.doctor.hashes import main; main()", *map(os.path.abspath, paths))
    n_bytes = sum(path.stat().st_size for path in paths if os.path.exists(path))
    reachable, lock = [report for report in reports if report.session], threading.Lock()
    bar = ProgressBar(Console(stderr=True), time.monotonic, "SHA-256", n_bytes * len(reachable), "MB")

    def read(report: HostReport) -> None:
        def take(answer: dict[str, Any]) -> None:
            if "path" in answer:
                report.hashes[answer.pop("path")] = answer
            with lock:
                bar.advance(answer.get("progress", 0))

        report.hashes_failure = _run(report, words, HASH_S, ALL_HASHES_S, take)

    try:
        at_once(read, reachable)
    finally:
        bar.close()


def _run(
    report: HostReport, words: Sequence[str], silent_s: float, limit_s: float, take: Callable[[Any], object]
) -> NoAnswer | None:
    """Run a program on a host, and take what it prints as JSON. Returns what is wrong with its end."""
    assert report.session

    def on_line(line: str) -> None:
        with suppress(ValueError, TypeError, AttributeError):  # a library may print too
            take(json.loads(line))

    try:
        limits = {"silent_s": silent_s, "limit_s": limit_s}
        end = report.session.ask("run", silent_s + AGENT_S, on_line, limit_s + AGENT_S, words=words, **limits)
    except NoAnswer as error:
        return error
    if end.get("late") or end.get("code", 1):  # without a code the agent has ended
        return NoAnswer(None if end.get("late") else end.get("code", 1), str(end.get("errors", "")))
    return None


def verify_files(files: Sequence[Path], hosts: str | None) -> dict[str, Any]:
    """Of every host and file, all parts of a split one, the SHA-256, compared with the manifest beside the file here.
    Raises UserError for a host without an answer."""
    host_list = read_host_list(hosts, None)
    paths = [Path(os.path.abspath(part)) for file in files for part in part_paths(file)]
    with host_sessions(host_list) as reports:
        for report in reports.values():
            for problem in errors((name, ssh, python), report, Cluster(host_list, NO_JOB, reports)):
                raise UserError(f"{report.name}: {problem.text} -> {problem.fix}")
        read_hashes(reports.values(), paths)
    for report in reports.values():
        if report.hashes_failure or any(str(path) not in report.hashes for path in paths):
            why = report.hashes_failure or "the program there ended"
            raise UserError(f"{report.name}: no hashes come from there: {why}; see pipeinfer doctor")
    result = [
        {"host": name, "path": str(path)} | report.hashes[str(path)]
        for path in paths
        for name, report in reports.items()
    ]
    for each in result:
        listed = read_manifest((path := Path(each["path"])).parent).get(path.name)
        if listed and not each["error"] and each["sha256"] != listed:
            each["error"] = f"{each['sha256']}, and {MANIFEST} beside it has {listed}"
    alike = all(len({each["sha256"] for each in result if each["path"] == str(path)}) == 1 for path in paths)
    return {"files": result, "alike": alike and not any(each["error"] for each in result)}


def verify_lines(result: dict[str, Any]) -> Iterator[str]:
    for each in result["files"]:
        yield f"{each['host']}: {each['path']}: {each['error'] or each['sha256']}"
    if not result["alike"] and any(each["sha256"] for each in result["files"]):
        yield "they differ: copy the file again from the host whose hash is that of the model's source"
