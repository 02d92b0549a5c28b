"""A stage's rank from loading to the shutdown."""

from __future__ import annotations

import socket

from pipeinfer.cli.context import CLOCK, Context
from pipeinfer.cli.load import load_stage
from pipeinfer.cli.setup import Job
from pipeinfer.cluster.mpi import serve
from pipeinfer.errors import UserError


def run_stage(context: Context, job: Job) -> int:
    """Load, serve until rank 0 ends the job, send the figures home. Returns the exit code."""
    start_s, worker = CLOCK(), None
    try:
        worker = load_stage(context, job, lambda fraction: True)
        context.link.report({"loaded_s": CLOCK() - start_s})
    except UserError as error:
        context.link.report({"error": f"rank {context.rank} ({socket.gethostname()}): {error}"})
    ranks = [stage.rank for stage in job.plan.stages]
    index = ranks.index(context.rank)
    previous = ranks[index - 1] if index else 0
    following = ranks[index + 1] if index + 1 < len(ranks) else None
    outbox = serve(context.link.comm, worker, previous, following, job.n_rows_max, job.n_embd)
    context.link.report(context.figures(worker, outbox))
    return 0 if worker else 2
