"""A plan as a table: for each rank its host, its layers, its memory, and whether that fits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from pipeinfer.cluster.hosts.host import UNLIMITED, sharers
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.observe.report import show_table
from pipeinfer.text import count_text, or_dash, size_text, without_suffixes
from pipeinfer.virtual.nodes import UNKNOWN_CORES, Node

PlanRow = Mapping[str, Any]

ENOUGH = 130  # characters of a line that has room for all columns
RANKS_SHOWN = 8  # in a line
ALWAYS = ("rank", "host", "role", "layers", "weights", "KV", "memory", "spare", "threads")
"""Columns that fit on a narrow terminal."""

WHERE = ("backend", "device")  # columns of a narrow terminal besides, where the user chose one a rank
USUAL = {"backend": "llama"}  # columns are not shown whose cells are all this; others whose cells are all a dash
CELLS: Mapping[str, Callable[[PlanRow], str]] = {
    "rank": lambda row: str(row["rank"]),
    "host": lambda row: row["host"],
    "cores": lambda row: or_dash(row["n_cores"]),
    "free": lambda row: _size(row["room_bytes"]),
    "GPU": lambda row: or_dash(row["gpu"]),
    "backend": lambda row: row["backend"],
    "device": lambda row: or_dash(row["device"]),
    "speed": lambda row: _speed(row),
    "speed from": lambda row: or_dash(row["speed_source"]),
    "a layer": lambda row: "-" if row["layer_s"] is None else f"{1e3 * row['layer_s']:.3g} ms, {row['layer_source']}",
    "role": lambda row: row["role"],
    "layers": lambda row: or_dash(row["layers"]),
    "weights": lambda row: _size(row["weight_bytes"]),
    "KV": lambda row: _size(row["kv_bytes"]),
    "buffers": lambda row: _size(row["buffer_bytes"]),
    "memory": lambda row: _size(row["memory_bytes"]),
    "spare": lambda row: _size(row["spare_bytes"]),
    "on GPUs": lambda row: _size(row["gpu_bytes"] or None),
    "spare there": lambda row: _size(row["gpu_spare_bytes"]),
    "fits": lambda row: "yes" if row["fits"] else "no",
    "threads": lambda row: or_dash(row["threads"]),
}


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
    named = [f"{without_suffixes(file.path.name)} ({size_text(file.n_bytes)})" for file in (plan.model, *plan.drafts)]
    ranks = count_text(assignment.n_ranks, "rank")
    where = f"{ranks} of {count_text(len(hosts), 'host')}" if assignment.n_ranks > 1 else ranks
    memory = size_text(sum(memory.total for memory in plan.memory))
    shown = [
        f"{rank}{f' ({plan.hosts[rank].name})' if len(hosts) > 1 else ''} {assignment.describe(rank)}"
        for rank in range(min(assignment.n_ranks, RANKS_SHOWN))
    ]
    more = f"; {assignment.n_ranks - RANKS_SHOWN} more: -v" if assignment.n_ranks > RANKS_SHOWN else ""
    for line in (f"{' with the draft '.join(named)} on {where}, {memory}, {brief}", f"rank {'; '.join(shown)}{more}"):
        console.print(line, markup=False, soft_wrap=True)


def plan_rows(plan: JobPlan, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Of every rank, in bytes; null where unknown. `nodes`: of each rank.

    layer_s               a row in a layer of the target's mean size, and the source
    n_cores, room_bytes   of its host for all ranks there, before anything is loaded
    read_bytes_per_s, …   this rank's share of its host's speed, and the source
    memory_bytes          of the rank; needed_bytes: without weights that the system can read again
    gpu_bytes, gpu_spare_bytes   of libllama on its GPUs, and left there likewise; null: unknown
    spare_bytes           left there when all ranks of the host are loaded; negative: so much is missing"""
    hosts, memories = plan.hosts, plan.memory
    spare, on_gpus = plan.spare_memory, plan.spare_on_gpus
    rows = []
    for rank, (node, memory, spare_bytes) in enumerate(zip(nodes, memories, spare, strict=True)):
        roles, room = plan.assignment.roles(rank), node.host.memory
        share = sharers(hosts, plan.assignment.computing, rank)
        speed = hosts[rank].speed
        room_bytes = min(room.host, room.process)
        rows.append(
            {
                "rank": rank,
                "host": node.host.name,
                "n_cores": node.host.n_cores if node.host.n_cores != UNKNOWN_CORES else None,
                "room_bytes": room_bytes if room_bytes < UNLIMITED else None,
                "gpu": node.gpu or None,
                "backend": str(plan.device(rank).backend),
                "device": plan.device_names(rank) or None,
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
                "spare_bytes": spare_bytes,
                "gpu_bytes": plan.ranks[rank].gpu_bytes,
                "gpu_spare_bytes": on_gpus[rank],
                "fits": (spare_bytes is None or spare_bytes >= 0) and (on_gpus[rank] or 0) >= 0,
                "threads": plan.threads[rank] if node.host.n_cores != UNKNOWN_CORES else None,
            }
        )
    return rows


def plan_cells(rows: Sequence[PlanRow], names: Sequence[str] = tuple(CELLS)) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of `plan_rows`, without columns that tell nothing here."""
    cells = {name: [CELLS[name](row) for row in rows] for name in names}
    shown = [name for name in names if name in ALWAYS or set(cells[name]) != {USUAL.get(name, "-")}]
    return shown, [[cells[name][index] for name in shown] for index in range(len(rows))]


def _size(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else f"-{size_text(-n_bytes)}" if n_bytes < 0 else size_text(n_bytes)


def _speed(row: PlanRow) -> str:
    if row["read_bytes_per_s"] is None:
        return "-"
    return f"{row['read_bytes_per_s'] / 1e9:.3g} GB/s, {row['flop_per_s'] / 1e9:.4g} GFLOP/s"
