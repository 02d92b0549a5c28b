"""One MPI job from start to end, on every rank: connect, do the rank's part, leave together. Knows no plan."""

import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pipeinfer.cluster.hosts.cores import Host, other_clocks, this_host
from pipeinfer.cluster.hosts.launch import (
    check_size,
    end_job,
    is_first_here,
    n_ranks_here,
    rank_from_environment,
    size_from_environment,
)
from pipeinfer.cluster.hosts.roster import check_alike, own_info
from pipeinfer.cluster.idle import sleep_on_time
from pipeinfer.cluster.timing.link_times import clock_offset_s
from pipeinfer.cluster.transport import Link, abort
from pipeinfer.cluster.watch.attempts import end_attempts, own_attempt
from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.rendezvous import Place
from pipeinfer.cluster.watch.segments import marking, short_of_room, sweep
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.options.sections import Placement
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.bus_error import report_bus_errors
from pipeinfer.job.process.complain import complain
from pipeinfer.job.process.signals import on_signals
from pipeinfer.job.process.stop import StopFlag, Stopper
from pipeinfer.models.llama.ggml import use_nodes
from pipeinfer.observe.trace import Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of a job: this rank's link and watch, and every rank's host."""

    link: Link
    flag: StopFlag
    watch: Watch
    hosts: list[Host]

    def context(self, plan: JobPlan, traces: bool) -> Context:
        """The context of this rank for a plan. Collective: clocks that may differ are compared."""
        self.watch.describe(plan.assignment.describe(self.link.rank))
        tracer = Tracer(CLOCK, on=traces)
        offset_s = clock_offset_s(self.link, CLOCK, other_clocks(self.hosts))
        return Context(self.link, self.flag, tracer, self.watch.flow, offset_s)


def start_job(part: Callable[[Crew], int], settings: object, ranks: Placement, verbose: bool = False) -> int:
    """Join the other ranks, do this rank's part, leave with them. Returns the part's exit code; 2 after a
    JobError, which rank 0 prints.

    `settings`: a dataclass of all that was asked for, which must be the same on every rank; `ranks`: what it says of
    the ranks themselves; `verbose`: a traceback is printed when something fails. Raises UserError, on every rank and
    with MPI ended, when ranks do not fit together.
    """
    sleep_on_time()
    flag, end = StopFlag(), partial(end_job, abort=abort)
    watch = Watch(
        rank_from_environment(), size_from_environment(), end, lambda reason: stopper.on_request(reason),
        Limits.of(ranks.rank_timeout_s), getattr(settings, "goes_on_from", None),
    )  # fmt: skip
    stopper = Stopper(flag, watch, end)
    on_signals(stopper.on_signal)
    watch.open()  # not before: it would take an end by a signal for a death
    if is_first_here():
        if attempt := own_attempt():
            end_attempts(attempt.job, attempt.number)
        if line := short_of_room(n_ranks_here()):
            complain(line)
        threading.Thread(target=sweep, daemon=True).start()
    with marking():
        link = Link()
    on_signals(stopper.on_signal)  # anew: MPICH's UCX takes SIGHUP for a wish to see what it knows
    _meet(link, watch, settings)
    with watch:
        try:
            hosts = _places(link, ranks.numa)
            with report_bus_errors(watch.fault):
                code = part(Crew(link, flag, watch, hosts))
        except JobError as error:
            if link.rank == 0:
                complain(str(error))
            code = 2
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
        infos = link.all_gather(own_info(settings))
        check_alike(infos)
    except UserError:
        link.finalize()
        watch.close()
        raise
    watch.join([Place(host, where) for _, host, where, _ in infos], link.broadcast)


def _places(link: Link, numa: str | None) -> list[Host]:
    """Where every rank runs."""
    if numa:
        use_nodes(numa)
    return link.all_gather(this_host(socket.gethostname()))
