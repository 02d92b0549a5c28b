"""A plan as a table: for each rank its host, its layers, its memory, and whether that fits."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from pipeinfer.cluster.hosts.cores import sharers
from pipeinfer.cluster.hosts.free_memory import UNLIMITED, spare_memory
from pipeinfer.cluster.hosts.gpu_memory import spare_on_gpus
from pipeinfer.job.placement.job_plan import JobPlan, ModelFile
from pipeinfer.observe.report import show_table, without_suffixes
from pipeinfer.observe.texts.plan_text import ALWAYS, CELLS, plan_cells
from pipeinfer.sizes import size_text
from pipeinfer.virtual.nodes import UNKNOWN_CORES, Node

WHERE = ("backend", "device")
"""What is also shown on a narrow terminal, where a rank is told."""

ENOUGH = 130
"""Characters a line in which all columns have room."""

RANKS_SHOWN = 8
"""In a line."""


def show_plan(console: Console, plan: JobPlan, about: str = "") -> None:
    """A row a rank, whether it fits or not. `about`: a line above the table."""
    if about:
        console.print(about)
    rows = plan_rows(plan, list(map(Node, plan.hosts)))
    show_table(console, *plan_cells(rows, tuple(CELLS) if console.width >= ENOUGH else (*ALWAYS, *WHERE)))


def show_start(console: Console, plan: JobPlan, brief: str, about: str, verbose: bool) -> None:
    """A line with models, ranks, memory and `brief`, and a line with the role of each rank; if `verbose` the whole plan
    below `about` and the name of its numerics."""
    if verbose:
        show_plan(console, plan, f"{about}, numerics {plan.numerics.name}")
        return
    hosts, assignment = {host.name for host in plan.hosts}, plan.assignment
    models = " with the draft ".join(map(_named, [plan.model, *plan.drafts]))
    ranks = _counted(assignment.n_ranks, "rank")
    where = f"{ranks} of {_counted(len(hosts), 'host')}" if assignment.n_ranks > 1 else ranks
    memory = size_text(sum(memory.total for memory in plan.memory))
    shown = [
        f"{rank}{f' ({plan.hosts[rank].name})' if len(hosts) > 1 else ''} {assignment.describe(rank)}"
        for rank in range(min(assignment.n_ranks, RANKS_SHOWN))
    ]
    more = f"; {assignment.n_ranks - RANKS_SHOWN} more: -v" if assignment.n_ranks > RANKS_SHOWN else ""
    for line in (f"{models} on {where}, {memory}, {brief}", f"rank {'; '.join(shown)}{more}"):
        console.print(line, markup=False, soft_wrap=True)


def _named(model: ModelFile) -> str:
    return f"{without_suffixes(model.path.name)} ({size_text(model.n_bytes)})"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def plan_rows(plan: JobPlan, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Of every rank, in bytes; null where nobody knows. `nodes`: what each runs on.

    layer_s               a row in a layer of the target's mean size, and who says so
    n_cores, room_bytes   what its host has for all ranks there, before anything is loaded
    read_bytes_per_s, …   this rank's share of its host's speed, and who says so
    memory_bytes          what the rank will hold; needed_bytes: without weights that the system can read again
    gpu_bytes, gpu_spare_bytes   what libllama puts on its GPUs, and what is left there likewise; null: nobody knows
    spare_bytes           what is left there when all ranks of the host have theirs; negative: so much is missing
    """
    hosts, memories = plan.hosts, plan.memory
    spare = spare_memory(*plan.free_memory, memories)
    on_gpus = spare_on_gpus(hosts, plan.on_gpus)
    rows = []
    for rank, (node, memory, left) in enumerate(zip(nodes, memories, spare, strict=True)):
        roles, room = plan.assignment.roles(rank), node.host.memory
        share = sharers(hosts, plan.assignment.computing, rank)
        speed = hosts[rank].speed
        room_bytes = min(room.host, room.own)
        rows.append(
            {
                "rank": rank,
                "host": node.host.name,
                "n_cores": node.host.n_cores if node.host.n_cores != UNKNOWN_CORES else None,
                "room_bytes": room_bytes if room_bytes < UNLIMITED else None,
                "gpu": node.gpu or None,
                "backend": str(plan.device(rank).backend),
                "device": plan.device(rank).name or None,
                "read_bytes_per_s": node.machine.bytes_per_s / share if node.machine else None,
                "flop_per_s": node.machine.flop_per_s / share if node.machine else None,
                "speed_source": node.source or None,
                "layer_s": speed.layer_s(plan.model.sizes.layer_bytes) if speed else None,
                "layer_source": speed.source if speed else None,
                "role": " + ".join(name for name, _ in roles) or "head",
                "layers": " + ".join(span for _, span in roles if span) or None,
                "weight_bytes": memory.weights + memory.mapped,
                "kv_bytes": memory.kv,
                "buffer_bytes": memory.buffers + memory.runtime,
                "memory_bytes": memory.total,
                "needed_bytes": memory.needed,
                "spare_bytes": left,
                "gpu_bytes": plan.on_gpus[rank],
                "gpu_spare_bytes": on_gpus[rank],
                "fits": (left is None or left >= 0) and (on_gpus[rank] or 0) >= 0,
                "threads": plan.threads[rank] if node.host.n_cores != UNKNOWN_CORES else None,
            }
        )
    return rows
