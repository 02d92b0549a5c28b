"""`pipeinfer bench`: measure the cases of a sweep in one MPI job and keep a row of each. Conversations are measured one
turn at a time, loads many requests at a time, from clients or as a Poisson process."""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeinfer import __version__
from pipeinfer.cluster.hosts.resources import forget_peak
from pipeinfer.errors import JobError, StopRequested, UserError
from pipeinfer.job.bench.sweep import (
    GenerationCase,
    Group,
    Key,
    LoadCase,
    Sweep,
    loaded_together,
    parts_off,
    plan_groups,
)
from pipeinfer.job.launch import Crew, start_job
from pipeinfer.job.loading.load import run_stage
from pipeinfer.job.options.options import with_plan
from pipeinfer.job.placement.checks import fetch_files
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.prepare import check_outputs, find_hosts, get_ready, with_files
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.bench_prompts import BenchTurn
from pipeinfer.job.session.ranks import MAX_RECORDS
from pipeinfer.job.session.result import RankUses, generation_result
from pipeinfer.job.session.session import Generation, Notices, OpenRequest, Output, Session, open_session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import LATENCIES, Record
from pipeinfer.observe.figures import load_figures, percentiles, stamp
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.summary import falls_behind, print_loads, print_summary
from pipeinfer.text import count_text, milliseconds, number
from pipeinfer.virtual.simulation import arrivals_s

USES = ("busy_s", "cancelled_s", "waiting_s", "idle_s", "late_s", "peak_rss_bytes")


def run_bench(sweep: Sweep) -> int:
    """On every rank; returns the exit code."""
    if sweep.loads:
        n_open = sweep.loads.parallel or 1
        sweep = replace(sweep, base=sweep.base.changed(parallel=n_open, n_expected=n_open))
    placement, verbose = sweep.base.placement, sweep.base.output.verbose
    return start_job(lambda crew: _run(crew, sweep), sweep, placement, verbose)


def _run(crew: Crew, sweep: Sweep) -> int:
    link, groups = crew.link, list[Group]()
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
        check_outputs(sweep.base, sweep.table)
        for policy in sweep.policies:
            if off := parts_off(policy, sweep.ablations):
                complain(f"--ablate {','.join(off)}: not measured of {policy.name}, which has that off already")
        measured = _measured(sweep)
        missing = [group.without(measured) for group in plan_groups(sweep, hosts_of)]
        groups.extend(group for group in missing if group.cases)
        return [group.plan for group in groups]

    plans = link.agree(plan_all)
    if not plans:
        if link.rank == 0:
            complain(f"nothing left to measure: {sweep.base.output.results} has it all")
        return 0
    if link.rank:
        return _serve(crew, plans, sweep.base.output.trace is not None)
    return Bench(crew, sweep, groups).run()


def _measured(sweep: Sweep) -> set[Key]:
    """The measurements that --resume leaves out."""
    path = sweep.base.output.results
    if not sweep.resume or not path or not os.path.exists(path) or not path.stat().st_size:
        return set()
    return {sweep.table.key_of(row) for row in sweep.table.read(path)}


def _fetched(sweep: Sweep, n_ranks: int) -> Sweep:
    """The sweep with what --plan decides, and with files instead of names on the hub. Raises UserError."""
    base = with_plan(sweep.base, n_ranks)
    access = base.models.offline, base.models.hf_token
    files = [fetch_files([model, *drafts], *access) for model, drafts in sweep.pairs]
    pairs = tuple((target, tuple(drafts)) for target, *drafts in files)
    return replace(sweep, base=base.changed(target=pairs[0][0]), pairs=pairs)


def _serve(crew: Crew, plans: Sequence[JobPlan], traces: bool) -> int:
    """The part of a stage: one group after another until rank 0 ends the sweep."""
    code = 0
    for plan in plans:
        if not crew.link.broadcast(None):  # from rank 0, which has the errors of all ranks
            break
        forget_peak()
        code = run_stage(crew.context(plan, traces), plan)
    return code


@dataclass(slots=True)
class Arrivals:
    """Requests of a load that have not begun, and when each is due. A client sends the next when it has its text."""

    case: LoadCase
    start_s: float
    n_begun: int = 0
    due_s: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        case, n = self.case, len(self.case.requests)
        seed = case.requests[0].sampling.seed
        at_s = [0.0] * min(case.concurrency, n) if case.concurrency else arrivals_s(n, case.rate, seed)
        self.due_s.extend(self.start_s + each_s for each_s in at_s)

    def ended(self, now_s: float) -> None:
        """A text is complete: its client, if there is one, sends its next request."""
        if self.case.concurrency and self.n_begun + len(self.due_s) < len(self.case.requests):
            self.due_s.append(now_s)

    def begin(self) -> float:
        """When the next request was due, which begins now."""
        self.n_begun += 1
        return self.due_s.popleft()

    def is_due(self, now_s: float) -> bool:
        return bool(self.due_s) and self.due_s[0] <= now_s


class Bench:
    """Rank 0's part. `arrivals`: of the load that is measured, if one is."""

    def __init__(self, crew: Crew, sweep: Sweep, groups: Sequence[Group]) -> None:
        self.crew, self.sweep, self.groups = crew, sweep, groups
        self.rows, self.n_saved = list[Record](), 0  # n_saved: rows in --results
        self.noticed: set[str] = set()
        self.arrivals: Arrivals | None = None
        self.console = stderr_console()
        bar = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        time_left = TextColumn("left:"), TimeRemainingColumn(elapsed_when_finished=False)
        # without a terminal each row is a line
        self.progress = Progress(*bar, *time_left, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("loading")

    def run(self) -> int:
        """Measure, and print the rows, also after an interruption. Returns the exit code."""
        flag, code, link = self.crew.flag, 0, self.crew.link
        cases = [case for group in self.groups for case in group.cases]
        n_requests = sum(case.n_requests for case in cases)
        loads = f"{count_text(len(cases), 'load')} to measure, {count_text(n_requests, 'request')}"
        about = loads if self.sweep.loads else f"{count_text(n_requests, 'generation')} to measure"
        self.console.print(f"{about}, {count_text(link.size, 'rank')}")
        flag.orderly = True  # rows are kept
        self.progress.update(self.task, total=n_requests)
        with self.progress:
            for group in self.groups:
                go_on = not (flag.reason or code)
                link.broadcast(go_on)
                if not go_on:
                    break
                code = self._measure_group(group)
        if self.rows:
            print_rows = print_loads if self.sweep.loads else print_summary
            print_rows(self.rows, self.sweep.output)
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

    def _measure_group(self, group: Group) -> int:
        forget_peak()
        context = self.crew.context(group.plan, self.sweep.base.output.trace is not None)
        tokenizer, verbose = Tokenizer(group.plan.model.path), self.sweep.base.output.verbose
        opened = open_session(
            context, group.plan, tokenizer, self.has_work, lambda line: self.notice(line, [line]), verbose
        )
        try:
            with opened as self.session:
                self.measure(self.session, group)
        except JobError as error:  # earlier rows are shown
            complain(str(error))
            return 2
        return 0

    def measure(self, session: Session, group: Group) -> None:
        for case in [*[group.cases[0].warm_up()] * self.sweep.warm_up, *group.cases]:
            if self.crew.flag.reason:
                return
            session.ranks.unlearn()  # no case gains by those before it
            session.ranks.configure(session.engine, case.variant.engine)
            if isinstance(case, LoadCase):
                self._measure_load(session, case)
            else:
                self._measure_turns(session, case)

    # -- conversations

    def _measure_turns(self, session: Session, case: GenerationCase) -> None:
        """One turn after another: the prompt of each has the answers before it."""
        tokens: Sequence[int] = ()
        policy = case.variant.settings.policy.fresh()
        for turn in case.conversation.turns:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=case.describe(turn))
            request = replace(case.request, prompt=case.conversation.prompt(tokens, turn), policy=policy)
            generation = session.generate(request)
            tokens = generation.request.tokens
            if case.repetition and not turn.measured and not self.crew.flag.reason:
                self._keep_turn(session.plan, case, turn, generation)

    def _keep_turn(self, plan: JobPlan, case: GenerationCase, turn: BenchTurn, generation: Generation) -> None:
        result, name = generation_result(generation, plan, case.columns(plan, turn)), case.describe(turn)
        row = self._keep(result.columns())
        self.progress.advance(self.task)
        accepted = number(row["acceptance_rate"])
        shown = "" if accepted == "-" else f", acceptance {accepted}"
        self._report(name, f"{number(row['predicted_per_second'])} tokens/s{shown}")
        self._notice_case(name, generation.metrics.notices)

    # -- loads

    def _measure_load(self, session: Session, case: LoadCase) -> None:
        name, policy = case.describe(), case.variant.settings.policy.fresh()
        self.progress.update(self.task, description=name)
        case = replace(case, requests=tuple(replace(request, policy=policy) for request in case.requests))
        session.engine.forget()  # cached tokens of the load before would spare this one some prompts
        session.ranks.take_figures()
        session.notices = Notices(lambda notice: self._notice_case(name, [notice]), session.context.clock)
        try:
            figures = self._carry(session, case)
        except StopRequested:
            session.stop_all()
            return
        finally:
            self.arrivals = None
        if case.repetition:
            self._keep_load(session.plan, case, figures)

    def _keep_load(self, plan: JobPlan, case: LoadCase, figures: Record) -> None:
        row = self._keep(case.columns(plan) | figures)
        speed = f"{number(row['predicted_per_second'])} tokens/s"
        ttft, itl = milliseconds(row["ttft_p50_s"]), milliseconds(row["itl_p50_s"])
        served, offered = number(row["served_per_second"]), number(row["offered_per_second"])
        behind = f"; {served} requests/s answered of {offered} that came" if falls_behind(row) else ""
        self._report(case.describe(), f"{speed}, TTFT p50 {ttft}, ITL p50 {itl}{behind}")

    def _carry(self, session: Session, case: LoadCase) -> Record:
        """Complete all requests of the load. Returns the measured columns."""
        opened, outputs, open_max = list[OpenRequest](), deque[Output](), 0
        self.arrivals = arrivals = Arrivals(case, session.context.clock())
        uses: RankUses | None = None
        while arrivals.due_s or session.engine.busy:
            while self.has_work():
                opened.append(session.begin(case.requests[arrivals.n_begun], outputs.extend))
                opened[-1].metrics.submitted_s = arrivals.begin()  # it may have waited for room
                open_max = max(open_max, session.n_open)
            session.engine.step()
            while outputs:
                output = outputs.popleft()
                uses = uses or RankUses(session.plan, output.opened.metrics.token_s[0])
                if output.ended:
                    arrivals.ended(output.opened.metrics.token_s[-1])
                    self.progress.advance(self.task, int(case.repetition > 0))
            if uses and session.ranks.n_records >= MAX_RECORDS:
                uses.note(session.ranks.take_figures(), session.context.clock())
        assert uses, "a load without tokens"
        metrics = [each.metrics for each in opened]
        uses.note(session.ranks.take_figures(), max(each.token_s[-1] for each in metrics))
        if notice := uses.missed_pace:
            session.notices.hear(notice)
        return _figures(session.plan, metrics, uses, has_rate=not case.concurrency) | {"open_max": open_max}

    def has_work(self) -> bool:
        """Whether a request is due for which there is room. Polled in every wait, which True ends."""
        arrivals = self.arrivals
        if arrivals is None or not arrivals.is_due(self.session.context.clock()):
            return False
        return self.session.has_room(arrivals.case.requests[arrivals.n_begun])

    # -- rows

    def _keep(self, columns: Record) -> Record:
        """Save a row; returns it as it is read back from the table."""
        self.rows.append(row := self.sweep.table.as_read(columns))
        if results := self.sweep.base.output.results:
            try:
                self.sweep.table.append(results, columns)
                self.n_saved += 1
            except UserError as error:  # a full disk: no further row could be saved
                self.crew.flag.note(str(error), 2)
        return row

    def _report(self, case: str, figures: str) -> None:
        """Print a line about the row that was kept last, if there is no progress bar."""
        if self.progress.disable:
            self.console.print(f"[{len(self.rows)}] {case}: {figures}", markup=False)

    def notice(self, name: str, lines: Sequence[str]) -> None:
        """Print lines once for each name."""
        if lines and name not in self.noticed:
            self.noticed.add(name)
            for line in lines:
                complain(line)

    def _notice_case(self, case: str, notices: Sequence[str]) -> None:
        """Print notices about a case, once for all its repetitions."""
        name = case.rpartition(", ")[0]
        self.notice(name, [f"{name}: {notice}" for notice in notices])


def _figures(plan: JobPlan, metrics: Sequence[RequestMetrics], uses: RankUses, has_rate: bool) -> Record:
    throughput, figures = load_figures(metrics, has_rate)
    times, ranks = {name: getattr(throughput, f"{name}_s") for name in LATENCIES}, uses.ranks()
    spread = {name: percentiles(values, range(101)) if values else [] for name, values in times.items()}
    return figures | {
        **{f"{name}_percentiles_s": values for name, values in spread.items()},
        "busy": [uses.uses[stage.rank].work_share for stage in plan.assignment.stages],
        **{name: [rank[name] for rank in ranks] for name in USES},
        "version": __version__,
        **stamp(ranks),
    }
