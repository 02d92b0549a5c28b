"""The rank of a stage, of the target or of a draft that is elsewhere, from loading to the shutdown."""

from __future__ import annotations

import socket

from pipeinfer.cluster.serve import N_POSTED, N_UNDER_WAY, Pipe, StageLoop
from pipeinfer.cluster.stage import StageWorker
from pipeinfer.cluster.transport import Outbox, progress_between
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.loading.arrivals import fetch_layers
from pipeinfer.job.loading.load import (
    load_drafts,
    load_stage,
    make_courier,
    make_draft_worker,
    make_worker,
)
from pipeinfer.job.loading.run_costs import RunCosts, time_draft, time_stage
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.observe.ledger import StageLedger


def run_stage(context: Context, deployment: Deployment) -> int:
    """Load, serve, and send figures home whenever rank 0 asks for them, until it ends the session.

    Returns the exit code.
    """
    start_s = ready_s = CLOCK()
    model = None
    try:
        fetch_layers(context, deployment)
        model, number = load_stage(context, deployment), None
        drafts = load_drafts(context, deployment)
        if drafts:
            ((number, model),) = drafts.items()
        loaded_s = CLOCK() - start_s
        costs = RunCosts()
        if model and number is not None:
            costs = time_draft(context, deployment, model, number)
        elif model:
            costs = time_stage(context, deployment, model)
        ready_s = CLOCK()  # rank 0 may begin a request as soon as it has the report
        # a draft's is not asked for: that alone would import torch, where libllama computes it
        gpu = gpu_of(context.options, deployment.hosts, context.rank) if model and number is None else ""
        context.link.report({"loaded_s": loaded_s, "costs": costs, "gpu": gpu})
    except UserError as error:
        context.link.report({"error": f"rank {context.rank} ({socket.gethostname()}): {error}"})
    ranks = [stage.rank for stage in deployment.plan.pipeline_of(context.rank)]
    index = ranks.index(context.rank)
    previous = ranks[index - 1] if index else 0
    following = ranks[index + 1] if index + 1 < len(ranks) else None
    courier = make_courier(context, deployment)
    worker = _make_worker(context, deployment, model) if model else None

    def report(outbox: Outbox, ledger: StageLedger) -> None:
        context.link.report(context.take_figures(worker, outbox, ledger))

    n_rows, n_embd = deployment.largest_input(context.rank)
    samplers = 0 if deployment.plan.stage_of(context.rank) is None else deployment.samplers
    pipe = Pipe(
        previous, following, n_rows, n_embd, context.options.wire_type, courier, samplers,
        N_UNDER_WAY if context.options.prepare_ahead else 1, N_POSTED if context.options.post_ahead else 0,
        deployment.hop_is_apart(previous, context.rank),
    )  # fmt: skip
    progress = progress_between(context.link.comm, deployment.host_names)
    StageLoop(context.link.comm, pipe, worker, report, ready_s, context.flow, progress).run()
    if model:
        model.close()
    context.close_vocabulary()
    return 0 if model else 2


def _make_worker(context: Context, deployment: Deployment, model: LoadedModel) -> StageWorker:
    drafts = list(deployment.plan.drafts_on(context.rank))
    if drafts:
        return make_draft_worker(context, deployment, drafts[0], model)
    return make_worker(context, deployment, model)
