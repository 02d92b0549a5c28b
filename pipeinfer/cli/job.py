"""One MPI job from start to end, on every rank: connect, agree on a plan, do the rank's part, leave together."""

from __future__ import annotations

import os
import socket
import traceback

from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.head import Head
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import Host, Job, prepare
from pipeinfer.cli.stop import StopFlag, handle_signals
from pipeinfer.cli.worker import run_stage
from pipeinfer.cluster.mpi import Link
from pipeinfer.cluster.watch import start_watch
from pipeinfer.errors import UserError
from pipeinfer.models.ggml import require_exact_kernels
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.trace import Tracer


def run_job(options: RunOptions) -> int:
    """Runs on every rank; returns the exit code, the same on all of them when the input is at fault."""
    if options.numerics == "exact":
        require_exact_kernels()  # before anything loads libllama
    link, flag = Link(), StopFlag()
    with start_watch(link.rank, link.size, link.broadcast, link.abort, lambda reason: flag.set(reason, 1)) as watch:
        handle_signals(flag, link.rank, watch.ask_stop)
        hosts = link.all_gather(Host(socket.gethostname(), len(os.sched_getaffinity(0))))
        job, tokenizer, error = _prepare(options, hosts) if link.rank == 0 else (None, None, "")
        job, error = link.broadcast((job, error) if link.rank == 0 else None)
        if job is None:
            if link.rank == 0:
                complain(error)
            code = 2
        else:
            watch.describe(job.plan.describe(link.rank))
            tracer = Tracer(CLOCK, on=options.trace is not None)
            offset_s = link.clock_offset_s(CLOCK)
            context = Context(options, link, flag, tracer, offset_s)
            try:
                code = Head(context, job, tokenizer).run() if tokenizer else run_stage(context, job)
            except Exception:
                if options.verbose:
                    traceback.print_exc()
                raise  # the watch says it in one line and ends the job
        link.finalize()
    return code


def _prepare(options: RunOptions, hosts: list[Host]) -> tuple[Job | None, Tokenizer | None, str]:
    try:
        job, tokenizer = prepare(options, hosts)
    except UserError as error:
        return None, None, str(error)
    return job, tokenizer, ""
