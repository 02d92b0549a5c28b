"""NUMA nodes: their cores, and which nodes each rank of a host is bound to. Knows no model and no MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeinfer.cluster.hosts.cores import Cores, Host, ranks_there
from pipeinfer.cluster.shares import share_of

FOLDER = Path("/sys/devices/system/node")
DISTRIBUTE, ISOLATE, NUMACTL = STRATEGIES = ("distribute", "isolate", "numactl")
"""As in llama.cpp: threads are spread over all nodes; each rank has nodes of its own; ranks keep the cores that numactl
or the launcher gave them."""

RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def with_nodes(host: Host, folder: Path | None = None) -> Host:
    """This process's host with the nodes of its cores; none if the system does not say."""
    paths = [path for path in (folder or FOLDER).glob("node[0-9]*") if path.name[4:].isdecimal()]
    nodes = sorted((int(path.name[4:]), _read_list(path / "cpulist")) for path in paths)
    own = tuple((number, cores & host.cores) for number, cores in nodes if cores & host.cores)
    return replace(host, nodes=own, is_bound=any(cores - host.cores for _, cores in nodes))


def _read_list(path: Path) -> Cores:
    """Parses the system's `0-3,8`."""
    try:
        parts = [RANGE.fullmatch(part) for part in path.read_text().strip().split(",")]
    except (OSError, UnicodeDecodeError):
        return frozenset()
    ranges = (range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part)
    return frozenset(core for each in ranges for core in each)


def isolated(hosts: Sequence[Host]) -> list[Host]:
    """The ranks' hosts, with whole nodes for each rank of a host that has several ranks and nodes. If there are fewer
    nodes than ranks, neighbours share one. Ranks that a launcher has bound keep their cores."""
    return [_isolated(hosts, rank) for rank in range(len(hosts))]


def _isolated(hosts: Sequence[Host], rank: int) -> Host:
    host, beside = hosts[rank], ranks_there(hosts, rank)
    if _why_not(ISOLATE, hosts, rank):
        return host
    own = share_of(host.nodes, beside.index(rank), len(beside))
    cores = frozenset[int]().union(*(cores for _, cores in own))
    n_cores = max(1, host.n_cores * len(cores) // len(host.cores))  # its part of what control groups allow
    return replace(host, cores=cores, n_cores=n_cores, numa="+".join(str(number) for number, _ in own))


def is_distributed(hosts: Sequence[Host], rank: int) -> bool:
    """Whether a rank's threads can be spread over all nodes of its host."""
    return not _why_not(DISTRIBUTE, hosts, rank)


def _why_not(strategy: str, hosts: Sequence[Host], rank: int) -> str:
    """Why the strategy changes nothing for a rank. libllama's spreading uses all cores of a host."""
    host, beside = hosts[rank], ranks_there(hosts, rank)
    if strategy == ISOLATE and len(beside) == 1:
        return "has one rank, which keeps all its cores"
    if strategy == DISTRIBUTE and len(beside) > 1:
        return f"has {len(beside)} ranks; --numa {ISOLATE} gives each its own nodes"
    if (strategy == DISTRIBUTE and host.is_bound) or any(hosts[other].cores != host.cores for other in beside):
        return "has ranks that were bound to cores, which they keep"
    return "" if len(host.nodes) > 1 else "has no two NUMA nodes"


def unheeded(strategy: str, hosts: Sequence[Host]) -> Iterator[str]:
    """A warning for each host where the strategy changes nothing."""
    said = set()
    for rank, host in enumerate(hosts if strategy != NUMACTL else ()):
        why = _why_not(strategy, hosts, rank)
        if why and host.name not in said:
            said.add(host.name)
            yield f"--numa {strategy}: host {host.name} {why}"
