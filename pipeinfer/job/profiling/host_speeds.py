"""Speeds of a job's hosts, timed on all ranks at once or known from before. Knows no plan."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, ranks_there, share_cores
from pipeinfer.cluster.hosts.speed import Speed, measure_speed
from pipeinfer.job.profiling.known_times import known
from pipeinfer.virtual.nodes import Node, estimated_machine

if TYPE_CHECKING:
    from pipeinfer.cluster.transport import Link


MEASURED = "measured"


def own_speed(hosts: Sequence[Host], rank: int) -> Speed:
    """What a rank reaches while the others of its host measure too."""
    return measure_speed(share_cores(hosts, frozenset(range(len(hosts))))[rank])


def known_speeds(link: "Link", hosts: Sequence[Host]) -> list[Speed]:
    """Of every rank, as it was found the last time, else now. Collective."""
    host, n_there = hosts[link.rank], len(ranks_there(hosts, link.rank))
    key = f"speed: {host.name}, {host.processor}, {host.n_cores} cores, {n_there} ranks there, pipeinfer {__version__}"

    def mean() -> tuple[Speed | None, str]:  # ranks of a host keep one value; on busy cores theirs differ a hundredfold
        speeds = link.all_gather(own_speed(hosts, link.rank))
        here = [speeds[rank] for rank in ranks_there(hosts, link.rank)]
        return Speed(fmean(speed.bytes_per_s for speed in here), fmean(speed.flop_per_s for speed in here)), ""

    found, _ = known(link, key, Speed, mean, range(link.size))
    return [speed for speed, _ in found if speed]


def with_speeds(speeds: Sequence[Speed], hosts: Sequence[Host], gpus: Sequence[Sequence[str]] = ()) -> list[Node]:
    """A node a rank; a host is as fast as its ranks were together. `gpus`: that each rank sees."""
    nodes = []
    for rank, host in enumerate(hosts):
        here = [speed for speed, other in zip(speeds, hosts, strict=True) if other.name == host.name]
        read, compute = sum(speed.bytes_per_s for speed in here), sum(speed.flop_per_s for speed in here)
        machine = estimated_machine(host.name, host.n_cores, read, compute, host.memory.host)
        nodes.append(Node(host, machine, MEASURED, ", ".join(gpus[rank]) if gpus else ""))
    return nodes
