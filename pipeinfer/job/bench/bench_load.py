"""Measure loads: many requests at a time on the loaded models, as clients ask or as they come at random."""

import math
from array import array
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.bench.sweep import Group, Key, Sweep, Variant, describe, variants_of
from pipeinfer.job.bench.sweep_job import WARM_UP_TOKENS, SweepHead, start_sweep
from pipeinfer.job.launch.context import CLOCK
from pipeinfer.job.options.loads import Loads
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deploy import deploy
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.requests.conversation import first_turns
from pipeinfer.job.requests.experiment import experiment_columns
from pipeinfer.job.requests.request import GenerationRequest, make_request
from pipeinfer.job.session.open_requests import News, Open, OpenRequests
from pipeinfer.job.session.rank_uses import RankUses
from pipeinfer.job.session.session import N_NOTED, Session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import LATENCIES
from pipeinfer.observe.experiment import digest
from pipeinfer.observe.metrics import percentiles
from pipeinfer.observe.report import milliseconds, number
from pipeinfer.observe.results import LOADS
from pipeinfer.observe.table import Record
from pipeinfer.observe.throughput import NOT_OFFERED, Throughput, offered_and_served
from pipeinfer.observe.traffic import come_text, falls_behind, print_loads
from pipeinfer.virtual.traffic import arrivals_s

SEED_END = 2**32
OF_PLAN = ("numerics_name", "plan_hash")
USES = ("busy_s", "cancelled_s", "waiting_s", "idle_s", "peak_rss_bytes")


def run_loads(sweep: Sweep) -> int:
    """`pipeinfer bench --concurrency` and `--rate`, on every rank; returns the exit code."""
    assert sweep.loads
    sweep = replace(sweep, base=replace(sweep.base, parallel=(n := sweep.loads.parallel or 1), n_expected=n))
    return start_sweep(sweep, LOADS, load_group, LoadBench)


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load to measure. `concurrency` 0: its requests come at a `rate`. `prompt`: whose texts they continue."""

    variant: Variant
    requests: tuple[GenerationRequest, ...]
    prompt: str
    concurrency: int
    rate: float
    repetition: int

    @property
    def seed(self) -> int:
        return self.requests[0].sampling.seed

    def without(self, plan: JobPlan, known: Set[Key]) -> "LoadCase | None":
        return None if LOADS.key_of(LOADS.as_read(self.asked(plan))) in known else self

    def arrivals_s(self) -> list[float]:
        """When its requests come, from the first one on, where clients do not say."""
        return arrivals_s(len(self.requests), self.rate, self.seed)

    def asked(self, plan: JobPlan) -> Record:
        """The columns that say what is asked."""
        first = self.requests[0]
        tokens = [request.prompt for request in self.requests]
        settings = self.variant.settings
        row = experiment_columns(plan, first, settings, self.prompt, digest(tokens), self.repetition)
        load = {"n_requests": len(tokens), "predict": first.n_predict, "concurrency": self.concurrency,
                "rate": math.nan if self.concurrency else self.rate, "parallel": plan.capacity.n_requests}  # fmt: skip
        return {name: value for name, value in row.items() if name in (*LOADS.asked, *OF_PLAN)} | load


def n_requests(loads: Loads, n_prompts: int) -> int:
    """Of a load: every prompt once, but twice the largest concurrency at least, where --requests does not say."""
    return loads.requests or max(n_prompts, 2 * loads.most_clients)


def load_group(options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host]) -> Group[LoadCase]:
    """What is measured of some policies on what they share. Raises UserError for what does not fit."""
    info, tokenizer, loads = *open_models(options.model, options.drafts_in_use), sweep.loads or Loads()
    asked = first_turns(sweep.prompts, n_requests(loads, len(sweep.prompts)), tokenizer, sweep.cut)
    n_predict, n_prompt = max(sweep.predicts), max(map(len, asked))
    request = make_request(replace(options, predict=n_predict, ctx_size=0), info, tokenizer, asked[0], n_prompt)
    n_ctx = options.ctx_size or min(len(asked), options.parallel) * (n_prompt + n_predict)
    _check_room(options.ctx_size, n_ctx, n_prompt + n_predict, loads)
    plan = deploy(options, hosts, info, n_ctx, n_prompt)
    name = "+".join(dict.fromkeys(prompt.name.partition("/")[0] for prompt in sweep.prompts))
    points = [(count, math.nan) for count in loads.concurrencies] + [(0, rate) for rate in loads.rates]
    cases = tuple(
        LoadCase(chosen, _requests(request, asked, n, repetition), name, *point, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for n in sweep.predicts
        for point in points
        for chosen in variants_of(options, policies, sweep.ablations, info.layers.rewinds)
    )
    return Group(plan, cases)


def _requests(
    like: GenerationRequest, prompts: Sequence[tuple[int, ...]], n_predict: int, repetition: int
) -> tuple[GenerationRequest, ...]:
    """One for each prompt, each with the seed after that of the one before it; a repetition has other seeds."""
    first = like.sampling.seed + (repetition - 1) * len(prompts)
    return tuple(
        replace(
            like, prompt=prompt, n_predict=n_predict, n_ctx=len(prompt) + n_predict,
            sampling=replace(like.sampling, seed=(first + number) % SEED_END),
        )
        for number, prompt in enumerate(prompts)
    )  # fmt: skip


def _check_room(ctx_size: int, n_ctx: int, longest: int, loads: Loads) -> None:
    """Raises UserError where not as many could be open as clients ask."""
    most = max(loads.concurrencies, default=1)
    if n_ctx < most * longest:
        clients = f"{most} requests" if most > 1 else "a request"
        raise UserError(f"-c {ctx_size} has no room for {clients} of up to {longest} tokens, prompt and text; "
                        f"use -c {most * longest}, or leave it out")  # fmt: skip


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


class LoadBench(SweepHead[LoadCase]):
    """Rank 0's part."""

    _coming: Coming | None = None
    _requests: OpenRequests | None = None

    def run(self) -> int:
        """Returns the exit code."""
        cases = [case for group in self.groups for case in group.cases]
        n_requests = sum(len(case.requests) for case in cases)
        about = f"{len(cases)} loads to measure, {n_requests} requests"
        return self.run_all(about, n_requests, print_loads)

    def has_work(self) -> bool:
        return self._next_can_begin()

    def measure(self, session: Session, group: Group[LoadCase]) -> None:
        tokenizer, self._news = Tokenizer(group.plan.model.path), deque[News]()
        for case in [*[_warm_up(group.cases[0])] * self.sweep.warm_up, *group.cases]:
            if self.crew.flag.reason:
                return
            self.progress.update(self.task, description=self._describe(case))
            session.unlearn()  # no load gains by those before it
            policy = case.variant.settings.policy.fresh()
            case = replace(case, requests=tuple(replace(request, policy=policy) for request in case.requests))
            self._requests = requests = OpenRequests(
                session.context, session, tokenizer, self._news.extend, partial(self._say, case), case.variant.engine
            )
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

    def _say(self, case: LoadCase, line: str) -> None:
        name = self._describe(case).rpartition(", ")[0]  # whichever repetition
        self.notice(name, [f"{name}: {line}"])

    def _describe(self, case: LoadCase) -> str:
        parallel = self.sweep.base.parallel
        come = come_text({"concurrency": case.concurrency, "rate": case.rate, "parallel": parallel})
        return describe(case.variant.settings, case.repetition, come, f"n {case.requests[0].n_predict}")

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
                uses = uses or RankUses(session.plan, news.opened.metrics.token_s[0])
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
        opened = requests.begin(case.requests[coming.number])
        opened.metrics.submitted_s = coming.due_s.popleft()  # it may have waited for room
        coming.number += 1
        return opened

    def _keep(self, session: Session, case: LoadCase, figures: Record) -> None:
        row = self.keep(case.asked(session.plan) | figures)
        if self.progress.disable:
            self.console.print(
                f"[{len(self.rows)}] {self._describe(case)}: {number(row['predicted_per_second'])} tokens/s, TTFT p50 "
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
    assignment, ranks = session.plan.assignment, uses.ranks()
    kept = {name: getattr(throughput, f"{name}_s") for name in LATENCIES}
    spread = {name: percentiles(values, range(101)) if values else [] for name, values in kept.items()}
    return throughput.figures(wall_s, n_requests) | {
        **{f"{name}_percentiles_s": values for name, values in spread.items()},
        "busy": [_share(ranks[stage.rank]) for stage in assignment.stages],
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
