"""What is wrong with the hosts of missing ranks, by doctor's checks: the program of the watch's inquiry."""

import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pipeinfer.cluster.hosts.launch import RANK_AND_SIZE
from pipeinfer.job.doctor.checks import NETWORK_CHECKS, ports
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, Finding, HostReport, Level, problems
from pipeinfer.job.doctor.host_checks import HOST_CHECKS, build, mpi, name, program, python, shared_memory, ssh
from pipeinfer.job.doctor.host_list import NODES, read_host_list
from pipeinfer.job.doctor.host_session import NoAnswer
from pipeinfer.job.doctor.inquiry import ANSWER_S, close_sessions, open_sessions, read_facts
from pipeinfer.job.doctor.pairs import connect_all

OF_SYSTEM = (name, ssh, python, shared_memory, ports)
OF_PROGRAM = (program, mpi, build)

SETTLE_S = 7.0
"""A host without a fault is reported after this time: its rank may merely be slow."""


def main() -> None:
    """Arguments: the number of ranks, rank 0's host, those of missing ranks. Prints a line for each fault, or host."""
    size, *names = sys.argv[1:]
    in_slurm = NODES in os.environ and shutil.which("srun")
    launcher = "srun" if in_slurm else "openmpi" if "OMPI_COMM_WORLD_SIZE" in os.environ else "mpich"
    for line in absent_lines(size, names, launcher):
        print(line, flush=True)


def absent_lines(size: str, names: Sequence[str], launcher: str) -> Iterator[str]:
    settled_s = time.monotonic() + SETTLE_S
    hosts = read_host_list(",".join(names), launcher)
    reports = open_sessions(hosts, Path("/"))
    try:
        cluster = Cluster(hosts, NO_JOB, reports)
        sessions = {host: report.session for host, report in reports.items() if report.session}
        cluster.ways = connect_all(sessions, {host: report.address for host, report in reports.items()})
        faults = [finding for host in names for finding in _faults(reports[host], cluster, OF_SYSTEM)]
        yield from map(_line, faults)
        time.sleep(max(0.0, settled_s - time.monotonic()))
        good = [reports[host] for host in names[1:] if host not in {finding.host for finding in faults}]
        ranks = {report.name: _ranks(report, size) for report in good}
        idle = [report for report in good if not ranks[report.name]]
        if idle:
            read_facts([reports[names[0]], *idle], NO_JOB)
        for report in good:
            program_faults = _faults(report, cluster, OF_PROGRAM) if report in idle else []
            yield from map(_line, program_faults)
            if not program_faults:
                yield f"{report.name}: no fault was found; {_running(ranks[report.name])} there"
    finally:
        close_sessions(reports.values())


def _faults(report: HostReport, cluster: Cluster, looks: Collection[object]) -> list[Finding]:
    """Errors of some checks."""
    found = problems((*HOST_CHECKS, *NETWORK_CHECKS), looks, report, cluster)
    return [finding for finding in found if finding.level is Level.ERROR]


def _line(finding: Finding) -> str:
    return f"{finding.host}: {finding.check}: {finding.text} -> {finding.fix}"


def _running(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"ranks {listed} run" if len(ranks) > 1 else f"rank {listed} runs" if ranks else "no rank runs"


def _ranks(report: HostReport, size: str) -> list[int]:
    """The ranks of jobs of this size that run on a host."""
    assert report.session
    try:
        return list(report.session.ask("ranks", ANSWER_S, size=size, names=RANK_AND_SIZE).get("ranks", []))
    except NoAnswer:
        return []
