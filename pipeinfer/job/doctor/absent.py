"""What is wrong with the hosts of missing ranks, by doctor's checks: the program of the watch's inquiry."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from pipeinfer.cluster.hosts.launch import RANK_AND_SIZE
from pipeinfer.cluster.watch.processes import FATAL
from pipeinfer.job.doctor.checks import ports
from pipeinfer.job.doctor.connections import connect_all
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, Finding, HostReport, errors
from pipeinfer.job.doctor.host_checks import build, mpi, name, program, python, shared_memory, ssh
from pipeinfer.job.doctor.host_list import NODES, read_host_list
from pipeinfer.job.doctor.host_session import NoAnswer
from pipeinfer.job.doctor.inquiry import facts_command, host_sessions, read_facts, read_libraries

OF_SYSTEM = (name, ssh, python, shared_memory, ports)
OF_PROGRAM = (program, mpi, build)

FATAL_CHECKS = {each.name for each in (python, *OF_PROGRAM)}

SETTLE_S = 7.0  # a host without a fault is reported after this time: its rank may merely be slow


def main() -> None:
    """Arguments: the number of ranks, rank 0's host, those of missing ranks. Prints a line for each fault, or host."""
    size, *names = sys.argv[1:]
    in_slurm = NODES in os.environ and shutil.which("srun")
    launcher = "srun" if in_slurm else "openmpi" if "OMPI_COMM_WORLD_SIZE" in os.environ else "mpich"
    for line in absent_lines(size, names, launcher):
        print(line, flush=True)


def absent_lines(size: str, names: Sequence[str], launcher: str) -> Iterator[str]:
    """The lines about `names`: rank 0's host, and those of missing ranks. `size`: the number of ranks."""
    settled_s = time.monotonic() + SETTLE_S
    hosts = read_host_list(",".join(names), launcher)
    with host_sessions(hosts) as reports:
        cluster = Cluster(hosts, NO_JOB, reports)
        sessions = {host: report.session for host, report in reports.items() if report.session}
        cluster.ways = connect_all(sessions, {host: report.address for host, report in reports.items()})
        faults = [finding for host in names for finding in errors(OF_SYSTEM, reports[host], cluster)]
        yield from (_line(fault, reports[fault.host], size) for fault in faults)
        time.sleep(max(0.0, settled_s - time.monotonic()))
        good = [reports[host] for host in names[1:] if host not in {finding.host for finding in faults}]
        ranks = {report.name: _ranks(report, size) for report in good}
        idle = [report for report in good if not ranks[report.name]]
        if idle:
            read_facts(looked_at := [reports[names[0]], *idle], facts_command(NO_JOB))
            read_libraries(looked_at)
        for report in good:
            program_faults = errors(OF_PROGRAM, report, cluster) if report in idle else []
            yield from (_line(fault, report, size) for fault in program_faults)
            if not program_faults:
                yield f"{report.name}: no fault was found; {_running(ranks[report.name])} there"


def _line(fault: Finding, report: HostReport, size: str) -> str:
    """The line of a fault; a fatal one where the program cannot run and no rank runs, as then none can start."""
    is_late = report.facts_failure and report.facts_failure.code is None
    is_fatal = fault.check in FATAL_CHECKS and not is_late and not _ranks(report, size)
    return f"{FATAL if is_fatal else ''}{fault.host}: {fault}"


def _running(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"ranks {listed} run" if len(ranks) > 1 else f"rank {listed} runs" if ranks else "no rank runs"


def _ranks(report: HostReport, size: str) -> list[int]:
    """The ranks of jobs of this size that run on a host."""
    assert report.session
    try:
        return list(report.session.ask("ranks", size=size, names=RANK_AND_SIZE).get("ranks", []))
    except NoAnswer:
        return []
