"""One MPI job from start to end, on every rank: connect, agree on a plan, do the rank's part, leave together."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pipeinfer.cli.bus_error import report_bus_errors
from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import Job, prepare
from pipeinfer.cli.signals import on_signals
from pipeinfer.cli.stop import StopFlag, Stopper
from pipeinfer.cluster.cores import Host, this_host
from pipeinfer.cluster.launch import check_size, end_job, is_first_here, rank_from_environment, size_from_environment
from pipeinfer.cluster.mpi import Link, abort
from pipeinfer.cluster.roster import check_alike, own_words, places
from pipeinfer.cluster.segments import marking, sweep
from pipeinfer.cluster.watch import Watch
from pipeinfer.errors import UserError
from pipeinfer.models.ggml import load_library
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.trace import Tracer


@dataclass(frozen=True, slots=True)
class Crew:
    """All ranks of a job, as one of them sees them."""

    link: Link
    flag: StopFlag
    watch: Watch
    hosts: list[Host]

    def context(self, options: RunOptions, job: Job) -> Context:
        """What this rank needs for its part of a plan. Collective: the clocks are compared."""
        self.watch.describe(job.plan.describe(self.link.rank))
        tracer = Tracer(CLOCK, on=options.trace is not None)
        return Context(options, self.link, self.flag, tracer, self.link.clock_offset_s(CLOCK))


def run_job(options: RunOptions) -> int:
    """`pipeinfer run`, on every rank; returns the exit code, the same on all of them when the input is at fault."""
    return start_job(lambda crew: _run(crew, options), options, options.verbose)


def start_job(part: Callable[[Crew], int], settings: object, verbose: bool) -> int:
    """Join the other ranks, do this rank's part, leave with them. Returns the part's exit code.

    `settings`: a dataclass of all that was asked for, which must be the same on every rank. Raises UserError, on every
    rank and with MPI ended, when ranks do not fit together.
    """
    flag, end = StopFlag(), partial(end_job, abort=abort)
    watch = Watch(rank_from_environment(), size_from_environment(), end, lambda reason: stopper.on_request(reason))
    stopper = Stopper(flag, watch, end)
    on_signals(stopper.on_signal)
    if is_first_here():
        threading.Thread(target=sweep, daemon=True).start()
    with marking():
        link = Link()
    _meet(link, watch, settings)
    with watch:
        try:
            hosts = link.all_gather(this_host(socket.gethostname()))
            if link.rank:
                _get_ready()
            with report_bus_errors(watch.fault):
                code = part(Crew(link, flag, watch, hosts))
        except Exception:
            if verbose:
                traceback.print_exc()
            raise  # the watch says it in one line and ends the job
        link.finalize()
    return flag.exit_code or code


def _meet(link: Link, watch: Watch, settings: object) -> None:
    """Join the watch, if the ranks fit together."""
    try:
        check_size(link.size)
        all_words = link.all_gather(own_words(settings))
        check_alike(all_words)
    except UserError:
        link.finalize()
        watch.close()
        raise
    watch.join(places(all_words), link.broadcast)


def _get_ready() -> None:
    """What every other rank can do while rank 0 plans."""
    import pipeinfer.cli.worker  # noqa: F401

    load_library()


def _run(crew: Crew, options: RunOptions) -> int:
    link = crew.link
    job, tokenizer, error = _prepare(options, crew.hosts) if link.rank == 0 else (None, None, "")
    job, error = link.broadcast((job, error) if link.rank == 0 else None)
    if job is None:
        if link.rank == 0:
            complain(error)
        return 2
    context = crew.context(options, job)
    if not tokenizer:
        from pipeinfer.cli.worker import run_stage

        return run_stage(context, job)
    from pipeinfer.cli.head import Head  # draws: only rank 0 pays for importing what it draws with

    return Head(context, job, tokenizer).run()


def _prepare(options: RunOptions, hosts: list[Host]) -> tuple[Job | None, Tokenizer | None, str]:
    try:
        job, tokenizer = prepare(options, hosts)
    except UserError as error:
        return None, None, str(error)
    return job, tokenizer, ""
