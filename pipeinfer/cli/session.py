"""Rank 0's hold on the loaded models of all ranks: run one request after another, collect everyone's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.load import (
    gpu_layers,
    guess_words,
    inexact_line,
    load_drafts,
    load_stage,
    make_courier,
    make_draft_worker,
    make_drafter,
    make_worker,
    time_loaded,
)
from pipeinfer.cli.memory import N_GUESS_ROWS
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import Job
from pipeinfer.cluster.calibrate import largest_question, slowest_stage
from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.mpi import HeadPipeline, HeadWaiter
from pipeinfer.cluster.pace import Courier, LoadedModel
from pipeinfer.cluster.wire import Kind, decode_guess_verdict, decode_verdict
from pipeinfer.engine import Engine
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.ledger import HeadLedger
from pipeinfer.levels import Level
from pipeinfer.metrics import RequestMetrics
from pipeinfer.models.ggml import amx_works
from pipeinfer.policies import Policy
from pipeinfer.requests import Finish, Request
from pipeinfer.run_cost import RunCost
from pipeinfer.runs import GuessVerdict
from pipeinfer.sequences import SequencePool

NO_AMX = (
    "this build of llama.cpp has AMX kernels that crash, so they are not used; for full speed install it again: "
    "CMAKE_ARGS=\"-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'\" pip install --force-reinstall --no-cache-dir --no-deps "
    "llama-cpp-python"
)


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request gave. `figures`: what each rank that took part reports of itself. `refiners`: what rank 0 asked
    each larger draft's rank, and when. `row_s`: seconds of one row in each stage's rank, timed at loading."""

    request: Request
    metrics: RequestMetrics
    ledger: HeadLedger
    n_cancel_messages: int
    figures: dict[int, dict[str, Any]]
    refiners: dict[int, HeadLedger]
    row_s: dict[int, float]


class Session:
    """Between `open` and `close` every rank of `job`'s plan holds its models. Other ranks are in `worker.run_stage`."""

    def __init__(self, context: Context, job: Job, on_loaded: Callable[[int, float], None]) -> None:
        """`on_loaded(rank, seconds)` is called for every remote stage that has loaded."""
        self.context, self.job, self.on_loaded = context, job, on_loaded
        self._ranks = [stage.rank for stage in job.plan.stages]
        self.remote_ranks = [rank for rank in {*self._ranks, *job.plan.drafts} if rank != 0]
        self._stage: LoadedModel | None = None
        self._drafts: dict[int, LoadedModel] = {}  # by number
        self._costs: dict[int, dict[int, float]] = {}  # of each stage's rank: rows of a run -> seconds
        self._refiner_costs: dict[int, dict[int, float]] = {}  # the same of each larger draft, by number

    def open(self) -> None:
        """Load. Raises UserError, all ranks sent home, when one of them could not: the error of the lowest rank."""
        error = ""
        try:
            self._stage = load_stage(self.context, self.job, lambda fraction: True)
            self._drafts = load_drafts(self.context, self.job, lambda fraction: True)
            if (self._drafts or self.context.options.numerics == "fast") and not amx_works():
                complain(NO_AMX)
            if self._stage:
                self._costs[0] = time_loaded(self.context, self.job, self._stage)
            self._refiner_costs = {
                number: time_loaded(self.context, self.job, draft, number)
                for number, draft in self._drafts.items()
                if number
            }
        except UserError as caught:
            error = str(caught)
        reports = self._reports()
        for rank, report in sorted(reports.items()):
            costs = {number: report.get("cost_s", {}) for number in self._drafts_of(rank)}
            self._refiner_costs |= costs
            if not costs:
                self._costs[rank] = report.get("cost_s", {})
        error = first_error({0: {"error": error}} | reports)
        if error:
            self.close()
            raise UserError(error)
        on_gpu = {0: gpu_layers(self.context.options) != 0} | {rank: each["on_gpu"] for rank, each in reports.items()}
        line = inexact_line(self.context.options.numerics, [rank for rank in self._ranks if on_gpu[rank]])
        if line:
            complain(line)

    def generate(
        self,
        job: Job,
        options: RunOptions,
        policy: Policy,
        on_tokens: Callable[[Sequence[int]], None],
        cancel: bool = True,
        on_prompt: Callable[[Request, int], None] | None = None,
    ) -> Generation:
        """One request from an empty cache to its end, also when the user stops it.

        `cancel`: tell the stages of runs that cannot count any more. `on_prompt` hears how many rows of the prompt have
        been evaluated.
        """
        context, worker, drafter = self.context, None, None
        if self._stage:
            self._stage.clear()
            worker = make_worker(context, job, self._stage)
        for draft in self._drafts.values():
            draft.clear()
        if self._drafts and options.drafts_in_use:
            drafter = make_drafter(job, self._drafts[0], options.couple)
        courier = make_courier(context, job)
        comm, parked = context.link.comm, options.numerics == "exact"
        pipeline = HeadPipeline(comm, self._ranks, worker, job.n_rows_max, decode_verdict, courier)
        pool = SequencePool(job.n_seq, job.n_cells, parked=parked)
        larger = [self._draft_pipeline(job, number, courier) for number in self._refiner_costs]
        drafts = [
            Level(each, SequencePool(job.n_seq, job.n_cells), n_chunk=N_GUESS_ROWS, n_rows=largest_question(cost))
            for each, cost in zip(larger, self._refiner_costs.values(), strict=True)
        ]
        engine = Engine(
            Level(
                pipeline, pool, n_chunk=job.n_batch, n_rows=N_GUESS_ROWS, cancel=cancel, blocks=job.blocks
            ),
            drafter, HeadWaiter(context.flag.check, pipeline.ledger), CLOCK,
            drafts=drafts, run_cost=self._run_cost, tracer=context.tracer, on_prompt=on_prompt,
        )  # fmt: skip
        request = Request(0, job.prompt, job.n_predict, job.sampling, job.n_ctx, job.end_tokens)
        metrics = engine.add(request, policy)
        self._drive(engine, request, on_tokens)
        everything: list[HeadPipeline[Any]] = [pipeline, *larger]
        for each in everything:
            each.shutdown(Kind.PAUSE)
        figures = {0: context.figures(worker, pipeline.outbox, None)} | self._reports()
        ledgers = dict(zip(job.plan.refiners, (each.ledger for each in larger), strict=True))
        row_s = {rank: cost[1] for rank, cost in self._costs.items()}
        return Generation(request, metrics, pipeline.ledger, pipeline.n_cancel_messages, figures, ledgers, row_s)

    @cached_property
    def _run_cost(self) -> RunCost | None:
        """What runs cost, learned for as long as the models are loaded."""
        slowest = slowest_stage(list(self._costs.values()))
        return RunCost(slowest) if slowest else None

    def _drafts_of(self, rank: int) -> list[int]:
        """The numbers of the drafts on a rank."""
        return [number for number, host in enumerate(self.job.plan.drafts) if host == rank]

    def _draft_pipeline(self, job: Job, number: int, courier: Courier | None) -> HeadPipeline[GuessVerdict]:
        """The pipeline of a larger draft: one stage, here or on its own rank."""
        context, ranks = self.context, [job.plan.drafts[number]]
        worker = make_draft_worker(context, job, number, self._drafts[number]) if number in self._drafts else None
        n_words = guess_words(context.options)
        return HeadPipeline(context.link.comm, ranks, worker, n_words, decode_guess_verdict, courier)

    def close(self) -> None:
        """Send the stages home and free what this rank holds."""
        courier = make_courier(self.context, self.job)
        for ranks in (self._ranks, *([rank] for rank in self.job.plan.refiners)):
            HeadPipeline(self.context.link.comm, ranks, None, 1, decode_verdict, courier).shutdown()
        for model in (self._stage, *self._drafts.values()):
            if model:
                model.close()

    def _reports(self) -> dict[int, dict[str, Any]]:
        """One report of every remote rank."""
        reports: dict[int, dict[str, Any]] = {}
        while len(reports) < len(self.remote_ranks):
            rank, report = Idle().until(self.context.link.next_report)
            reports[rank] = report
            if "loaded_s" in report:
                self.on_loaded(rank, report["loaded_s"])
        return reports

    def _drive(self, engine: Engine, request: Request, on_tokens: Callable[[Sequence[int]], None]) -> None:
        try:
            if not request.n_predict:
                engine.stop(request, Finish.LENGTH)
            for emission in engine.generate():
                on_tokens(emission.tokens)
        except StopRequested:
            _drain(engine, request)


def first_error(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """That of the lowest rank; empty if all is well."""
    return next((report["error"] for _, report in sorted(reports.items()) if report.get("error")), "")


def _drain(engine: Engine, request: Request) -> None:
    engine.stop(request)
    for _ in engine.generate():
        raise AssertionError("a stopped request emitted tokens")
