"""Measure loads: many requests at a time, from clients or as a Poisson process."""

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.bench.sweep import (
    WARM_UP_TOKENS,
    Group,
    Key,
    Sweep,
    SweepHead,
    Variant,
    describe,
    start_sweep,
    variants_of,
)
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import Loads
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.planning.deploy import deploy
from pipeinfer.job.planning.prepare import make_request
from pipeinfer.job.requests.conversation import first_turns
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.ranks import MAX_RECORDS
from pipeinfer.job.session.result import RankUses, experiment_columns
from pipeinfer.job.session.session import Notices, OpenRequest, Output, Session
from pipeinfer.observe.columns import LATENCIES, Record, digest
from pipeinfer.observe.figures import load_figures, percentiles, stamp
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.summary import arrival_text, falls_behind, print_loads
from pipeinfer.observe.table import LOADS
from pipeinfer.text import milliseconds, number
from pipeinfer.virtual.simulation import arrivals_s

SEED_END = 2**32
PLAN_COLUMNS = ("numerics_name", "plan_hash")
USES = ("busy_s", "cancelled_s", "waiting_s", "idle_s", "peak_rss_bytes")


def run_loads(sweep: Sweep) -> int:
    """`pipeinfer bench --concurrency` and `--rate`, on every rank; returns the exit code."""
    assert sweep.loads
    sweep = replace(sweep, base=sweep.base.changed(parallel=(n := sweep.loads.parallel or 1), n_expected=n))
    return start_sweep(sweep, LOADS, load_group, LoadBench)


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load to measure. `concurrency` 0: its requests arrive at a `rate`. `prompt`: the name of their texts."""

    variant: Variant
    requests: tuple[GenerationRequest, ...]
    prompt: str
    concurrency: int
    rate: float
    repetition: int

    def without(self, plan: JobPlan, measured: Set[Key]) -> "LoadCase | None":
        return None if LOADS.key_of(LOADS.as_read(self.columns(plan))) in measured else self

    def warm_up(self) -> "LoadCase":
        first = self.requests[0]
        first = replace(first, n_predict=min(WARM_UP_TOKENS, first.n_predict))
        return replace(self, requests=(first,), concurrency=1, repetition=0)

    def arrivals_s(self) -> list[float]:
        """Arrival times after the first request, if there are no clients."""
        return arrivals_s(len(self.requests), self.rate, self.requests[0].sampling.seed)

    def columns(self, plan: JobPlan) -> Record:
        """The columns known before the load."""
        first = self.requests[0]
        tokens = [request.prompt for request in self.requests]
        row = experiment_columns(plan, first, self.variant.settings, self.prompt, digest(tokens), self.repetition)
        return {name: value for name, value in row.items() if name in (*LOADS.key, *PLAN_COLUMNS)} | {
            "n_requests": len(tokens),
            "predict": first.n_predict,
            "concurrency": self.concurrency,
            "rate": math.nan if self.concurrency else self.rate,
            "parallel": plan.capacity.n_requests,
        }

    def describe(self, parallel: int) -> str:
        arrival = arrival_text({"concurrency": self.concurrency, "rate": self.rate, "parallel": parallel})
        return describe(self.variant.settings, self.repetition, arrival, f"n {self.requests[0].n_predict}")


def n_requests(loads: Loads, n_prompts: int) -> int:
    """Requests of a load: --requests, or every prompt once, but at least twice the largest concurrency."""
    return loads.requests or max(n_prompts, 2 * loads.most_clients)


def load_group(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group[LoadCase]:
    """The cases of policies that share loaded models. Raises UserError for what does not fit."""
    info, tokenizer = open_models(options.models.target, options.drafts_in_use)
    loads, ctx_size = sweep.loads or Loads(), options.context.ctx_size
    prompts = first_turns(sweep.prompts, n_requests(loads, len(sweep.prompts)), tokenizer, sweep.cut)
    n_predict, n_prompt = max(sweep.predicts), max(map(len, prompts))
    request = make_request(options.changed(predict=n_predict, ctx_size=0), info, tokenizer, prompts[0], n_prompt)
    n_ctx = ctx_size or min(len(prompts), options.traffic.parallel) * (n_prompt + n_predict)
    _check_room(ctx_size, n_ctx, n_prompt + n_predict, loads)
    plan = deploy(options, hosts, info, n_ctx, n_prompt)
    name = "+".join(dict.fromkeys(prompt.name.partition("/")[0] for prompt in sweep.prompts))
    points = [(count, math.nan) for count in loads.concurrencies] + [(0, rate) for rate in loads.rates]
    cases = tuple(
        LoadCase(variant, _requests(request, prompts, n, repetition), name, *point, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for n in sweep.predicts
        for point in points
        for variant in variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    )
    return Group(plan, cases)


def _requests(
    like: GenerationRequest, prompts: Sequence[tuple[int, ...]], n_predict: int, repetition: int
) -> tuple[GenerationRequest, ...]:
    """A request for each prompt, with consecutive seeds, which differ between repetitions."""
    first = like.sampling.seed + (repetition - 1) * len(prompts)
    return tuple(
        replace(
            like, prompt=prompt, n_predict=n_predict, n_ctx=len(prompt) + n_predict,
            sampling=replace(like.sampling, seed=(first + number) % SEED_END),
        )
        for number, prompt in enumerate(prompts)
    )  # fmt: skip


def _check_room(ctx_size: int, n_ctx: int, longest: int, loads: Loads) -> None:
    """Raises UserError if the requests of all clients cannot be open at a time."""
    most = max(loads.concurrencies, default=1)
    if n_ctx < most * longest:
        clients = f"{most} requests" if most > 1 else "a request"
        raise UserError(f"-c {ctx_size} has no room for {clients} of up to {longest} tokens, prompt and text; "
                        f"use -c {most * longest}, or leave it out")  # fmt: skip


@dataclass(slots=True)
class Arrivals:
    """Requests of a load that have not begun, and when each is due. A client sends the next when it has its text."""

    case: LoadCase
    start_s: float
    n_begun: int = 0
    due_s: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        case, n = self.case, len(self.case.requests)
        at_s = [0.0] * min(case.concurrency, n) if case.concurrency else case.arrivals_s()
        self.due_s.extend(self.start_s + each_s for each_s in at_s)

    def ended(self, now_s: float) -> None:
        """A text is complete: its client, if there is one, sends its next request."""
        if self.case.concurrency and self.n_begun + len(self.due_s) < len(self.case.requests):
            self.due_s.append(now_s)

    def is_due(self, now_s: float) -> bool:
        return bool(self.due_s) and self.due_s[0] <= now_s


class LoadBench(SweepHead[LoadCase]):
    """The part of rank 0."""

    _arrivals: Arrivals | None = None
    _session: Session | None = None

    def run(self) -> int:
        cases = [case for group in self.groups for case in group.cases]
        n_requests = sum(len(case.requests) for case in cases)
        return self.run_all(f"{len(cases)} loads to measure, {n_requests} requests", n_requests, print_loads)

    def measure(self, session: Session, group: Group[LoadCase]) -> None:
        self._session, self._outputs = session, deque[Output]()
        super().measure(session, group)

    def measure_case(self, session: Session, case: LoadCase) -> None:
        name = case.describe(self.sweep.base.traffic.parallel)
        self.progress.update(self.task, description=name)
        policy = case.variant.settings.policy.fresh()
        case = replace(case, requests=tuple(replace(request, policy=policy) for request in case.requests))
        session.configure(case.variant.engine)
        session.engine.forget()  # cached tokens of the load before would spare this one some prompts
        session.ranks.take_figures()
        self._notices = Notices(lambda notice: self.notice_case(name, [notice]), session.context.clock)
        try:
            figures = self._carry(session, case)
        except StopRequested:
            session.stop_all()
            return
        finally:
            self._arrivals = None
        if case.repetition:
            self._keep(session.plan, case, figures)

    # -- one load

    def _carry(self, session: Session, case: LoadCase) -> Record:
        """Complete all requests of the load. Returns its figures."""
        opened, open_max = list[OpenRequest](), 0
        self._arrivals = arrivals = Arrivals(case, session.context.clock())
        uses: RankUses | None = None
        while arrivals.due_s or session.engine.busy:
            while self.has_work():
                opened.append(self._begin(session, arrivals))
                open_max = max(open_max, session.n_open)
            session.engine.step()
            while self._outputs:
                output = self._outputs.popleft()
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
            self._notices.hear(notice)
        return _figures(session.plan, metrics, uses, has_rate=not case.concurrency) | {"open_max": open_max}

    def has_work(self) -> bool:
        """Whether a request is due for which there is room. Polled in every wait."""
        arrivals, session = self._arrivals, self._session
        if arrivals is None or session is None or not arrivals.is_due(session.context.clock()):
            return False
        return session.has_room(arrivals.case.requests[arrivals.n_begun])

    def _begin(self, session: Session, arrivals: Arrivals) -> OpenRequest:
        self._notices.pass_on()
        metrics = RequestMetrics(on_notice=self._notices.hear)
        opened = session.begin(arrivals.case.requests[arrivals.n_begun], self._outputs.extend, metrics)
        opened.metrics.submitted_s = arrivals.due_s.popleft()  # it may have waited for room
        arrivals.n_begun += 1
        return opened

    def _keep(self, plan: JobPlan, case: LoadCase, figures: Record) -> None:
        row = self.keep(case.columns(plan) | figures)
        ttft, itl = milliseconds(row["ttft_p50_s"]), milliseconds(row["itl_p50_s"])
        served, offered = number(row["served_per_second"]), number(row["offered_per_second"])
        behind = f"; {served} requests/s answered of {offered} that came" if falls_behind(row) else ""
        name = case.describe(self.sweep.base.traffic.parallel)
        self.report(name, f"{number(row['predicted_per_second'])} tokens/s, TTFT p50 {ttft}, ITL p50 {itl}{behind}")


def _figures(plan: JobPlan, metrics: Sequence[RequestMetrics], uses: RankUses, has_rate: bool) -> Record:
    """The measured columns."""
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
