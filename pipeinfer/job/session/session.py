"""The loaded models of all ranks, as rank 0 drives them: one engine for all requests, and reports of every rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pipeinfer.cluster.head_pipeline import N_POSTED, HeadPipeline, HeadWaiter
from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.messages.verdicts import decode_guess_verdict, decode_verdict, verdict_bytes
from pipeinfer.cluster.timing.calibrate import largest_question, slowest_stage, time_row
from pipeinfer.cluster.transport import progress_between
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Drafter, LoadedModel
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.runs import GuessVerdict, Verdict
from pipeinfer.errors import JobError, StopRequested, UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.loading.load import (
    N_GUESS_BYTES,
    inexact_line,
    load_own,
    make_courier,
    make_draft_worker,
    make_drafter,
    make_worker,
    stage_report,
)
from pipeinfer.job.loading.run_costs import RunCosts, run_cost, time_draft
from pipeinfer.job.placement.capacity import EngineSettings
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.drafter import ModelDrafter
from pipeinfer.models.llama.ggml import amx_works
from pipeinfer.models.lookup import LookupDrafter
from pipeinfer.observe.ledger import HeadLedger
from pipeinfer.observe.metrics import RequestMetrics

NO_AMX = (
    "this build of llama.cpp has AMX kernels that crash, so they are not used; for full speed install it again: "
    "CMAKE_ARGS=\"-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'\" pip install --force-reinstall --no-cache-dir --no-deps "
    "llama-cpp-python"
)

LATE = 0.05
"""Of a generation's time: a paced rank that is late by more is named."""
N_NOTED = 20_000
"""Records of rank 0 after which reports are requested, so that the records do not grow without end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the ranks did in some time. `figures`: the report of each rank that took part. `refiners`: the requests of
    rank 0 to each rank of a remote draft, and their times. `row_s`: seconds of one row in each stage's rank, timed at
    loading."""

    ledger: HeadLedger
    figures: dict[int, dict[str, Any]]
    refiners: dict[int, HeadLedger]
    row_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Generation(Figures):
    """The result of one request."""

    request: Request
    metrics: RequestMetrics


class Session:
    """Between `open` and `close` every rank of the plan holds its models, and what the engine learned of them stays.

    Other ranks are in `worker.run_stage`.
    """

    def __init__(
        self, context: Context, plan: JobPlan, has_work: Callable[[], bool] = lambda: False,
        on_loaded: Callable[[int, float], object] = lambda rank, loaded_s: None,
    ) -> None:  # fmt: skip
        """`has_work`: returns True to end a wait of the engine. `on_loaded(rank, seconds)` is called for every rank
        that has loaded."""
        self.context, self.plan, self.on_loaded, self.has_work = context, plan, on_loaded, has_work
        self._ranks = [stage.rank for stage in plan.assignment.stages]
        self.remote_ranks = sorted(plan.assignment.computing - {0})
        self._stage: LoadedModel | None = None
        self._drafts: dict[int, LoadedModel] = {}  # by number
        self._costs: dict[int, RunCosts] = {}  # of each stage's rank
        self._refiner_costs: dict[int, dict[int, float]] = {}  # of each remote draft: rows of a run -> seconds
        self._pipeline: HeadPipeline[Verdict] | None = None
        self._draft_pipelines: dict[int, HeadPipeline[GuessVerdict]] = {}  # of remote drafts, by number
        self._drafter: ModelDrafter | None = None
        self._lookup: LookupDrafter | None = None
        self._draft_s = 0.0  # of a step of one row; 0 where no draft is on this rank
        self._engine: Engine | None = None
        self._request_ids = count()
        self._own_figures: tuple[HeadLedger, dict[str, Any], dict[int, HeadLedger]] | None = None
        self._figures: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        """Load the models. Raises JobError with the error of the lowest rank that failed; all ranks have ended then."""
        own: dict[str, Any] = {}
        start_s = CLOCK()
        try:
            self._stage, self._drafts = load_own(self.context, self.plan)
            if self._drafts:
                self._drafter = make_drafter(self.context, self.plan, self._drafts[0])
                self._draft_s = time_row(self._drafts[0], CLOCK)
            self.on_loaded(0, CLOCK() - start_s)
            if (self._drafts or not self.plan.numerics.exact) and not amx_works():
                complain(NO_AMX)
            if self._stage:
                own = stage_report(self.context, self.plan, self._stage)
            self._refiner_costs = {
                number: time_draft(self.context, self.plan, draft, number).rows
                for number, draft in self._drafts.items()
                if number
            }
        except UserError as caught:
            own = {"error": str(caught)}
        reports = {0: own} | self._reports()
        costs = {rank: report.get("costs", RunCosts()) for rank, report in reports.items()}
        self._costs = {rank: costs[rank] for rank in self._ranks}
        for number, stages in self.plan.assignment.remote_drafts.items():
            if number not in self._drafts:
                self._refiner_costs[number] = slowest_stage([costs[stage.rank].rows for stage in stages])
        self._connect()
        if error := first_error(reports):
            self.close()
            raise JobError(error)
        self._engine = self._make_engine()
        if line := self._engine.batches.too_short:
            complain(line)
        gpus = {rank: reports[rank]["gpu"] for rank in self._ranks}
        if line := inexact_line(self.plan, gpus):
            complain(line)

    def _connect(self) -> None:
        """Make rank 0's ends of the pipelines, with the stages that it hosts itself."""
        context, plan, worker = self.context, self.plan, None
        comm, courier = context.link.comm, make_courier(context, plan)
        wire_type, progress = plan.numerics.wire_type, progress_between(comm, plan.host_names)
        n_posted = N_POSTED if plan.post_ahead else 0
        if self._stage:
            worker = make_worker(context, plan, self._stage)
        n_features = len(plan.layers_read) * plan.model.n_embd
        n_bytes = verdict_bytes(plan.n_rows_max, n_scored=plan.capacity.n_nodes, n_features=n_features)
        self._pipeline = HeadPipeline(
            comm, self._ranks, worker, n_bytes, decode_verdict, courier, wire_type, progress, n_posted
        )
        for number, stages in plan.assignment.remote_drafts.items():
            draft, ranks = self._drafts.get(number), [stage.rank for stage in stages]
            asker = make_draft_worker(context, plan, number, draft) if draft else None
            self._draft_pipelines[number] = HeadPipeline(
                comm, ranks, asker, N_GUESS_BYTES, decode_guess_verdict, courier, wire_type, progress, n_posted
            )

    @property
    def _pipelines(self) -> list[HeadPipeline[Any]]:
        return [*([self._pipeline] if self._pipeline else []), *self._draft_pipelines.values()]

    def _make_engine(self) -> Engine:
        context, plan, capacity = self.context, self.plan, self.plan.capacity
        assert self._pipeline
        n_cells, n_guess_rows, model = capacity.n_cells, capacity.n_guess_rows, plan.model
        pool = SequencePool(
            capacity.n_target_seq, n_cells, plan.numerics.parked, model.rewinds, capacity.n_target_guesses, model.window
        )
        levels = {
            number: Level(
                pipeline, SequencePool(capacity.n_seq, n_cells, window=plan.drafts[number].window),
                n_chunk=n_guess_rows,
                n_rows=largest_question(self._refiner_costs[number]) if number else n_guess_rows,
            )
            for number, pipeline in self._draft_pipelines.items()
        }  # fmt: skip
        target = Level(
            self._pipeline, pool, n_chunk=capacity.n_batch, n_rows=capacity.n_nodes, blocks=plan.numerics.blocks
        )
        drafter: Drafter | Level | None = self._drafter or levels.pop(0, None)
        if not isinstance(drafter, Level) and plan.looks_up is not False:
            drafter = self._lookup = LookupDrafter(drafter)
        engine = Engine(
            target, drafter, HeadWaiter(context.flag.check, self._pipeline, self.has_work), CLOCK,
            drafts=list(levels.values()),
            run_cost=run_cost(self._costs.values(), plan),
            n_prompts=capacity.n_prompts, max_delay_s=plan.max_delay_s, draft_s=self._draft_s,
        )  # fmt: skip
        if not all(each.is_at_head for each in self._pipelines):  # else nothing comes while this rank evaluates
            for each in self._pipelines:
                each.listen_by(engine.listen)
        return engine

    def generate(
        self, asked: GenerationRequest, on_tokens: Callable[[Sequence[int]], object],
        on_prompt: Callable[[int], None] | None = None, settings: EngineSettings | None = None,
    ) -> Generation:  # fmt: skip
        """One request, alone, to its end, also when the user stops it.

        `on_tokens` may answer that the text ends here, whatever the model would say further. `on_prompt` hears how many
        rows of the prompt have been evaluated. `settings`: None: the plan's.
        """
        engine = self.set_up(settings)
        request, has_draft = asked.open(next(self._request_ids)), bool(self.plan.drafts)
        metrics = RequestMetrics(self.context.tracer, on_prompt, has_draft=has_draft)
        engine.add(request, asked.policy.begin(), metrics)
        self._drive(engine, request, on_tokens)
        found = self.take_figures()
        if missed := missed_pace(found.figures, CLOCK() - metrics.submitted_s):
            metrics.noticed(missed)
        return Generation(found.ledger, found.figures, found.refiners, found.row_s, request, metrics)

    def set_up(self, settings: EngineSettings | None = None) -> Engine:
        """The engine with settings for the requests to come, None: the plan's; none may be open. Who adds requests has
        ids from `next_id`."""
        assert self._engine, "the session is not open"
        settings = settings or self.plan.engine
        self._engine.target.cancel = settings.cancel
        if self._lookup:
            self._lookup.is_on = settings.looks_up
        pools = [level.pool for level in self._engine.levels] + ([self._drafter.pool] if self._drafter else [])
        for pool in pools:
            is_target = pool is self._engine.target.pool
            n_seq = settings.n_target_seq if is_target else settings.n_seq
            if pool.n_seq != n_seq:
                self._engine.forget()
                pool.resize(n_seq)
        return self._engine

    def unlearn(self) -> None:
        """Forget what lookup learned from texts. Policies and measured times stay."""
        if self._lookup:
            self._lookup.unlearn()

    def next_id(self) -> int:
        """The id of a further request."""
        return next(self._request_ids)

    @property
    def n_runs(self) -> int:
        """Runs of the target since the start."""
        assert self._pipeline
        return self._pipeline.n_submitted

    @property
    def n_noted(self) -> int:
        """Runs and waits that rank 0 has recorded since the last reports."""
        return sum(each.ledger.n_notes for each in self._pipelines)

    def ask_figures(self) -> None:
        """Request a report from every rank. Ranks answer after their pending runs; `poll_figures` returns the reports
        once all have arrived."""
        assert self._pipeline and not self.asks_figures
        for each in self._pipelines:
            each.ask_reports()
        asked = {number: pipeline.take_ledger() for number, pipeline in self._draft_pipelines.items()}
        drafts = self.plan.assignment.drafts
        refiners = {stage.rank: asked[number] for number in asked for stage in drafts[number]}
        own = self.context.take_figures(self._pipeline.worker, self._pipeline.outbox, None)
        self._own_figures = self._pipeline.take_ledger(), own, refiners

    @property
    def asks_figures(self) -> bool:
        """Whether reports were requested that have not been returned."""
        return self._own_figures is not None

    def poll_figures(self) -> Figures | None:
        """The requested reports once all have arrived, else None."""
        assert self._own_figures
        while len(self._figures) < len(self.remote_ranks) and (report := self.context.link.next_report()):
            self._figures[report[0]] = report[1]
        if len(self._figures) < len(self.remote_ranks):
            return None
        (ledger, own, refiners), reports = self._own_figures, self._figures
        self._own_figures, self._figures = None, {}
        row_s = {rank: costs.rows[1] for rank, costs in self._costs.items()}
        return Figures(ledger, {0: own} | reports, refiners, row_s)

    def take_figures(self) -> Figures:
        """What every rank did since the last reports. Waits for the stages' pending runs."""
        if not self.asks_figures:
            self.ask_figures()
        return Idle().until(self.poll_figures)

    def close(self) -> None:
        """End the stages' loops and free this rank's models."""
        for pipeline in self._pipelines:
            pipeline.shutdown()
        for model in (self._stage, *self._drafts.values()):
            if model:
                model.close()
        self.context.close_vocabulary()

    def _reports(self) -> dict[int, dict[str, Any]]:
        """The first report of every remote rank."""
        reports: dict[int, dict[str, Any]] = {}
        while len(reports) < len(self.remote_ranks):
            rank, report = Idle().until(self.context.link.next_report)
            reports[rank] = report
            if "loaded_s" in report:
                self.on_loaded(rank, report["loaded_s"])
        return reports

    def _drive(self, engine: Engine, request: Request, on_tokens: Callable[[Sequence[int]], object]) -> None:
        def take(emissions: Sequence[Emission]) -> None:
            for emission in emissions:
                if on_tokens(emission.tokens):
                    engine.stop(request, Finish.END)

        engine.taker = take
        try:
            if not request.n_predict:
                engine.stop(request, Finish.LENGTH)
            for emission in engine.generate():
                take([emission])
        except StopRequested:
            with self.context.flag.held():
                drain(engine, request)


def missed_pace(figures: Mapping[int, Mapping[str, Any]], wall_s: float) -> str:
    """A warning for ranks that needed clearly longer than `--pace` allows; else empty."""
    late = {rank: found["late_s"] / wall_s for rank, found in sorted(figures.items())}
    shown = ", ".join(f"rank {rank} for {share:.0%} of the time" for rank, share in late.items() if share > LATE)
    return f"slower than --pace says: {shown}; take a slower profile, smaller models or fewer ranks" if shown else ""


def first_error(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """The error of the lowest rank that has one; else empty."""
    return next((report["error"] for _, report in sorted(reports.items()) if report.get("error")), "")


def drain(engine: Engine, request: Request) -> None:
    """Stop the only open request, and wait for its runs in flight."""
    engine.stop(request)
    for _ in engine.generate():
        raise AssertionError("a stopped request emitted tokens")
