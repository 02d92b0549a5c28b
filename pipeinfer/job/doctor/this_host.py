"""Doctor's checks of this host, made before MPI starts here; the command of those of other hosts."""

import math
import socket

from pipeinfer.child import python_command
from pipeinfer.job.doctor import agent
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, Finding, HostReport, problems
from pipeinfer.job.doctor.host_checks import limits, shared_memory
from pipeinfer.job.doctor.host_list import HostList
from pipeinfer.virtual.nodes import UNKNOWN_CORES, Node, described_host


def check_this_host(n_ranks: int) -> list[Finding]:
    """What is wrong with its shared memory and limits for so many ranks."""
    name = socket.gethostname()
    report = HostReport(name, True, base=agent.machine())
    nodes = [Node(described_host(name, UNKNOWN_CORES, math.inf))] * n_ranks
    cluster = Cluster(HostList(nodes, "mpich"), NO_JOB, {name: report})
    return problems((shared_memory, limits), report, cluster)


def absent_command() -> list[str]:
    """For the watch's inquiry into the hosts of missing ranks."""
    return python_command("from pipeinfer.job.doctor.absent import main; main()")
