"""Which host should come first: the first rank drafts, so it should be where the target's layers are missed least.
Every order is planned and weighed. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeinfer.cluster.hosts.layer_speed import BEFORE, NOW
from pipeinfer.cluster.hosts.speed import Speed
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import N_CELLS_SPARE, Deployment, read_drafts
from pipeinfer.job.placement.memory import CELLS_PADDING
from pipeinfer.job.planning.planner import ETHERNET, N_PROMPT, Planner
from pipeinfer.job.profiling.host_speeds import MEASURED, with_speeds
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.virtual.nodes import Node

CLEAR_GAIN = 1.1
"""What is predicted of hosts that were timed for a moment has to be so many times better to be told."""


def orders(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """Each other host first, with all its ranks, one of each kind: what to write into a hosts file, and its plan.

    Hosts that lack a model cannot be first. All are split by what is known of their speed, as `baseline` is.
    """
    if not planner.drafts_in_use or planner.options.is_by_rank:
        return
    base = baseline(planner)
    first = base.nodes[0].host.name
    kinds = {_kind(node) for node in base.nodes if node.host.name == first}
    for node in base.nodes:
        if _kind(node) not in kinds and not node.host.lacks:
            kinds.add(_kind(node))
            own = [other for other in base.nodes if other.host.name == node.host.name]
            rest = [other for other in base.nodes if other.host.name != node.host.name]
            yield f"{node.host.name}:{len(own)}", replace(base, nodes=[*own, *rest])


def baseline(planner: Planner) -> Planner:
    """The same order, its layers split by the hosts' speeds where there are any."""
    return replace(planner, is_described=planner.is_described or all(node.machine for node in planner.nodes))


def advice(options: RunOptions, deployment: Deployment, speeds: Sequence[Speed]) -> Iterator[str]:
    """The line that a job says where another host should have come first."""
    n_ctx = max(N_PROMPT + 1, deployment.n_cells - N_CELLS_SPARE - CELLS_PADDING + 1)
    try:
        planner = Planner(
            replace(options, ctx_size=n_ctx, predict=-1), read_model_info(options.model), read_drafts(options.drafts),
            with_speeds(speeds, deployment.hosts), ETHERNET, N_PROMPT,
        )  # fmt: skip
        yield from _advice(planner)
    except UserError:  # what is not simulated; the job goes on as it is
        return


def _advice(planner: Planner) -> Iterator[str]:
    now = baseline(planner).speed
    found = [(order.speed or 0.0, line, order) for line, order in orders(planner) if not order.shortage]
    best, line, order = max(found, key=lambda each: each[0], default=(0.0, "", planner))
    if not now or best < CLEAR_GAIN * now:
        return
    old, new = (plan.nodes[0].host.name for plan in (planner, order))
    slots = line.replace(":", " slots=")
    yield (
        f"host {new} should come first, to draft: its layers are missed least; {best:.3g} tokens/s are predicted then, "
        f"{now:.3g} with {old} first; begin the hosts file with {line} (Open MPI: {slots}; Slurm: --group, that one "
        "first)"
    )


def _kind(node: Node) -> tuple[object, ...]:
    """Of hosts that are alike one is tried. What was measured is never quite the same."""
    machine, host = node.machine, node.host
    if node.source in (MEASURED, NOW, BEFORE):
        return host.processor, host.n_cores
    return machine and (machine.bytes_per_s, machine.flop_per_s), host.n_cores, host.memory
