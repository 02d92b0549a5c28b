"""A stage's rank from loading to the shutdown."""

from __future__ import annotations

import socket

from pipeinfer.cli.context import CLOCK, Context
from pipeinfer.cli.load import load_stage, make_courier, make_worker
from pipeinfer.cli.setup import Job
from pipeinfer.cluster.calibrate import time_rows
from pipeinfer.cluster.mpi import serve
from pipeinfer.cluster.wire import Kind
from pipeinfer.errors import UserError


def run_stage(context: Context, job: Job) -> int:
    """Load, serve one pipeline after another and send the figures of each home, until rank 0 ends the session.

    Returns the exit code.
    """
    start_s, model = CLOCK(), None
    try:
        model = load_stage(context, job, lambda fraction: True)
        context.link.report({"loaded_s": CLOCK() - start_s, "cost_s": time_rows(model, CLOCK) if model else {}})
    except UserError as error:
        context.link.report({"error": f"rank {context.rank} ({socket.gethostname()}): {error}"})
    ranks = [stage.rank for stage in job.plan.stages]
    index = ranks.index(context.rank)
    previous = ranks[index - 1] if index else 0
    following = ranks[index + 1] if index + 1 < len(ranks) else None
    courier = make_courier(context, job)
    ready_s = CLOCK()
    while True:
        worker = make_worker(context, job, model) if model else None
        served = serve(context.link.comm, worker, previous, following, job.n_rows_max, job.n_embd, ready_s, courier)
        if served.end is Kind.SHUTDOWN:
            break
        if model:
            model.clear()
        ready_s = CLOCK()  # rank 0 may begin the next request as soon as it has the report
        context.link.report(context.figures(worker, served.outbox, served.ledger))
    if model:
        model.close()
    return 0 if model else 2
