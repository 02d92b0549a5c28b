"""One MPI job from start to end, on every rank: connect, agree on a plan, do the rank's part, leave together."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeinfer.cluster.cores import Host, other_clocks, this_host
from pipeinfer.cluster.idle import sleep_on_time
from pipeinfer.cluster.launch import (
    check_size,
    end_job,
    is_first_here,
    n_ranks_here,
    rank_from_environment,
    size_from_environment,
)
from pipeinfer.cluster.numa import DISTRIBUTE, ISOLATE, is_distributed, isolated, unheeded, with_nodes
from pipeinfer.cluster.roster import check_alike, own_words, places
from pipeinfer.cluster.speed import Speed
from pipeinfer.cluster.transport import Link, abort
from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.segments import marking, short_of_room, sweep
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.errors import UserError
from pipeinfer.job.bus_error import report_bus_errors
from pipeinfer.job.complain import complain
from pipeinfer.job.context import CLOCK, Context
from pipeinfer.job.deployment import Deployment, DoesNotFit
from pipeinfer.job.fetch import fetch_models, find_models
from pipeinfer.job.found_hosts import with_own_gpus, with_times
from pipeinfer.job.host_speeds import known_speeds, order_matters
from pipeinfer.job.options import RunOptions
from pipeinfer.job.prepare import prepare
from pipeinfer.job.request import GenerationRequest
from pipeinfer.job.signals import on_signals
from pipeinfer.job.stop import StopFlag, Stopper
from pipeinfer.models.llama.ggml import load_library, spread_over_nodes
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.observe.trace import Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Crew:
    """All ranks of a job, as one of them sees them."""

    link: Link
    flag: StopFlag
    watch: Watch
    hosts: list[Host]

    def context(self, options: RunOptions, deployment: Deployment) -> Context:
        """What this rank needs for its part of a plan. Collective: clocks that may differ are compared."""
        self.watch.describe(deployment.plan.describe(self.link.rank))
        tracer = Tracer(CLOCK, on=options.trace is not None)
        offset_s = self.link.clock_offset_s(CLOCK, other_clocks(self.hosts))
        return Context(options, self.link, self.flag, tracer, self.watch.flow, offset_s)


def run_job(options: RunOptions) -> int:
    """`pipeinfer run`, on every rank; returns the exit code, the same on all of them when the input is at fault."""
    return start_job(lambda crew: run_prepared(crew, options, prepare, _run_head), options, options)


def start_job(part: Callable[[Crew], int], settings: object, options: RunOptions) -> int:
    """Join the other ranks, do this rank's part, leave with them. Returns the part's exit code.

    `settings`: a dataclass of all that was asked for, which must be the same on every rank; `options`: what it says of
    the ranks themselves. Raises UserError, on every rank and with MPI ended, when ranks do not fit together.
    """
    sleep_on_time()
    flag, end = StopFlag(), partial(end_job, abort=abort)
    watch = Watch(
        rank_from_environment(), size_from_environment(), end, lambda reason: stopper.on_request(reason),
        Limits.of(options.rank_timeout_s),
    )  # fmt: skip
    stopper = Stopper(flag, watch, end)
    on_signals(stopper.on_signal)
    watch.open()  # not before: it would take an end by a signal for a death
    if is_first_here():
        if line := short_of_room(n_ranks_here()):
            complain(line)
        threading.Thread(target=sweep, daemon=True).start()
    with marking():
        link = Link()
    on_signals(stopper.on_signal)  # anew: MPICH's UCX takes SIGHUP for a wish to see what it knows
    _meet(link, watch, settings)
    with watch:
        try:
            hosts = _places(link, options)
            if link.rank:
                _get_ready()
            with report_bus_errors(watch.fault):
                code = part(Crew(link, flag, watch, hosts))
        except Exception:
            if options.verbose:
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


def _places(link: Link, options: RunOptions) -> list[Host]:
    """Where every rank runs, with cores of its own where that is asked for: before any thread computes."""
    hosts = link.all_gather(with_nodes(this_host(socket.gethostname())))
    if options.numa and link.rank == 0:
        for line in unheeded(options.numa, hosts):
            complain(line)
    if options.numa == DISTRIBUTE and is_distributed(hosts, link.rank):
        spread_over_nodes()
    if options.numa == ISOLATE:
        hosts = isolated(hosts)
        os.sched_setaffinity(0, hosts[link.rank].cores)
    return hosts


def _get_ready() -> None:
    """What every other rank can do while rank 0 plans."""
    import pipeinfer.job.worker  # noqa: F401

    load_library()


def run_prepared(
    crew: Crew,
    options: RunOptions,
    prepare: Callable[[RunOptions, Sequence[Host]], tuple[Deployment, T] | None],
    run_head: Callable[[Context, Deployment, T], int],
) -> int:
    """Rank 0 fetches models, prepares and is the head, all others do as the deployment says. Returns the exit code; 0
    where there is nothing to deploy."""
    link = crew.link

    def paths() -> list[Path]:
        nonlocal options
        options = fetch_models(options)
        return [options.model, *options.drafts]

    hosts, error = find_models(link, crew.hosts, paths)
    if not error:
        hosts, error = with_own_gpus(crew, hosts, options)
    speeds: list[Speed] = []
    if not error:
        hosts = with_times(crew, hosts, options)
        speeds = known_speeds(link, hosts) if order_matters(options, hosts) else []
    prepared = None
    if link.rank == 0 and not error:
        prepared, error = _prepared(lambda: prepare(options, hosts))
    deployment, error = link.broadcast((prepared and prepared[0], error) if link.rank == 0 else None)
    if deployment is None:
        if link.rank == 0 and error:
            complain(error)
        return 2 if error else 0
    context = crew.context(options, deployment)
    if not prepared:
        from pipeinfer.job.worker import run_stage

        return run_stage(context, deployment)
    if speeds:
        from pipeinfer.job.first_host import advice  # simulates

        for line in advice(options, deployment, speeds):
            complain(line)
    return run_head(context, *prepared)


def _prepared(prepare: Callable[[], T]) -> tuple[T | None, str]:
    """What comes of it; else what is wrong. What does not fit is shown as planned."""
    try:
        return prepare(), ""
    except DoesNotFit as error:
        from pipeinfer.job.plan_table import show_ranks_of_plan
        from pipeinfer.observe.report import stderr_console

        show_ranks_of_plan(stderr_console(), error.deployment)
        return None, str(error)
    except UserError as error:
        return None, str(error)


def _run_head(context: Context, deployment: Deployment, asked: tuple[GenerationRequest, Tokenizer]) -> int:
    from pipeinfer.job.head import Head  # draws: only rank 0 pays for importing what it draws with

    return Head(context, deployment, *asked).run()
