"""Run a sweep in one MPI job: load each group's models once, measure its cases one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeinfer.cluster.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.complain import complain
from pipeinfer.job.context import forget_peak
from pipeinfer.job.conversation import Turn
from pipeinfer.job.deployment import Deployment
from pipeinfer.job.fetch import fetch_files
from pipeinfer.job.layer_times import with_layer_times
from pipeinfer.job.options import RunOptions
from pipeinfer.job.outcome import make_result
from pipeinfer.job.prepare import check_outputs
from pipeinfer.job.request import GenerationRequest
from pipeinfer.job.session import Generation, Session
from pipeinfer.job.start import Crew, start_job
from pipeinfer.job.sweep import Case, Group, Sweep, loads_of, plan_groups
from pipeinfer.job.worker import run_stage
from pipeinfer.observe.experiment import variant_text
from pipeinfer.observe.report import number, stderr_console
from pipeinfer.observe.results import Record, append_result, as_read, key_of, read_results, result_row
from pipeinfer.observe.summary import print_summary

WARM_UP_TOKENS = 16


def run_sweep(sweep: Sweep, warm_up: int, output: str, resume: bool) -> int:
    """`pipeinfer bench`, on every rank; returns the exit code."""
    return start_job(
        lambda crew: _run(crew, sweep, warm_up, output, resume), sweep, sweep.base.verbose, sweep.base.rank_timeout_s
    )


def _run(crew: Crew, sweep: Sweep, warm_up: int, output: str, resume: bool) -> int:
    link, groups, error = crew.link, list[Group](), ""
    # which splits fit, rank 0 finds out: where some are given nothing is timed
    hosts_of = [crew.hosts if sweep.splits else with_layer_times(crew, crew.hosts, each) for each, _ in loads_of(sweep)]
    if link.rank == 0:
        try:
            groups = _plan(sweep, hosts_of, resume)
        except UserError as caught:
            error = str(caught)
    loads = [(group.options, group.deployment) for group in groups]
    loads, error = link.broadcast((loads, error) if not link.rank else None)
    if error:
        if link.rank == 0:
            complain(error)
        return 2
    if link.rank:
        return _serve(crew, loads)
    return Bench(crew, groups, warm_up).run(output)


def _plan(sweep: Sweep, hosts_of: Sequence[Sequence[Host]], resume: bool) -> list[Group]:
    sweep = _fetched(sweep)
    check_outputs(sweep.base)
    groups = plan_groups(sweep, hosts_of)
    path = sweep.base.results
    if not resume or not path or not path.exists() or not path.stat().st_size:
        return groups
    known = {key_of(row) for row in read_results(path)}
    return [left for left in (group.without(known) for group in groups) if left.cases]


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


class Bench:
    """Rank 0's part of a sweep."""

    def __init__(self, crew: Crew, groups: list[Group], warm_up: int) -> None:
        self.crew, self.groups, self.warm_up = crew, groups, warm_up
        self.rows: list[Record] = []
        self.noticed: set[str] = set()
        self.console = stderr_console()
        # plain lines where there is no terminal to draw on
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip

    def run(self, output: str) -> int:
        """Measure and print the summary; also of what there is after an interruption. Returns the exit code."""
        n_left = sum(case.n_left for group in self.groups for case in group.cases)
        self.console.print(f"{n_left} generations to measure, {self.crew.link.size} ranks")
        flag, code = self.crew.flag, 0
        flag.orderly = True  # what was measured is kept
        with self.progress:
            self.task = self.progress.add_task("loading", total=n_left)
            for group in self.groups:
                go_on = not (flag.reason or code)
                self.crew.link.broadcast(go_on)
                if not go_on:
                    break
                code = self._measure_group(group)
        print_summary(self.rows, output)
        if flag.reason:
            complain(f"{flag.reason}; {self._kept()}")
        return code or flag.exit_code

    def _kept(self) -> str:
        """What an interruption leaves, and where."""
        if not self.rows:
            return "nothing had been measured"
        results = self.groups[0].options.results
        if results is None:
            return "the table has what was measured, and without --results FILE nothing else keeps it"
        return f"what was measured is in {results}, --resume goes on from it"

    def _measure_group(self, group: Group) -> int:
        forget_peak()
        context = self.crew.context(group.options, group.deployment)
        session = Session(context, group.deployment, lambda rank, loaded_s: None)
        try:
            session.open()
        except UserError as error:
            complain(str(error))
            return 2
        for warning in group.deployment.warnings:
            self._notice(warning, [warning])
        for case in [*[_warm_up(group.cases[0])] * self.warm_up, *group.cases]:
            self._measure(session, case)
        session.close()
        return 0

    def _measure(self, session: Session, case: Case) -> None:
        """One turn after another; each one's prompt needs the answers before it."""
        said: Sequence[int] = ()
        for turn in case.conversation.turns:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=_describe(case, turn))
            request = replace(case.request, prompt=case.conversation.prompt(said, turn))
            generation = self._generate(session, request, case.options)
            said = generation.request.tokens
            if case.repetition and not turn.measured and not self.crew.flag.reason:
                self._keep(session.deployment, case, turn, generation)

    def _generate(self, session: Session, request: GenerationRequest, options: RunOptions) -> Generation:
        return session.generate(request, options, options.policy.begin(), lambda tokens: None)

    def _keep(self, deployment: Deployment, case: Case, turn: Turn, generation: Generation) -> None:
        asked = case.asked(deployment, turn)
        measured = result_row(make_result("", generation, deployment, asked), asked)
        self.rows.append(row := as_read(measured))
        if case.options.results:
            try:
                append_result(case.options.results, measured)
            except UserError as error:  # a full disk: nothing more could be kept
                self.crew.flag.note(str(error), 2)
        self.progress.advance(self.task)
        if self.progress.disable:
            speed, accepted = number(row["predicted_per_second"]), number(row["acceptance_rate"])
            figures = f"{speed} tokens/s" + ("" if accepted == "-" else f", acceptance {accepted}")
            self.console.print(f"[{len(self.rows)}] {_describe(case, turn)}: {figures}", markup=False)
        name = _named(case, turn)
        self._notice(name, [f"{name}: {notice}" for notice in generation.metrics.notices])

    def _notice(self, name: str, lines: Sequence[str]) -> None:
        """What the user should know of a measurement, once of all its repetitions."""
        if lines and name not in self.noticed:
            self.noticed.add(name)
            for line in lines:
                complain(line)


def _warm_up(case: Case) -> Case:
    """A short generation like this case's first, that no row is kept of."""
    request = replace(case.request, n_predict=min(WARM_UP_TOKENS, case.request.n_predict))
    return replace(
        case, request=request, conversation=replace(case.conversation, turns=case.conversation.turns[:1]), repetition=0
    )


def _describe(case: Case, turn: Turn) -> str:
    about = f"repetition {case.repetition}" if case.repetition else "warm-up"
    again = ["again, for its answer"] if case.repetition and turn.measured else []
    return ", ".join([_named(case, turn), about, *again])


def _named(case: Case, turn: Turn) -> str:
    """A measurement, whichever of its repetitions."""
    options = case.options
    variant = variant_text(options.policy, options.cancel, options.partitions)
    return ", ".join(filter(None, (options.policy.name, variant, turn.name, f"n {case.request.n_predict}")))
