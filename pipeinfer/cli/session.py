"""Rank 0's hold on the loaded models of all ranks: run one request after another, collect everyone's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeinfer.cli.context import CLOCK, Context
from pipeinfer.cli.load import load_draft, load_stage, make_courier, make_drafter, make_worker
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.setup import N_GUESS_ROWS, Job
from pipeinfer.cluster.calibrate import cheapest_microbatch, interpolate_cost, slowest_stage, time_rows
from pipeinfer.cluster.idle import Idle
from pipeinfer.cluster.mpi import HeadPipeline
from pipeinfer.cluster.pace import LoadedModel
from pipeinfer.cluster.wire import Kind
from pipeinfer.engine import Engine
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.ledger import HeadLedger
from pipeinfer.metrics import RequestMetrics
from pipeinfer.policies import Policy
from pipeinfer.policies.factory import PolicyOptions
from pipeinfer.requests import Request
from pipeinfer.sequences import SequencePool


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request gave. `figures`: what each rank that took part reports of itself."""

    request: Request
    metrics: RequestMetrics
    ledger: HeadLedger
    n_cancel_messages: int
    figures: dict[int, dict[str, Any]]


class Session:
    """Between `open` and `close` every rank of `job`'s plan holds its models. Other ranks are in `worker.run_stage`."""

    def __init__(self, context: Context, job: Job, on_loaded: Callable[[int, float], None]) -> None:
        """`on_loaded(rank, seconds)` is called for every remote stage that has loaded."""
        self.context, self.job, self.on_loaded = context, job, on_loaded
        self._ranks = [stage.rank for stage in job.plan.stages]
        self.remote_ranks = [rank for rank in self._ranks if rank != 0]
        self._stage: LoadedModel | None = None
        self._draft: LoadedModel | None = None
        self._costs: list[dict[int, float]] = []  # of each stage: rows of a run -> seconds

    def open(self) -> None:
        """Load. Raises UserError, all ranks sent home, when one of them could not: the error of the lowest rank."""
        error = ""
        try:
            self._stage = load_stage(self.context, self.job, self._go_on)
            self._draft = load_draft(self.context, self.job, self._go_on)
            if self._stage:
                self._costs.append(time_rows(self._stage, CLOCK))
        except UserError as caught:
            error = str(caught)
        reports = self._reports()
        self._costs += [report["cost_s"] for report in reports.values() if "cost_s" in report]
        error = next((report["error"] for _, report in sorted(reports.items()) if "error" in report), error)
        if error:
            self.close()
            raise UserError(error)

    def generate(
        self,
        job: Job,
        options: RunOptions,
        policy: Policy,
        on_tokens: Callable[[Sequence[int]], None],
        cancel: bool = True,
    ) -> Generation:
        """One request from an empty cache to its end; also when the user stops it, or `on_tokens` finds no reader.

        `cancel`: tell the stages of runs that cannot count any more.
        """
        context, worker, drafter = self.context, None, None
        if self._stage:
            self._stage.clear()
            worker = make_worker(context, job, self._stage)
        if self._draft and options.draft_in_use:
            self._draft.clear()
            drafter = make_drafter(job, self._draft, options.couple)
        courier = make_courier(context, job)
        pipeline = HeadPipeline(context.link.comm, self._ranks, worker, job.n_rows_max, context.flag.check, courier)
        pool = SequencePool(job.n_seq, job.n_cells, parked=options.numerics == "exact")
        engine = Engine(
            pipeline, pool, drafter, CLOCK, n_chunk=job.n_batch, n_rows_max=N_GUESS_ROWS, cancel=cancel,
            run_cost=interpolate_cost(slowest_stage(self._costs)), tracer=context.tracer,
        )  # fmt: skip
        request = Request(0, job.prompt, job.n_predict, job.sampling, job.n_ctx, job.end_tokens)
        metrics = engine.add(request, policy)
        self._drive(engine, request, on_tokens)
        pipeline.shutdown(Kind.PAUSE)
        figures = {0: context.figures(worker, pipeline.outbox, None)} | self._reports()
        return Generation(request, metrics, pipeline.ledger, pipeline.n_cancel_messages, figures)

    def tuned(self, options: PolicyOptions) -> PolicyOptions:
        """The options with what they leave to the costs filled in."""
        return replace(options, microbatch=options.microbatch or cheapest_microbatch(slowest_stage(self._costs)))

    def close(self) -> None:
        """Send the stages home and free what this rank holds."""
        courier = make_courier(self.context, self.job)
        pipeline = HeadPipeline(self.context.link.comm, self._ranks, None, 1, lambda: None, courier)
        pipeline.shutdown()
        for model in (self._stage, self._draft):
            if model:
                model.close()

    def _go_on(self, fraction: float) -> bool:
        return not self.context.flag.reason

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
                engine.stop(request)
            for emission in engine.generate():
                on_tokens(emission.tokens)
        except StopRequested:
            _drain(engine, request)
        except BrokenPipeError:
            self.context.flag.note("nobody reads the output", 141)
            _drain(engine, request)


def _drain(engine: Engine, request: Request) -> None:
    engine.stop(request)
    for _ in engine.generate():
        raise AssertionError("a stopped request emitted tokens")
