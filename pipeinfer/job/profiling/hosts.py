"""How fast hosts are, measured or kept from the last time."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, Speed, measure_speed, ranks_there, share_cores
from pipeinfer.job.profiling.layer_times import recall
from pipeinfer.virtual.nodes import Node, estimated_machine

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

MEASURED = "measured"


def rank_speed(hosts: Sequence[Host], rank: int) -> Speed:
    """What this rank reaches while the others of its host measure too."""
    return measure_speed(share_cores(hosts, frozenset(range(len(hosts))))[rank])


def host_speeds(link: "Link", hosts: Sequence[Host]) -> list[Speed]:
    """The speed of every rank, measured now or kept from the last time. Collective."""
    host, n_there = hosts[link.rank], len(ranks_there(hosts, link.rank))
    key = f"speed: {host.name}, {host.processor}, {host.n_cores} cores, {n_there} ranks there, pipeinfer {__version__}"

    def measure() -> list[tuple[Speed | None, str]]:
        """Ranks of a host keep its mean: on busy cores theirs differ a hundredfold."""
        speeds = link.all_gather(rank_speed(hosts, link.rank))
        of_hosts = [[speeds[rank] for rank in ranks_there(hosts, each)] for each in range(link.size)]
        reads = [fmean(speed.bytes_per_s for speed in there) for there in of_hosts]
        computes = [fmean(speed.flop_per_s for speed in there) for there in of_hosts]
        return [(Speed(*both), "") for both in zip(reads, computes, strict=True)]

    speeds, _ = recall(link, key, Speed, measure, range(link.size))
    return [speed for speed, _ in speeds if speed]


def with_speeds(speeds: Sequence[Speed], hosts: Sequence[Host], gpus: Sequence[Sequence[str]] = ()) -> list[Node]:
    """A node a rank; a host is as fast as its ranks were together. `gpus`: that each rank sees."""
    nodes = []
    for rank, host in enumerate(hosts):
        there = [speeds[other] for other in ranks_there(hosts, rank)]
        read, compute = sum(speed.bytes_per_s for speed in there), sum(speed.flop_per_s for speed in there)
        machine = estimated_machine(host.name, host.n_cores, read, compute, host.memory.host)
        nodes.append(Node(host, machine, MEASURED, ", ".join(gpus[rank]) if gpus else ""))
    return nodes
