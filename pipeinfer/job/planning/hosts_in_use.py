"""Which of many described hosts a plan takes: those with room, the best of them, as many as have something to do.
Plans, and prints nothing."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from pipeinfer.cluster.hosts.cores import UNLIMITED, FreeMemory
from pipeinfer.errors import UserError
from pipeinfer.job.planning.planner import Planner
from pipeinfer.job.planning.suggestions import largest
from pipeinfer.policies import Iterative
from pipeinfer.text import count_text, size_text
from pipeinfer.virtual.nodes import Node


def with_best_hosts(planner: Planner) -> tuple[Planner, list[str]]:
    """The planner with the ranks that it can use, in their order, and a line about the hosts that are left out."""
    lines, nodes = [], planner.nodes
    if small := _without_room(planner):
        nodes = [node for node in nodes if node.host.name not in small]
        shown = ", ".join(f"{name} ({memory})" for name, memory in small.items())
        lines.append(f"left out, without room for a layer: {shown}")
    best = sorted(range(len(nodes)), key=lambda rank: _worth(nodes, rank), reverse=True)

    def first(n: int) -> Planner:
        return replace(planner, nodes=[nodes[rank] for rank in sorted(best[:n])])

    def has_plan(n: int) -> bool:
        try:
            return bool(first(n).plan)
        except UserError:
            return False

    least = min(len(nodes), 1 + len(planner.drafts_in_use) + sum(planner.options.placement.draft_split))
    is_enough = len(nodes) <= planner.info.n_layer or has_plan(len(nodes))
    n_used = len(nodes) if is_enough else largest(has_plan, least, len(nodes))
    if not n_used or n_used == len(nodes):  # without any plan the error says why
        return replace(planner, nodes=nodes), lines
    used = first(n_used)
    spares = dict.fromkeys(nodes[rank].host.name for rank in sorted(best[n_used:]))
    ranks = count_text(n_used, "rank")
    lines.append(f"{ranks} of {len(nodes)} are used, this model has no layers for more; spares: {', '.join(spares)}")
    return used, lines


def _worth(nodes: Sequence[Node], rank: int) -> tuple[float, int, int]:
    """A faster rank is better, then one with more memory, then an earlier one."""
    node = nodes[rank]
    n_there = sum(other.host.name == node.host.name for other in nodes)
    speed = node.machine.bytes_per_s / n_there if node.machine else 0.0
    return speed, node.host.memory.host // n_there, -rank


def _without_room(planner: Planner) -> dict[str, str]:
    """Hosts whose memory holds no layer, and if they are first no draft -> their memory. Empty where all are so."""

    @cache
    def holds(n_bytes: int, is_draft: bool) -> bool:
        """Whether a rank has room for one layer, or for the drafts, beside ranks without a limit."""
        host = replace(planner.nodes[0].host, name="small", memory=FreeMemory(n_bytes))
        ranks = [Node(replace(host, name=name, memory=FreeMemory())) for name in ("before", "after")]
        ranks.insert(0 if is_draft else 1, Node(host))
        split = None if is_draft else f"1,1,{planner.info.n_layer - 2}"
        policy = planner.options.speculation.policy if is_draft else Iterative()
        trial = replace(planner.changed(policy=policy, layer_split=split), nodes=ranks)
        try:
            spare = trial.plan.spare_memory[ranks.index(Node(host))]
        except UserError:  # it cannot be told
            return True
        return spare is None or spare >= 0

    small = {}
    for rank, node in enumerate(planner.nodes):
        n_bytes, may_draft = node.host.memory.host, bool(planner.drafts_in_use) and rank == 0
        if n_bytes < UNLIMITED and not holds(n_bytes, False) and not (may_draft and holds(n_bytes, True)):
            small[node.host.name] = size_text(n_bytes)
    return small if len(small) < len({node.host.name for node in planner.nodes}) else {}
