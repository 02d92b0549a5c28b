"""What runs cost a loaded model, timed at loading or known from the last time, and the `RunCost` that an engine begins
with. Sends nothing."""

from collections.abc import Collection
from dataclasses import dataclass, field

from pipeinfer.cluster.hosts.cores import sharers
from pipeinfer.cluster.timing.calibrate import (
    recall_context,
    recall_rows,
    slowest_stage,
    time_rows,
)
from pipeinfer.cluster.timing.timed_runs import time_chunk
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.core.kv.blocks import BLOCK
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.disk_cache import user_cache
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.loading.stages import experiment_key
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.virtual import simulation
from pipeinfer.virtual.simulation import stage_rows


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Of one rank, in seconds.

    rows       rows of a run -> what it takes; empty: not timed
    context_s  a row takes longer for each token before it; 0 where that is not timed
    chunk      rows of a chunk of a prompt, and what it takes; None where no delay is limited
    """

    rows: dict[int, float] = field(default_factory=dict)
    context_s: float = 0.0
    chunk: tuple[int, float] | None = None


def time_stage(context: Context, plan: JobPlan, model: LoadedModel) -> RunCosts:
    """Costs of this rank's stage of the target; of a paced stage those of its profile. The cache must be empty and is
    empty afterwards."""
    own = plan.assignment.stage_of(context.rank)
    assert own is not None, f"rank {context.rank} has a model and no stage"
    if plan.pace:
        return RunCosts(stage_rows(plan.pace.stages[own]))
    part = f"{plan.model.fingerprint} {plan.assignment.stages[own].layers} {plan.numerics.name}"
    key = experiment_key(part, plan.ranks[context.rank].target, plan.hosts, plan.threads, context.rank)
    rows = _rows(plan, model, key)
    context_s: float | None = None  # states could not be rewound to time a run again, and cost the same in any context
    if plan.model.rewinds:
        context_s = recall_context(model, rows, plan.capacity.n_cells, CLOCK, user_cache(), f"context: {key}")
    chunk = None
    if plan.limits_delay:
        blocks = plan.numerics.blocks
        n_rows = BLOCK if blocks else min(BLOCK, plan.capacity.n_batch)
        n_blocks = 3 * BLOCK if blocks else 0
        chunk = n_rows, min(time_chunk(model, n_rows, n_blocks, CLOCK)[1] for _ in range(2))
    return RunCosts(rows, context_s or 0.0, chunk)


def time_draft(context: Context, plan: JobPlan, model: LoadedModel, number: int) -> RunCosts:
    """Costs of this rank's layers of a draft: rows alone."""
    own, types = plan.assignment.drafts_on(context.rank)[number], " ".join(plan.numerics.draft_cache)
    part = f"{plan.drafts[number].fingerprint} {own.layers} of a draft, {types}"
    key = experiment_key(part, plan.ranks[context.rank].draft, plan.hosts, plan.threads, context.rank)
    return RunCosts(_rows(plan, model, key))


def _rows(plan: JobPlan, model: LoadedModel, key: str) -> dict[int, float]:
    return time_rows(model, CLOCK) if plan.pace else recall_rows(model, CLOCK, user_cache(), f"row times: {key}")


def run_cost(stages: Collection[RunCosts], plan: JobPlan) -> RunCost | None:
    """The run cost of a pipeline of these stages, that of the slowest; None where they were not timed. In a paced job
    it is that of `simulate`. Where delays are limited it includes chunks."""
    if pace := plan.pace:
        chunk_s = max(stage.seconds(BLOCK, 0) for stage in pace.stages)
        return simulation.run_cost(pace, plan.capacity.n_cells, (BLOCK, chunk_s) if plan.limits_delay else None)
    rows = slowest_stage([stage.rows for stage in stages])
    chunk = max(filter(None, (stage.chunk for stage in stages)), default=None)  # all have as many rows
    context_s = max((stage.context_s for stage in stages), default=0.0)
    computing, hosts = plan.assignment.computing, plan.hosts
    n_sharing = max(sharers(hosts, computing, rank) for rank in computing)
    return RunCost(rows, plan.crowding, chunk, context_s, n_sharing) if rows else None
