"""A sweep in one MPI job: groups of cases, each loaded once. Measures nothing itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeinfer.errors import JobError, UserError
from pipeinfer.job.bench.sweep import Group, Key, M, MakeGroup, Sweep, loaded_together, plan_groups
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.launch.start import Crew, start_job
from pipeinfer.job.loading.worker import run_stage
from pipeinfer.job.options.options import with_plan
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import fetch_files
from pipeinfer.job.planning.prepare import check_outputs
from pipeinfer.job.planning.prepared import get_ready
from pipeinfer.job.process.complain import complain
from pipeinfer.job.profiling.hosts import find_hosts
from pipeinfer.job.session.open_session import open_session
from pipeinfer.job.session.session import Session
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.table import Record, Table

WARM_UP_TOKENS = 16


def start_sweep(sweep: Sweep, table: Table, group_of: MakeGroup[M], head: "type[SweepHead[M]]") -> int:
    """A job, on every rank; returns the exit code. `table`: where --results are; `head`: rank 0's part."""
    return start_job(lambda crew: _run(crew, sweep, table, group_of, head), sweep, sweep.base, sweep.base.verbose)


def _run(crew: Crew, sweep: Sweep, table: Table, group_of: MakeGroup[M], head: "type[SweepHead[M]]") -> int:
    link, groups = crew.link, list[Group[M]]()
    if link.rank:
        get_ready()
    sweep = link.agree(lambda: _fetched(sweep, link.size))
    # rank 0 finds out which splits fit: where some are given nothing is timed
    split = sweep.splits[0] if sweep.splits else None
    hosts_of = [find_hosts(crew, replace(each, layer_split=split))[1] for each, _ in loaded_together(sweep)]

    def plan_all() -> list[JobPlan]:
        check_outputs(sweep.base, table)
        known = _known(sweep, table)
        groups.extend(left for group in plan_groups(sweep, hosts_of, group_of) if (left := group.without(known)).cases)
        return [group.plan for group in groups]

    plans = link.agree(plan_all)
    if not plans:
        if link.rank == 0:
            complain(f"nothing left to measure: {sweep.base.results} has it all")
        return 0
    return _serve(crew, plans, sweep.base.trace is not None) if link.rank else head(crew, sweep, groups, table).run()


def _known(sweep: Sweep, table: Table) -> set[Key]:
    """What was measured before, where --resume leaves it out."""
    path = sweep.base.results
    if not sweep.resume or not path or not path.exists() or not path.stat().st_size:
        return set()
    return {table.key_of(row) for row in table.read(path)}


def _fetched(sweep: Sweep, n_ranks: int) -> Sweep:
    """With what --plan decides, and with files in the place of names of models on the hub. Raises UserError."""
    offline = sweep.base.offline
    base = with_plan(sweep.base, n_ranks)
    pairs = [(fetch_files([model, *drafts], offline)) for model, drafts in sweep.pairs]
    return replace(
        sweep, base=replace(base, model=pairs[0][0]), pairs=tuple((pair[0], tuple(pair[1:])) for pair in pairs)
    )


def _serve(crew: Crew, plans: Sequence[JobPlan], traces: bool) -> int:
    """A stage's part: one group after another, as long as rank 0 says so."""
    code = 0
    for plan in plans:
        if not crew.link.broadcast(None):  # rank 0 has every rank's errors, and every rank must hear it
            break
        forget_peak()
        code = run_stage(crew.context(plan, traces), plan)
    return code


class SweepHead(Generic[M]):
    """Rank 0's part. `table`: that of the rows which are measured."""

    def __init__(self, crew: Crew, sweep: Sweep, groups: list[Group[M]], table: Table) -> None:
        self.crew, self.sweep, self.groups, self.table = crew, sweep, groups, table
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

    def run(self) -> int:
        """Measure everything. Returns the exit code."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Polled while the engine waits; True returns control to the caller."""
        return False

    def measure(self, session: Session, group: Group[M]) -> None:
        """All of a group, until the job shall stop."""
        raise NotImplementedError

    def run_all(self, about: str, n_steps: int, show: Callable[[Sequence[Record], str], None]) -> int:
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
        if self.rows:
            show(self.rows, self.sweep.output)
        if flag.reason:
            complain(f"{flag.reason}; {self._kept()}")
        return code or flag.exit_code

    def _kept(self) -> str:
        """What an interruption leaves, and where."""
        results = self.sweep.base.results
        if not self.rows:
            return f"nothing {'more ' if results else ''}had been measured"
        if results is None:
            return "the table has what was measured, and without --results FILE nothing else keeps it"
        if not self.n_kept:
            return f"the table has what was measured, {results} has nothing of it"
        return f"what was measured is in {results}, --resume goes on from it"

    def _measure_group(self, group: Group[M]) -> int:
        forget_peak()
        context = self.crew.context(group.plan, self.sweep.base.trace is not None)
        try:
            with open_session(
                context, group.plan, self.has_work, lambda line: self.notice(line, [line]), self.sweep.base.verbose
            ) as session:
                self.measure(session, group)
        except JobError as error:  # what was measured before is shown
            complain(str(error))
            return 2
        return 0

    def keep(self, measured: Record) -> Record:
        """A row, as it is read."""
        self.rows.append(row := self.table.as_read(measured))
        if results := self.sweep.base.results:
            try:
                self.table.append(results, measured)
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
