"""The rank of a stage, or of a larger draft, from loading to the shutdown."""

from __future__ import annotations

import socket

from pipeinfer.cli.context import CLOCK, Context
from pipeinfer.cli.load import (
    gpu_layers,
    load_drafts,
    load_stage,
    make_courier,
    make_draft_worker,
    make_worker,
    time_loaded,
)
from pipeinfer.cli.setup import Job
from pipeinfer.cluster.mpi import serve
from pipeinfer.cluster.pace import LoadedModel
from pipeinfer.cluster.stage import StageWorker
from pipeinfer.cluster.wire import Kind
from pipeinfer.errors import UserError


def run_stage(context: Context, job: Job) -> int:
    """Load, serve one pipeline after another and send the figures of each home, until rank 0 ends the session.

    Returns the exit code.
    """
    start_s = ready_s = CLOCK()
    model = None
    try:
        model, number = load_stage(context, job, lambda fraction: True), None
        drafts = load_drafts(context, job, lambda fraction: True)
        if drafts:
            ((number, model),) = drafts.items()
        loaded_s = CLOCK() - start_s
        cost_s = time_loaded(context, job, model, number) if model else {}
        ready_s = CLOCK()  # rank 0 may begin a request as soon as it has the report
        on_gpu = gpu_layers(context.options) != 0
        context.link.report({"loaded_s": loaded_s, "cost_s": cost_s, "on_gpu": on_gpu})
    except UserError as error:
        context.link.report({"error": f"rank {context.rank} ({socket.gethostname()}): {error}"})
    is_draft = context.rank in job.plan.drafts
    ranks = [context.rank] if is_draft else [stage.rank for stage in job.plan.stages]
    index = ranks.index(context.rank)
    previous = ranks[index - 1] if index else 0
    following = ranks[index + 1] if index + 1 < len(ranks) else None
    courier = make_courier(context, job)
    while True:
        worker = _make_worker(context, job, model) if model else None
        served = serve(context.link.comm, worker, previous, following, job.n_rows_max, job.n_embd, ready_s, courier)
        if served.end is Kind.SHUTDOWN:
            break
        if model:
            model.clear()
        ready_s = CLOCK()
        context.link.report(context.figures(worker, served.outbox, served.ledger))
    if model:
        model.close()
    return 0 if model else 2


def _make_worker(context: Context, job: Job, model: LoadedModel) -> StageWorker:
    if context.rank in job.plan.drafts:
        return make_draft_worker(context, job, job.plan.drafts.index(context.rank), model)
    return make_worker(context, job, model)
