"""A sweep in one MPI job: what is loaded together is loaded once, one group after another. What is measured of a group,
and how, is not known here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.bench.sweep import Sweep, loads_of
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.launch.start import Crew, start_job
from pipeinfer.job.loading.worker import run_stage
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.placement.fetch import fetch_files
from pipeinfer.job.planning.prepared import get_ready
from pipeinfer.job.process.complain import complain
from pipeinfer.job.profiling.found_hosts import with_own_gpus, with_times
from pipeinfer.job.session.open_session import open_session
from pipeinfer.job.session.session import Session
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.table import Record, Table


class Loaded(Protocol):
    """What is measured on models that are loaded once; `options` and `deployment` say what to load, on every rank."""

    @property
    def options(self) -> RunOptions: ...

    @property
    def deployment(self) -> Deployment: ...


G = TypeVar("G", bound=Loaded)
Planner = Callable[[Sweep, Sequence[Sequence[Host]]], list[G]]


def start_sweep(settings: object, sweep: Sweep, plan: Planner[G], lead: Callable[[Crew, list[G]], int]) -> int:
    """A job, on every rank; returns the exit code. `settings`: must be alike on all. On rank 0 `plan` says what there
    is to measure on which hosts, or raises UserError, and `lead` measures it."""
    return start_job(lambda crew: _run(crew, sweep, plan, lead), settings, sweep.base)


def _run(crew: Crew, sweep: Sweep, plan: Planner[G], lead: Callable[[Crew, list[G]], int]) -> int:
    link, groups = crew.link, list[G]()
    if link.rank:
        get_ready()
    hosts = with_own_gpus(crew, crew.hosts, sweep.base)
    # which splits fit, rank 0 finds out: where some are given nothing is timed
    hosts_of = [hosts if sweep.splits else with_times(crew, hosts, each) for each, _ in loads_of(sweep)]

    def plan_all() -> list[tuple[RunOptions, Deployment]]:
        groups.extend(plan(_fetched(sweep), hosts_of))
        return [(group.options, group.deployment) for group in groups]

    loads = link.agree(plan_all)
    if not loads:
        if link.rank == 0:
            complain(f"nothing left to measure: {sweep.base.results} has it all")
        return 0
    return _serve(crew, loads) if link.rank else lead(crew, groups)


def _fetched(sweep: Sweep) -> Sweep:
    """With files in the place of names of models on the hub."""
    offline = sweep.base.offline
    pairs = [(fetch_files([model, *drafts], offline)) for model, drafts in sweep.pairs]
    return replace(
        sweep, base=replace(sweep.base, model=pairs[0][0]), pairs=tuple((pair[0], tuple(pair[1:])) for pair in pairs)
    )


def _serve(crew: Crew, loads: list[tuple[RunOptions, Deployment]]) -> int:
    """A stage's part: one group after another, as long as rank 0 says so."""
    code = 0
    for options, deployment in loads:
        if code or not crew.link.broadcast(None):
            break
        forget_peak()
        code = run_stage(crew.context(options, deployment), deployment)
    return code


class SweepHead(Generic[G]):
    """Rank 0's part. `table`: that of the rows which are measured."""

    def __init__(self, crew: Crew, groups: list[G], table: Table) -> None:
        self.crew, self.groups, self.table = crew, groups, table
        self.rows: list[Record] = []
        self.n_kept = 0  # of them in --results
        self.noticed: set[str] = set()
        self.console = stderr_console()
        # plain lines where there is no terminal to draw on
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def called(self) -> bool:
        """Whether there is something to do that is no run's: it ends the engine's waits."""
        return False

    def measure(self, session: Session, group: G) -> None:
        """All of a group, until the job shall stop."""
        raise NotImplementedError

    def run_all(self, about: str, n_steps: int, show: Callable[[Sequence[Record]], Any]) -> int:
        """Measure, and `show` the rows; also what there is after an interruption. Returns the exit code."""
        self.console.print(f"{about}, {self.crew.link.size} ranks")
        flag, code = self.crew.flag, 0
        flag.orderly = True  # what was measured is kept
        with self.progress:
            self.task = self.progress.add_task("loading", total=n_steps)
            for group in self.groups:
                go_on = not (flag.reason or code)
                self.crew.link.broadcast(go_on)
                if not go_on:
                    break
                code = self._measure_group(group)
        show(self.rows)
        if flag.reason:
            complain(f"{flag.reason}; {self._kept()}")
        return code or flag.exit_code

    def _kept(self) -> str:
        """What an interruption leaves, and where."""
        results = self.groups[0].options.results
        if not self.rows:
            return f"nothing {'more ' if results else ''}had been measured"
        if results is None:
            return "the table has what was measured, and without --results FILE nothing else keeps it"
        if not self.n_kept:
            return f"the table has what was measured, {results} has nothing of it"
        return f"what was measured is in {results}, --resume goes on from it"

    def _measure_group(self, group: G) -> int:
        forget_peak()
        context = self.crew.context(group.options, group.deployment)
        try:
            with open_session(
                context, group.deployment, self.called, say=lambda line: self.notice(line, [line])
            ) as session:
                self.measure(session, group)
        except JobError as error:  # what was measured before is shown
            complain(str(error))
            return 2
        return 0

    def keep(self, options: RunOptions, measured: Record) -> Record:
        """A row, as it is read."""
        self.rows.append(row := self.table.as_read(measured))
        if options.results:
            try:
                self.table.append(options.results, measured)
                self.n_kept += 1
            except UserError as error:  # a full disk: nothing more could be kept
                self.crew.flag.note(str(error), 2)
        return row

    def notice(self, name: str, lines: Sequence[str]) -> None:
        """What the user should know of a measurement, once of all its repetitions."""
        if lines and name not in self.noticed:
            self.noticed.add(name)
            for line in lines:
                complain(line)
