"""One MPI job from start to end, on every rank: connect, do the rank's part, leave together; a rank's state and its
reports. Makes no plan and knows no command."""

import math
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeinfer.child import python_command
from pipeinfer.cluster.hosts.host import Host, other_clocks, this_host
from pipeinfer.cluster.hosts.launch import (
    check_size,
    end_job,
    is_first_here,
    n_ranks_here,
    rank_from_environment,
    size_from_environment,
)
from pipeinfer.cluster.hosts.resources import EnergyMeter, count_open_files, peak_resident_bytes, resident_bytes
from pipeinfer.cluster.hosts.roster import check_alike, clock_offset_s, own_info
from pipeinfer.cluster.idle import sleep_on_time
from pipeinfer.cluster.stages.cell_store import CellStore
from pipeinfer.cluster.stages.pace import JobClock, PacedStage
from pipeinfer.cluster.stages.stage import StageStats, StageWorker
from pipeinfer.cluster.transport import Link, Outbox, abort
from pipeinfer.cluster.watch.protocol import Flow, Limits
from pipeinfer.cluster.watch.rendezvous import Location
from pipeinfer.cluster.watch.shared_memory import marking, sweep
from pipeinfer.cluster.watch.watch import Watch
from pipeinfer.core.interfaces import Blocks
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.doctor.findings import Severity
from pipeinfer.job.doctor.host_checks import check_this_host
from pipeinfer.job.options.sections import PlacementOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.signals import on_signals
from pipeinfer.job.process.stdin import take_input
from pipeinfer.job.process.stop import StopFlag, Stopper, report_bus_errors
from pipeinfer.job.process.streams import complain
from pipeinfer.job.process.supervised import end_attempts, own_attempt, tell_exit
from pipeinfer.models.llama.ggml import report_aborts, use_nodes
from pipeinfer.models.text.tokenizer import VocabularyFile
from pipeinfer.observe.trace import StageLedger, Tracer, pack_spans

CLOCK: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Context:
    """`link`: to the other ranks. `flow`: progress of this rank's stage, for the watch. `clock`: of the job's times.
    `clock_offset_s`: to rank 0's clock. `paced`: this rank's models in a paced job. `vocabulary`: the target's, on the
    ranks of its last layers and of the smallest draft. `blocks`, `store`: the cells of this rank's stage
    on disk or in memory, and what keeps them there."""

    link: Link
    flag: StopFlag
    tracer: Tracer
    flow: Flow
    clock: JobClock = field(default_factory=JobClock)
    clock_offset_s: float = 0.0
    meter: EnergyMeter = field(default_factory=EnergyMeter)
    paced: list[PacedStage] = field(default_factory=list)
    vocabulary: VocabularyFile | None = None
    blocks: Blocks | None = None
    store: CellStore | None = None

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def name(self) -> str:
        """In messages."""
        return f"rank {self.rank} ({socket.gethostname()})"

    def close(self) -> None:
        """Close the store and the vocabulary; to be called before the models are closed."""
        for each in (self.store, self.vocabulary):
            if each:
                each.close()
        self.store = self.vocabulary = None

    def take_figures(self, worker: StageWorker | None, outbox: Outbox, ledger: StageLedger | None) -> dict[str, Any]:
        """This rank's report since the last one, as plain data; times on rank 0's clock."""
        stats = StageStats()
        if worker:
            stats, worker.stats = worker.stats, stats
        spans, self.tracer.spans = self.tracer.spans, []
        n_messages, n_bytes, n_out_of_band = outbox.take_counts()
        return {
            "runs_skipped": stats.n_skipped,
            "runs_stopped": stats.n_stopped,
            "runs_left_to_samplers": stats.n_for_samplers,
            "layers_saved": stats.n_layers_saved,
            "late_s": sum(stage.take_late_s() for stage in self.paced),
            "joules": math.nan if self.clock.dilation > 1 else self.meter.take_joules(),
            "rss_bytes": resident_bytes(),
            "peak_rss_bytes": peak_resident_bytes(),
            "open_files": count_open_files(),
            "n_messages": n_messages,
            "n_bytes": n_bytes,
            "n_out_of_band": n_out_of_band,
            "runs": ledger.moved(self.clock_offset_s) if ledger else [],
            "spans": pack_spans(spans, self.clock_offset_s),
        }


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of a job: this rank's link and watch, and every rank's host."""

    link: Link
    flag: StopFlag
    watch: Watch
    hosts: list[Host]

    def context(self, plan: JobPlan, traces: bool) -> Context:
        """The context of this rank for a plan. Collective: clocks that may differ are compared."""
        rank, size = self.link.rank, self.link.size
        self.watch.describe(plan.describe(rank), () if rank else [*map(plan.describe, range(size))])
        clock = JobClock(plan.dilation)
        offset_s = clock_offset_s(self.link, clock, other_clocks(self.hosts))
        return Context(self.link, self.flag, Tracer(clock, on=traces), self.watch.flow, clock, offset_s)


def start_job(part: Callable[[Crew], int], settings: object, placement: PlacementOptions, verbose: bool = False) -> int:
    """Join the other ranks, do this rank's part, leave with them. Returns the part's exit code; 2 after a JobError,
    which rank 0 prints. `settings`: a dataclass of the command's options, which must be the same on every rank;
    `placement`: those about ranks; `verbose`: print a traceback of a failure. Raises UserError, on every rank and with
    MPI ended, when ranks do not fit together."""
    sleep_on_time()
    flag, end = StopFlag(), partial(end_job, abort=abort)
    limits, resumed_from = Limits.of(placement.rank_timeout_s), getattr(settings, "resume_file", None)
    inquiry = python_command("from pipeinfer.job.doctor.absent import main; main()")
    watch = Watch(rank_from_environment(), size_from_environment(), end, limits, resumed_from, inquiry)
    stopper = Stopper(flag, watch, end)
    on_signals(stopper.on_signal)
    watch.open(stopper.on_request)  # not before: it would take an end by a signal for a death
    report_aborts(watch.fault)
    if rank_from_environment() == 0:
        try:
            take_input()
        except UserError:
            watch.close()  # it is no death
            raise
    if is_first_here():
        if attempt := own_attempt():
            end_attempts(attempt.job, attempt.number)
        for finding in check_this_host(n_ranks_here()):
            line = str(finding)
            if finding.level is Severity.ERROR and size_from_environment() == 1:
                watch.close()
                raise UserError(line)
            if finding.level is Severity.ERROR:
                watch.fault(line)
            complain(f"host {finding.host}: {line}")
        threading.Thread(target=sweep, daemon=True).start()
    with marking():
        link = Link()
    on_signals(stopper.on_signal)  # again: MPICH's UCX takes SIGHUP for a request to print its state
    _join(link, watch, settings)
    with watch:
        try:
            if placement.numa:
                use_nodes(placement.numa)
            hosts = link.all_gather(this_host(socket.gethostname()))
            with report_bus_errors(watch.fault):
                code = part(Crew(link, flag, watch, hosts))
        except JobError as error:
            if link.rank == 0:
                complain(str(error))
            code = 2
        except Exception:
            if verbose:
                traceback.print_exc()
            raise  # the watch prints one line and ends the job
        if link.rank == 0:
            tell_exit(flag.exit_code or code)
        link.finalize()
    return flag.exit_code or code


def _join(link: Link, watch: Watch, settings: object) -> None:
    try:
        check_size(link.size)
        infos = link.all_gather(own_info(settings))
        check_alike(infos)
    except UserError:
        link.finalize()
        watch.close()
        raise
    watch.join([Location(host, where) for _, host, where, _ in infos], link.broadcast)
