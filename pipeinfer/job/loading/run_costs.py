"""What runs cost a loaded model, timed at loading or known from the last time, and the `RunCost` that an engine begins
with. Sends nothing."""

import math
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
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.placement.draft_place import options_of_draft
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


def time_stage(context: Context, deployment: Deployment, model: LoadedModel) -> RunCosts:
    """Of this rank's stage of the target. Its cache must be empty and is empty afterwards. Of a paced stage, what its
    profile says."""
    own = deployment.plan.stage_of(context.rank)
    assert own is not None, f"rank {context.rank} has a model and no stage"
    if deployment.pace:
        return RunCosts(stage_rows(deployment.pace.stages[own]))
    part = f"{deployment.model.fingerprint} {deployment.plan.stages[own].layers} {deployment.numerics}"
    key = experiment_key(part, context.options, deployment.hosts, deployment.threads, context.rank)
    rows = _rows(deployment, model, key)
    context_s: float | None = None  # states could not be rewound to time a run again, and cost the same in any context
    if deployment.model.rewinds:
        context_s = recall_context(model, rows, deployment.n_cells, CLOCK, user_cache(), f"context: {key}")
    chunk = None
    if 0 < context.options.max_delay_s < math.inf:
        n_rows = BLOCK if deployment.blocks else min(BLOCK, deployment.n_batch)
        n_blocks = 3 * BLOCK if deployment.blocks else 0
        chunk = n_rows, min(time_chunk(model, n_rows, n_blocks, CLOCK)[1] for _ in range(2))
    return RunCosts(rows, context_s or 0.0, chunk)


def time_draft(context: Context, deployment: Deployment, model: LoadedModel, number: int) -> RunCosts:
    """The same of what this rank has of a draft; of runs alone."""
    own, types = deployment.plan.drafts_on(context.rank)[number], " ".join(context.options.draft_cache)
    options = options_of_draft(context.options, len(deployment.hosts), context.rank)
    part = f"{deployment.drafts[number].fingerprint} {own.layers} of a draft, {types}"
    key = experiment_key(part, options, deployment.hosts, deployment.threads, context.rank)
    return RunCosts(_rows(deployment, model, key))


def _rows(deployment: Deployment, model: LoadedModel, key: str) -> dict[int, float]:
    return time_rows(model, CLOCK) if deployment.pace else recall_rows(model, CLOCK, user_cache(), f"row times: {key}")


def run_cost(stages: Collection[RunCosts], deployment: Deployment, limits_delay: bool) -> RunCost | None:
    """Of a pipeline of these stages, the slowest of which decides; None where they were not timed. In a paced job as
    `simulate` has it. `limits_delay`: chunks count too."""
    if pace := deployment.pace:
        chunk_s = max(stage.seconds(BLOCK, 0) for stage in pace.stages)
        return simulation.run_cost(pace, deployment.n_cells, (BLOCK, chunk_s) if limits_delay else None)
    rows = slowest_stage([stage.rows for stage in stages])
    chunk = max(filter(None, (stage.chunk for stage in stages)), default=None)  # all have as many rows
    context_s = max((stage.context_s for stage in stages), default=0.0)
    computing, hosts = deployment.plan.computing, deployment.hosts
    n_sharing = max(sharers(hosts, computing, rank) for rank in computing)
    return RunCost(rows, deployment.crowding, chunk, context_s, n_sharing) if rows else None
