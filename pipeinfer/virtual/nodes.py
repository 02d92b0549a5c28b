"""Ranks that need not exist yet: their hosts, and how fast those are. Knows no model and no MPI."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.free_memory import UNLIMITED, FreeMemory
from pipeinfer.errors import UserError
from pipeinfer.virtual.profile import Machine, ProfileFile

UNKNOWN_CORES = 0
"""Of a host of which nobody said how many it has."""

LAYER_S_A_CORE, LAYER_S, RUN_S = 2e-6, 60e-6, 200e-6


@dataclass(frozen=True, slots=True)
class Node:
    """What one rank runs on. `machine`: of the whole host, which its ranks share; None where nobody knows its speed.
    `source`: who says how fast it is. `gpu`: its name; empty: none."""

    host: Host
    machine: Machine | None = None
    source: str = ""
    gpu: str = ""

    def twin(self, name: str) -> "Node":
        """One more such host."""
        return replace(self, host=replace(self.host, name=name))


def described_host(name: str, n_cores: int, memory_bytes: float) -> Host:
    """As somebody describes it. `memory_bytes`: what models may take of it."""
    cores = frozenset(range(max(1, n_cores)))
    return Host(name, cores, n_cores, FreeMemory(host=int(min(memory_bytes, UNLIMITED))))


def estimated_machine(name: str, n_cores: int, bytes_per_s: float, flop_per_s: float, memory_bytes: float) -> Machine:
    """A host of known speed. Costs of a layer and a run are estimated as in the shipped profiles."""
    layer_s = LAYER_S_A_CORE * n_cores if n_cores != UNKNOWN_CORES else LAYER_S
    return Machine(name, bytes_per_s, flop_per_s, layer_s, RUN_S, memory_bytes)


def profiled_nodes(file: ProfileFile) -> list[Node]:
    """A rank on each machine of a profile, in pipeline order. Raises UserError for a profile of measured times."""
    if not file.by_hardware:
        raise UserError(
            f"{file.name} has measured times of its own models and says nothing of machines; ask simulate "
            "about it, or give --hosts"
        )
    source = f"profile {file.name}"
    return [
        Node(described_host(f"{machine.name}-{number}", UNKNOWN_CORES, machine.memory_bytes), machine, source)
        for number, machine in enumerate(file.machines())
    ]


def first_ranks(nodes: Sequence[Node], n_ranks: int, where: str) -> list[Node]:
    """As many of them as asked for; 0: all. Raises UserError when there are fewer."""
    if n_ranks > len(nodes):
        raise UserError(f"-np {n_ranks}: {where} has {len(nodes)} slots; give at most so many, or name more hosts")
    return list(nodes[: n_ranks or len(nodes)])
