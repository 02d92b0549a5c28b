"""A benchmark in one MPI job: every combination, grouped by what is loaded together. Cases measure themselves."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeinfer.cluster.assignment import draft_widths, parse_split, stage_ranks
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.resources import forget_peak
from pipeinfer.core.policy import Policy
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch.start import Crew, start_job
from pipeinfer.job.loading.load import run_stage
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.options.text_sections import Loads
from pipeinfer.job.placement.capacity import EngineSettings, engine_settings
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import fetch_files
from pipeinfer.job.planning.prepare import check_outputs, find_hosts, get_ready, with_files
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.conversation import BenchPrompt
from pipeinfer.job.session.result import ExperimentSettings
from pipeinfer.job.session.session import Session, open_session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import Record
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.table import Table
from pipeinfer.policies import POLICIES, ablations_of

WARM_UP_TOKENS = 16
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists to combine. `base`: the options of all measurements. `warm_up`: generations before those that count.
    `output`: the format of the summary. `resume`: leave out what --results has."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[Policy, ...]
    splits: tuple[str, ...]
    prompts: tuple[BenchPrompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int = 0  # longest prompt in tokens; 0: as they are
    loads: Loads | None = None
    warm_up: int = 0
    output: str = "md"
    resume: bool = False


class Case(Protocol):
    """One measurement of a sweep. `repetition` 0: a warm-up."""

    def without(self: "C", plan: JobPlan, measured: Set[Key]) -> "C | None":
        """The part that is not in `measured`; None if there is none."""
        ...

    def warm_up(self: "C") -> "C":
        """A short case that begins like this one."""
        ...


C = TypeVar("C", bound=Case)


@dataclass(frozen=True, slots=True)
class Group(Generic[C]):
    """Cases that share loaded models."""

    plan: JobPlan
    cases: tuple[C, ...]

    def without(self, measured: Set[Key]) -> "Group[C]":
        """The group without what is in `measured`."""
        cases = [case.without(self.plan, measured) for case in self.cases]
        return replace(self, cases=tuple(case for case in cases if case))


MakeGroup = Callable[[RunOptions, Sequence[Policy], Sweep, Sequence[Host]], Group[C]]
"""Arguments: options, the policies measured with them, the sweep, the hosts."""


def check_ablations(sweep: Sweep) -> None:
    """Raises UserError if a part to switch off belongs to no policy of the sweep."""
    for name in sweep.ablations:
        if not any(name in ablations_of(type(policy)) for policy in sweep.policies):
            having = " or ".join(policy for policy, kind in POLICIES.items() if name in ablations_of(kind))
            raise UserError(
                f"--ablate {name} is about {having}, which --policy does not name; name it too, or leave {name} out"
            )


def loaded_together(sweep: Sweep) -> Iterator[tuple[RunOptions, tuple[Policy, ...]]]:
    """Options of what is loaded together, without the split, and the policies measured on it."""
    base, draft_split = sweep.base, sweep.base.placement.draft_split
    for model, drafts in sweep.pairs:
        cut = draft_split if len(drafts) == 1 + len(draft_split) else ()
        of_models = base.changed(target=model, drafts=drafts, draft_split=cut)
        for policies in _loaded_alike(sweep.policies):
            yield of_models.changed(policy=policies[0], also=policies[1:]), policies


def plan_groups(sweep: Sweep, hosts_of: Sequence[Sequence[Host]], group_of: MakeGroup[C]) -> list[Group[C]]:
    """Groups by model, then by policy. `hosts_of`: for each of `loaded_together`. Raises UserError for a wrong
    combination."""
    check_ablations(sweep)
    groups: list[Group[C]] = []
    unused, draft_split = set(sweep.splits), sweep.base.placement.draft_split
    most = max(len(drafts) for _, drafts in sweep.pairs)
    if all(len(drafts) != 1 + len(draft_split) for _, drafts in sweep.pairs):
        draft_widths(most, draft_split)
    for (options, policies), hosts in zip(loaded_together(sweep), hosts_of, strict=True):
        widths = draft_widths(len(options.models.drafts), options.placement.draft_split) if policies[0].drafts else ()
        n_stages = len(stage_ranks(len(hosts), widths))
        fitting = [split for split in sweep.splits if len(parse_split(split)) == n_stages]
        unused -= set(fitting)
        by_split = [options.changed(layer_split=split) for split in fitting] or [options]
        groups += [group_of(chosen, policies, sweep, hosts) for chosen in by_split]
    if unused:
        split = min(unused)
        raise UserError(
            f"--layer-split {split} has {len(parse_split(split))} parts, and no policy here has as many stages on "
            f"{len(hosts_of[0])} ranks; a draft takes one rank of them, or as many as --draft-split says"
        )
    return groups


def _loaded_alike(policies: Sequence[Policy]) -> Iterator[tuple[Policy, ...]]:
    """Neighbouring policies with a draft, or without one: that leaves the target one rank more."""
    together: tuple[Policy, ...] = ()
    for policy in policies:
        if together and policy.drafts != together[0].drafts:
            yield together
            together = ()
        together += (policy,)
    if together:
        yield together


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, whole or without a part, and the settings of the engine for it."""

    settings: ExperimentSettings
    engine: EngineSettings


def variants_of(
    options: RunOptions, policies: Sequence[Policy], ablations: Sequence[str], rewinds: bool
) -> list[Variant]:
    """Every policy, whole and without each part of `ablations` that it has. `rewinds`: as in `engine_settings`."""
    variants = (options.changed(**change) for policy in policies for change in _changes(policy, ablations))
    n = options.traffic.parallel
    return [Variant(ExperimentSettings.of(each), engine_settings(each.speculation, n, rewinds)) for each in variants]


def _changes(policy: Policy, ablations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Changed options: for the whole policy, then without each part of `ablations` that it has."""
    yield {"policy": policy}
    for name in (name for name in ablations if name in ablations_of(type(policy))):
        if getattr(policy, name, None) is False:
            continue  # the preset has it off
        yield {"policy": policy, name: False} if name in policy.uses else {"policy": replace(policy, **{name: False})}


def describe(settings: ExperimentSettings, repetition: int, *about: str) -> str:
    """A case as text. `repetition` 0: a warm-up."""
    number = f"repetition {repetition}" if repetition else "warm-up"
    return ", ".join(filter(None, (settings.policy.name, settings.variant, *about, number)))


# -- the job


def start_sweep(sweep: Sweep, table: Table, group_of: MakeGroup[C], head: "type[SweepHead[C]]") -> int:
    """Run a job, on every rank; returns the exit code. `table`: of --results; `head`: the part of rank 0."""
    placement, verbose = sweep.base.placement, sweep.base.output.verbose
    return start_job(lambda crew: _run(crew, sweep, table, group_of, head), sweep, placement, verbose)


def _run(crew: Crew, sweep: Sweep, table: Table, group_of: MakeGroup[C], head: "type[SweepHead[C]]") -> int:
    link, groups = crew.link, list[Group[C]]()
    if link.rank:
        get_ready()
    sweep = link.agree(lambda: _fetched(sweep, link.size))
    # rank 0 finds out which splits fit: if there are some, layers are not timed
    split = sweep.splits[0] if sweep.splits else None
    together = [each.changed(layer_split=split) for each, _ in loaded_together(sweep)]
    hosts_of = [
        find_hosts(crew, each) for each in link.agree(lambda: [with_files(each, link.size) for each in together])
    ]

    def plan_all() -> list[JobPlan]:
        check_outputs(sweep.base, table)
        measured = _measured(sweep, table)
        missing = [group.without(measured) for group in plan_groups(sweep, hosts_of, group_of)]
        groups.extend(group for group in missing if group.cases)
        return [group.plan for group in groups]

    plans = link.agree(plan_all)
    if not plans:
        if link.rank == 0:
            complain(f"nothing left to measure: {sweep.base.output.results} has it all")
        return 0
    if link.rank:
        return _serve(crew, plans, sweep.base.output.trace is not None)
    return head(crew, sweep, groups, table).run()


def _measured(sweep: Sweep, table: Table) -> set[Key]:
    """The measurements that --resume leaves out."""
    path = sweep.base.output.results
    if not sweep.resume or not path or not path.exists() or not path.stat().st_size:
        return set()
    return {table.key_of(row) for row in table.read(path)}


def _fetched(sweep: Sweep, n_ranks: int) -> Sweep:
    """The sweep with what --plan decides, and with files instead of names on the hub. Raises UserError."""
    base = with_plan(sweep.base, n_ranks)
    access = base.models.offline, base.models.hf_token
    pairs = [(fetch_files([model, *drafts], *access)) for model, drafts in sweep.pairs]
    return replace(
        sweep, base=base.changed(target=pairs[0][0]), pairs=tuple((pair[0], tuple(pair[1:])) for pair in pairs)
    )


def _serve(crew: Crew, plans: Sequence[JobPlan], traces: bool) -> int:
    """The part of a stage: one group after another until rank 0 ends the sweep."""
    code = 0
    for plan in plans:
        if not crew.link.broadcast(None):  # from rank 0, which has the errors of all ranks
            break
        forget_peak()
        code = run_stage(crew.context(plan, traces), plan)
    return code


class SweepHead(Generic[C]):
    """The part of rank 0. `table`: of the rows that it measures."""

    def __init__(self, crew: Crew, sweep: Sweep, groups: list[Group[C]], table: Table) -> None:
        self.crew, self.sweep, self.groups, self.table = crew, sweep, groups, table
        self.rows: list[Record] = []
        self.n_saved = 0  # rows in --results
        self.noticed: set[str] = set()
        self.console = stderr_console()
        # without a terminal each row is a line
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def run(self) -> int:
        """Measure everything. Returns the exit code."""
        raise NotImplementedError

    def measure_case(self, session: Session, case: C) -> None:
        """Measure and keep one case, unless the job stops."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Polled while the engine waits; True returns control to the caller."""
        return False

    def run_all(self, about: str, n_steps: int, show: Callable[[Sequence[Record], str], None]) -> int:
        """Measure, and `show` the rows, also after an interruption. Returns the exit code."""
        self.console.print(f"{about}, {self.crew.link.size} ranks")
        flag, code = self.crew.flag, 0
        flag.orderly = True  # rows are kept
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
            complain(f"{flag.reason}; {self._saved_text()}")
        return code or flag.exit_code

    def _saved_text(self) -> str:
        """What an interruption leaves, and where."""
        results = self.sweep.base.output.results
        if not self.rows:
            return f"nothing {'more ' if results else ''}had been measured"
        if results is None:
            return "the table has what was measured, and without --results FILE nothing else keeps it"
        if not self.n_saved:
            return f"the table has what was measured, {results} has nothing of it"
        return f"what was measured is in {results}, --resume goes on from it"

    def _measure_group(self, group: Group[C]) -> int:
        forget_peak()
        context = self.crew.context(group.plan, self.sweep.base.output.trace is not None)
        try:
            with open_session(
                context, group.plan, Tokenizer(group.plan.model.path), self.has_work,
                lambda line: self.notice(line, [line]), self.sweep.base.output.verbose,
            ) as session:  # fmt: skip
                self.measure(session, group)
        except JobError as error:  # earlier rows are shown
            complain(str(error))
            return 2
        return 0

    def measure(self, session: Session, group: Group[C]) -> None:
        for case in [*[group.cases[0].warm_up()] * self.sweep.warm_up, *group.cases]:
            if self.crew.flag.reason:
                return
            session.ranks.unlearn()  # no case gains by those before it
            self.measure_case(session, case)

    def keep(self, columns: Record) -> Record:
        """Save a row; returns it as it is read."""
        self.rows.append(row := self.table.as_read(columns))
        if results := self.sweep.base.output.results:
            try:
                self.table.append(results, columns)
                self.n_saved += 1
            except UserError as error:  # a full disk: no further row could be saved
                self.crew.flag.note(str(error), 2)
        return row

    def report(self, case: str, figures: str) -> None:
        """Print a line about the row that was kept last, if there is no progress bar."""
        if self.progress.disable:
            self.console.print(f"[{len(self.rows)}] {case}: {figures}", markup=False)

    def notice(self, name: str, lines: Sequence[str]) -> None:
        """Print lines once for each name."""
        if lines and name not in self.noticed:
            self.noticed.add(name)
            for line in lines:
                complain(line)

    def notice_case(self, case: str, notices: Sequence[str]) -> None:
        """Print notices about a case, once for all its repetitions."""
        name = case.rpartition(", ")[0]
        self.notice(name, [f"{name}: {notice}" for notice in notices])
