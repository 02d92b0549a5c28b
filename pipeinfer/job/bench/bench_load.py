"""Measure loads: many requests at a time on the loaded models, as clients ask or as they come at random."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import StopRequested
from pipeinfer.job.bench.load_sweep import LoadCase, LoadGroup, LoadSweep, load_group
from pipeinfer.job.bench.sweep import Sweep, plan_groups
from pipeinfer.job.bench.sweep_job import SweepHead, start_sweep
from pipeinfer.job.launch.context import CLOCK
from pipeinfer.job.launch.start import Crew
from pipeinfer.job.options.loads import Loads
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.planning.prepare import check_outputs, inputs_of
from pipeinfer.job.session.open_requests import News, Open, OpenRequests
from pipeinfer.job.session.rank_uses import RankUses
from pipeinfer.job.session.session import N_NOTED, Session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.experiment import variant_text
from pipeinfer.observe.load_columns import LATENCIES, LOADS
from pipeinfer.observe.loads import come_text, falls_behind, print_loads
from pipeinfer.observe.metrics import percentiles
from pipeinfer.observe.report import milliseconds, number
from pipeinfer.observe.table import Record
from pipeinfer.observe.throughput import NOT_OFFERED, Throughput, offered_and_served
from pipeinfer.outputs import check_separate

WARM_UP_TOKENS = 16
USES = ("busy_s", "cancelled_s", "waiting_s", "idle_s", "peak_rss_bytes")


def run_loads(sweep: Sweep, loads: Loads, warm_up: int, output: str, resume: bool) -> int:
    """`pipeinfer bench --concurrency` and `--rate`, on every rank; returns the exit code."""
    sweep = replace(sweep, base=replace(sweep.base, parallel=loads.parallel or 1))

    def plan(sweep: Sweep, hosts_of: Sequence[Sequence[Host]]) -> list[LoadGroup]:
        return _plan(sweep, loads, hosts_of, resume)

    return start_sweep(
        LoadSweep(sweep, loads), sweep, plan, lambda crew, groups: LoadBench(crew, groups, warm_up).run(output)
    )


def _plan(sweep: Sweep, loads: Loads, hosts_of: Sequence[Sequence[Host]], resume: bool) -> list[LoadGroup]:
    path = sweep.base.results
    check_outputs(replace(sweep.base, results=None))
    check_separate({"--results": path}, inputs_of(sweep.base))
    if path:
        LOADS.check(path)

    def group_of(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> LoadGroup:
        return load_group(options, policies, sweep, hosts, loads)

    groups = plan_groups(sweep, hosts_of, group_of)
    if not resume or not path or not path.exists() or not path.stat().st_size:
        return groups
    known = {LOADS.key_of(row) for row in LOADS.read(path)}
    return [left for left in (group.without(known) for group in groups) if left.cases]


@dataclass(slots=True)
class Coming:
    """Requests of a load that have not begun, and when each comes; the next one of a client once it has its text."""

    case: LoadCase
    start_s: float
    number: int = 0
    due_s: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        case, n = self.case, len(self.case.requests)
        at_s = [0.0] * min(case.concurrency, n) if case.concurrency else case.arrivals_s()
        self.due_s.extend(self.start_s + each for each in at_s)

    def ended(self, now_s: float) -> None:
        """A text is complete: where clients ask, one does so now."""
        if self.case.concurrency and self.number + len(self.due_s) < len(self.case.requests):
            self.due_s.append(now_s)

    def has_come(self, now_s: float) -> bool:
        return bool(self.due_s) and self.due_s[0] <= now_s


class LoadBench(SweepHead[LoadGroup]):
    """Rank 0's part."""

    def __init__(self, crew: Crew, groups: list[LoadGroup], warm_up: int) -> None:
        super().__init__(crew, groups, LOADS)
        self.warm_up = warm_up
        self._coming: Coming | None = None
        self._requests: OpenRequests | None = None
        self._news = deque[News]()

    def run(self, output: str) -> int:
        """Returns the exit code."""
        cases = [case for group in self.groups for case in group.cases]
        n_requests = sum(len(case.requests) for case in cases)
        about = f"{len(cases)} loads to measure, {n_requests} requests"
        return self.run_all(about, n_requests, lambda rows: print_loads(rows, output))

    def called(self) -> bool:
        return self._next_can_begin()

    def measure(self, session: Session, group: LoadGroup) -> None:
        tokenizer = Tokenizer(group.options.model)
        for case in [*[_warm_up(group.cases[0])] * self.warm_up, *group.cases]:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=_describe(case))
            context = replace(session.context, options=case.options)
            self._requests = requests = OpenRequests(context, session, tokenizer, group.n_ctx, self._news.extend)
            requests.engine.forget()  # what the load before it has left would spare this one some prompts
            session.take_figures()
            try:
                figures = self._carry(session, case, requests)
            except StopRequested:
                requests.stop_all()
                return
            finally:
                self._coming = None
            if case.repetition:
                self._keep(session, case, figures)

    # -- one load

    def _carry(self, session: Session, case: LoadCase, requests: OpenRequests) -> Record:
        """All its requests to their ends; what was measured."""
        throughput, opened, open_max = Throughput(itl_s=array("d")), list[Open](), 0
        self._coming = coming = Coming(case, CLOCK())
        uses: RankUses | None = None
        while coming.due_s or requests.engine.busy:
            while self._next_can_begin():
                opened.append(self._begin(case, coming, requests))
                open_max = max(open_max, len(requests))
            requests.step()
            while self._news:
                news = self._news.popleft()
                uses = uses or RankUses(session.deployment, news.opened.metrics.token_s[0])
                if news.ended:
                    coming.ended(news.opened.metrics.token_s[-1])
                    throughput.add(news.opened.metrics)
                    self.progress.advance(self.task, int(case.repetition > 0))
            if uses and session.n_noted >= N_NOTED:
                uses.note(session.take_figures(), CLOCK())
        assert uses, "a load without tokens"
        metrics = [each.metrics for each in opened]
        start_s, end_s = (edge(times) for edge, times in ((min, [each.submitted_s for each in metrics]),
                                                          (max, [each.token_s[-1] for each in metrics])))  # fmt: skip
        uses.note(session.take_figures(), end_s)
        rates = NOT_OFFERED if case.concurrency else offered_and_served(metrics)
        return _figures(session, throughput, uses, end_s - start_s, len(metrics)) | rates | {"open_max": open_max}

    def _next_can_begin(self) -> bool:
        """Whether a request has come for which there is room. Asked in every wait."""
        coming, requests = self._coming, self._requests
        if coming is None or requests is None or not coming.has_come(CLOCK()):
            return False
        return requests.has_room(coming.case.requests[coming.number])

    def _begin(self, case: LoadCase, coming: Coming, requests: OpenRequests) -> Open:
        opened = requests.begin(case.requests[coming.number], case.options.policy.begin())
        opened.metrics.submitted_s = coming.due_s.popleft()  # it may have waited for room
        coming.number += 1
        return opened

    def _keep(self, session: Session, case: LoadCase, figures: Record) -> None:
        row = self.keep(case.options, case.asked(session.deployment) | figures)
        if self.progress.disable:
            self.console.print(
                f"[{len(self.rows)}] {_describe(case)}: {number(row['predicted_per_second'])} tokens/s, TTFT p50 "
                f"{milliseconds(row['ttft_p50_s'])}, ITL p50 {milliseconds(row['itl_p50_s'])}"
                + (
                    f"; {number(row['served_per_second'])} requests/s answered of {number(row['offered_per_second'])} "
                    "that came"
                    if falls_behind(row)
                    else ""
                ),
                markup=False,
            )


def _figures(
    session: Session, throughput: Throughput, uses: RankUses, wall_s: float, n_requests: int
) -> dict[str, Any]:
    """What was measured, by the columns' names."""
    plan, ranks = session.deployment.plan, uses.ranks()
    kept = {name: getattr(throughput, f"{name}_s") for name in LATENCIES}
    spread = {name: percentiles(values, range(101)) if values else [] for name, values in kept.items()}
    return throughput.figures(wall_s, n_requests) | {
        **{f"{name}_percentiles_s": values for name, values in spread.items()},
        "busy": [_share(ranks[stage.rank]) for stage in plan.stages],
        **{name: [rank[name] for rank in ranks] for name in USES},
        "roles": ";".join(rank["role"] for rank in ranks),
        "hosts": ",".join(rank["host"] for rank in ranks),
        "version": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _share(rank: dict[str, Any]) -> float:
    """How much of its time was spent on runs, cancelled ones too."""
    worked_s: float = rank["busy_s"] + rank["cancelled_s"]
    return worked_s / rank["wall_s"] if rank["wall_s"] > 0 else 0.0


def _warm_up(case: LoadCase) -> LoadCase:
    """Its first request alone, a short one, that no row is kept of."""
    first = case.requests[0]
    return replace(
        case, requests=(replace(first, n_predict=min(WARM_UP_TOKENS, first.n_predict)),), concurrency=1, repetition=0
    )


def _describe(case: LoadCase) -> str:
    options = case.options
    variant = variant_text(options.policy, options.cancel, options.partitions)
    come = come_text({"concurrency": case.concurrency, "rate": case.rate, "parallel": options.parallel})
    about = f"repetition {case.repetition}" if case.repetition else "warm-up"
    return ", ".join(filter(None, (options.policy.name, variant, come, f"n {case.requests[0].n_predict}", about)))
