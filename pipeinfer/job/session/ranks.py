"""The loaded models of all ranks as rank 0 drives them: pipelines, the engine on them, reports. Knows no request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.cluster.head_pipeline import N_POSTED, HeadPipeline, HeadWaiter
from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.timed_runs import largest_question, slowest_stage, time_row
from pipeinfer.cluster.transport import progress_between
from pipeinfer.cluster.verdicts import decode_guess_verdict, decode_verdict, verdict_bytes
from pipeinfer.core.admission import OpenLimits, ahead_of
from pipeinfer.core.blocks import LARGEST
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Drafter, LoadedModel
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Emission
from pipeinfer.core.runs import BlockKey, GuessVerdict, Verdict
from pipeinfer.core.sequences import SequencePool
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.loading.load import (
    N_GUESS_BYTES,
    load_own,
    make_courier,
    make_draft_worker,
    make_drafter,
    make_worker,
    stage_report,
)
from pipeinfer.job.loading.stages import RunCosts, run_cost, time_draft
from pipeinfer.job.placement.checks import inexact_line
from pipeinfer.job.placement.job_plan import EngineSettings, JobPlan
from pipeinfer.job.process.streams import complain
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.llama.ggml import amx_works
from pipeinfer.models.llama.rpc import expect
from pipeinfer.observe.trace import HeadLedger
from pipeinfer.text import size_text

NO_AMX = (
    "this build of llama.cpp has AMX kernels that crash, so they are not used; for full speed install it again: "
    "CMAKE_ARGS=\"-DGGML_RPC=on -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'\" pip install --force-reinstall "
    "--no-cache-dir --no-deps llama-cpp-python"
)

OnLoaded = Callable[[int, float], object]
MAX_RECORDS = 20_000  # records of rank 0 after which reports are requested, so that its memory stays small


@dataclass(frozen=True, slots=True)
class Figures:
    """What the ranks did in some time. `reports`: of each rank that took part. `draft_ledgers`: for each rank of a
    remote draft the runs that rank 0 sent it. `row_s`: seconds of one row in each stage's rank, timed at loading."""

    ledger: HeadLedger
    reports: dict[int, dict[str, Any]]
    draft_ledgers: dict[int, HeadLedger]
    row_s: dict[int, float]


class LoadedRanks:
    """Between `load` and `close` every rank of the plan holds its models; other ranks are in `load.run_stage`."""

    def __init__(self, context: Context, plan: JobPlan, on_loaded: OnLoaded = lambda rank, loaded_s: None) -> None:
        """`on_loaded` is called with the seconds that it took for every rank that has loaded."""
        self.context, self.plan, self.on_loaded = context, plan, on_loaded
        self._ranks = [stage.rank for stage in plan.assignment.stages]
        self.remote_ranks = sorted(plan.assignment.computing - {0})
        self._stage: LoadedModel | None = None
        self._drafts: dict[int, LoadedModel] = {}  # by number
        self._costs: dict[int, RunCosts] = {}  # of each stage's rank
        self._draft_costs: dict[int, dict[int, float]] = {}  # of each remote draft: rows of a run -> seconds
        self._pipeline: HeadPipeline[Verdict] | None = None
        self._draft_pipelines: dict[int, HeadPipeline[GuessVerdict]] = {}  # of remote drafts, by number
        self._drafter: ModelDrafter | None = None
        self._lookup: LookupDrafter | None = None
        self._blocks = set[BlockKey]()  # that all stages have
        self._draft_s = 0.0  # of a step of one row; 0 where no draft is on this rank
        self._local_figures: tuple[HeadLedger, dict[str, Any], dict[int, HeadLedger]] | None = None
        self._figures: dict[int, dict[str, Any]] = {}

    def load(self) -> None:
        """Load the models. Raises JobError with the error of the lowest rank that failed; all ranks have ended then."""
        report: dict[str, Any] = {}
        start_s = CLOCK()
        try:
            self._stage, self._drafts = load_own(self.context, self.plan)
            if self._drafts:
                self._drafter = make_drafter(self.context, self.plan, self._drafts[0])
                pace = self.plan.pace
                self._draft_s = pace.drafts[0].seconds(1, 0) if pace else time_row(self._drafts[0], CLOCK)
                expect(self._draft_s * self.plan.capacity.n_guess_rows)
            self.on_loaded(0, CLOCK() - start_s)
            if (self._drafts or not self.plan.numerics.exact) and not amx_works():
                complain(NO_AMX)
            if self._stage:
                report = stage_report(self.context, self.plan, self._stage)
            self._draft_costs = {
                number: time_draft(self.context, self.plan, draft, number).rows
                for number, draft in self._drafts.items()
                if number
            }
        except UserError as caught:
            report = {"error": str(caught)}
        reports = {0: report} | self._reports()
        costs = {rank: each.get("costs", RunCosts()) for rank, each in reports.items()}
        self._costs = {rank: costs[rank] for rank in self._ranks}
        for number, stages in self.plan.assignment.remote_drafts.items():
            if number not in self._drafts:
                self._draft_costs[number] = slowest_stage([costs[stage.rank].rows for stage in stages])
        self._connect()
        if error := first_error(reports):
            self.close()
            raise JobError(error)
        if self.plan.room:
            self._blocks = set.intersection(*(set(reports[rank]["blocks"]) for rank in self._ranks))
        gpus = {rank: reports[rank]["gpu"] for rank in self._ranks}
        if line := inexact_line(self.plan, gpus):
            complain(line)

    def _connect(self) -> None:
        """Make rank 0's ends of the pipelines, with the stages that it hosts itself."""
        context, plan, comm = self.context, self.plan, self.context.link.comm
        progress, n_posted = progress_between(comm, plan.hosts), N_POSTED if plan.post_ahead else 0
        how = make_courier(context, plan), plan.numerics.wire_type, progress, n_posted, context.clock
        worker = make_worker(context, plan, self._stage) if self._stage else None
        n_features = len(plan.layers_read) * plan.model.n_embd
        n_scored = max(plan.capacity.n_nodes + 1, LARGEST)  # of prompts too: a chunk with the root, or a block
        n_bytes = verdict_bytes(plan.n_rows_max, n_scored=n_scored, n_features=n_features)
        self._pipeline = HeadPipeline(comm, self._ranks, worker, n_bytes, decode_verdict, *how)
        for number, stages in plan.assignment.remote_drafts.items():
            draft, ranks = self._drafts.get(number), [stage.rank for stage in stages]
            draft_worker = make_draft_worker(context, plan, number, draft) if draft else None
            pipeline = HeadPipeline(comm, ranks, draft_worker, N_GUESS_BYTES, decode_guess_verdict, *how)
            self._draft_pipelines[number] = pipeline

    @property
    def _pipelines(self) -> list[HeadPipeline[Any]]:
        return [*([self._pipeline] if self._pipeline else []), *self._draft_pipelines.values()]

    def make_engine(self, has_work: Callable[[], bool], on_tokens: Callable[[Sequence[Emission]], object]) -> Engine:
        """The engine of all requests. `has_work`: returns True to end a wait. `on_tokens`: as in `Engine`."""
        context, plan, capacity = self.context, self.plan, self.plan.capacity
        assert self._pipeline
        n_cells, n_guess_rows, model, blocks = capacity.n_cells, capacity.n_guess_rows, plan.model, plan.numerics.blocks
        levels = dict[int, Level]()
        for number, pipeline in self._draft_pipelines.items():
            pool = SequencePool(capacity.n_seq, n_cells, window=plan.drafts[number].window)
            n_rows = largest_question(self._draft_costs[number]) if number else n_guess_rows
            levels[number] = Level(pipeline, pool, n_chunk=n_guess_rows, n_rows=n_rows)
        kind = plan.numerics.parked, model.rewinds, capacity.n_target_guesses, model.window
        pool = SequencePool(capacity.n_target_seq, n_cells, *kind)
        target = Level(self._pipeline, pool, n_chunk=capacity.n_batch, n_rows=capacity.n_nodes, blocks=blocks)
        drafter: Drafter | Level | None = self._drafter or levels.pop(0, None)
        if not isinstance(drafter, Level) and plan.looks_up is not False:
            drafter = self._lookup = LookupDrafter(drafter)
        waiter = HeadWaiter(context.flag.check, self._pipeline, has_work)
        engine = Engine(
            target,
            drafter,
            waiter,
            context.clock,
            on_tokens,
            drafts=list(levels.values()),
            run_cost=run_cost(self._costs.values(), plan),
            limits=OpenLimits(capacity.n_requests, capacity.n_prompts, ahead_of(capacity.n_ctx)),
            max_delay_s=plan.max_delay_s,
            draft_s=self._draft_s,
        )
        if room := plan.room:
            engine.admission.store(self._blocks, room, self._say_full, plan.kv_read_only)
        if not all(each.is_at_head for each in self._pipelines):  # else nothing comes while this rank evaluates
            for each in self._pipelines:
                each.listen_by(engine.listen)
        self.configure(engine, plan.engine)
        if line := engine.batches.too_short:
            complain(line)
        return engine

    def configure(self, engine: Engine, settings: EngineSettings) -> None:
        """Apply the settings of an ablation or of another policy to an engine without open requests."""
        engine.target.cancel = settings.cancel
        if self._lookup:
            self._lookup.is_on = settings.looks_up
        pools = [level.pool for level in engine.levels] + ([self._drafter.pool] if self._drafter else [])
        for pool in pools:
            n_seq = settings.n_target_seq if pool is engine.target.pool else settings.n_seq
            if pool.n_seq != n_seq:
                engine.forget()
                pool.resize(n_seq)

    def _say_full(self, n_tokens: int) -> None:
        size = f"--kv-disk {size_text(self.plan.kv_disk)}" if self.plan.kv_disk else f"-cram {self.plan.kv_ram >> 20}"
        holds = f"{size} a rank has room for the first {n_tokens} tokens of a text"
        complain(f"{holds}; what follows them is not kept, and evaluated again")

    def unlearn(self) -> None:
        """Forget what lookup learned from texts. Policies and measured times stay."""
        if self._lookup:
            self._lookup.unlearn()

    @property
    def n_runs(self) -> int:
        """Runs of the target since the start."""
        assert self._pipeline
        return self._pipeline.n_submitted

    @property
    def n_records(self) -> int:
        """Runs and waits that rank 0 has recorded since the last reports."""
        return sum(each.ledger.n_notes for each in self._pipelines)

    def request_figures(self) -> None:
        """Request reports, which ranks send after their pending runs and `poll_figures` returns."""
        assert self._pipeline and not self.awaits_figures
        for each in self._pipelines:
            each.ask_reports()
        ledgers = {number: pipeline.take_ledger() for number, pipeline in self._draft_pipelines.items()}
        drafts = self.plan.assignment.drafts
        draft_ledgers = {stage.rank: ledger for number, ledger in ledgers.items() for stage in drafts[number]}
        local = self.context.take_figures(self._pipeline.worker, self._pipeline.outbox, None)
        self._local_figures = self._pipeline.take_ledger(), local, draft_ledgers

    @property
    def awaits_figures(self) -> bool:
        """Whether reports were requested that have not been returned."""
        return self._local_figures is not None

    def poll_figures(self) -> Figures | None:
        """The requested reports once all have arrived, else None."""
        assert self._local_figures
        while len(self._figures) < len(self.remote_ranks) and (report := self.context.link.next_report()):
            self._figures[report[0]] = report[1]
        if len(self._figures) < len(self.remote_ranks):
            return None
        (ledger, local, draft_ledgers), reports = self._local_figures, self._figures
        self._local_figures, self._figures = None, {}
        row_s = {rank: costs.rows[1] for rank, costs in self._costs.items()}
        return Figures(ledger, {0: local} | reports, draft_ledgers, row_s)

    def take_figures(self) -> Figures:
        """What every rank did since the last reports. Waits for the stages' pending runs."""
        if not self.awaits_figures:
            self.request_figures()
        return Idle().until(self.poll_figures)

    def close(self) -> None:
        """End the stages' loops and free this rank's models."""
        for pipeline in self._pipelines:
            pipeline.shutdown()
        self.context.close()
        for model in (self._stage, *self._drafts.values()):
            if model:
                model.close()

    def _reports(self) -> dict[int, dict[str, Any]]:
        reports: dict[int, dict[str, Any]] = {}
        while len(reports) < len(self.remote_ranks):
            rank, report = Idle().until(self.context.link.next_report)
            reports[rank] = report
            if "loaded_s" in report:
                self.on_loaded(rank, report["loaded_s"])
        return reports


def first_error(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """The error of the lowest rank that has one; else empty."""
    return next((report["error"] for _, report in sorted(reports.items()) if report.get("error")), "")
