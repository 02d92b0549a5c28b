"""Rank 0: load, drive the engine, stream the text, report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from itertools import pairwise
from typing import Any

from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.load import load_draft, load_stage
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.report import show_plan, show_ranks, show_statistics, stderr_console
from pipeinfer.cli.setup import N_GUESS_ROWS, N_SEQ, Job
from pipeinfer.cluster.mpi import HeadPipeline, Idle
from pipeinfer.drafting import ModelDrafter
from pipeinfer.engine import Engine
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.metrics import RequestMetrics, speculation, timings
from pipeinfer.models.tokenizer import TextStream, Tokenizer
from pipeinfer.policies import Iterative, PipeInfer, Policy, Speculative
from pipeinfer.requests import Request
from pipeinfer.results import append_result
from pipeinfer.sequences import SequencePool
from pipeinfer.trace import Span, write_chrome_trace


def make_policy(options: RunOptions) -> Policy:
    if options.policy == "iterative":
        return Iterative()
    if options.policy == "speculative":
        return Speculative(options.draft_max, options.width)
    return PipeInfer(options.microbatch, options.inflight, options.width)


class Head:
    """Rank 0's part of one job."""

    def __init__(self, context: Context, job: Job, tokenizer: Tokenizer) -> None:
        self.context, self.job, self.options = context, job, context.options
        self.console = stderr_console()
        self.stream = TextStream(tokenizer)
        self.text = ""

    def run(self) -> int:
        """Returns the exit code."""
        job, context = self.job, self.context
        draft = self.options.draft_in_use
        show_plan(self.console, job, self.options.policy, os.path.getsize(draft) if draft else None)
        worker, drafter, error = None, None, ""
        try:
            worker = load_stage(context, job, self._go_on)
            drafter = load_draft(context, job, self._go_on)
        except UserError as caught:
            error = str(caught)
        error = self._await_stages() or error
        ranks = [stage.rank for stage in job.plan.stages]
        pipeline = HeadPipeline(context.link.comm, ranks, worker, job.n_rows_max, context.flag.check)
        if error:
            pipeline.shutdown()
            complain(error)
            return 2
        result = self._generate(pipeline, drafter)
        pipeline.shutdown()
        figures = {0: context.figures(worker, pipeline.outbox)} | self._await_reports()
        self._report(result | self._cluster_figures(figures, pipeline), figures)
        if context.flag.reason and not self._reader_left:
            complain(f"{context.flag.reason}; the text up to here is complete")
        return context.flag.exit_code

    # -- loading

    def _go_on(self, fraction: float) -> bool:
        return not self.context.flag.reason

    def _remote_ranks(self) -> list[int]:
        return [stage.rank for stage in self.job.plan.stages if stage.rank != 0]

    def _await_reports(self) -> dict[int, Any]:
        """One report of every remote rank."""
        reports: dict[int, Any] = {}
        while len(reports) < len(self._remote_ranks()):
            rank, report = Idle().until(self.context.link.next_report)
            reports[rank] = report
            if "loaded_s" in report:
                layers = self.job.plan.describe(rank)
                self.console.print(f"rank {rank} ({layers}) loaded in {report['loaded_s']:.1f} s", style="dim")
        return reports

    def _await_stages(self) -> str:
        """The error of the lowest rank that could not load, or nothing."""
        return next((report["error"] for _, report in sorted(self._await_reports().items()) if "error" in report), "")

    # -- generating

    def _generate(self, pipeline: HeadPipeline, drafter: ModelDrafter | None) -> dict[str, Any]:
        job = self.job
        pool = SequencePool(N_SEQ, job.n_cells, parked=self.options.numerics == "exact")
        engine = Engine(
            pipeline, pool, drafter, CLOCK, n_chunk=job.n_batch, n_rows_max=N_GUESS_ROWS, tracer=self.context.tracer
        )
        request = Request(0, job.prompt, job.n_predict, job.sampling, job.n_ctx, job.end_tokens)
        metrics = engine.add(request, make_policy(self.options))
        try:
            if not job.n_predict:
                engine.stop(request)
            for emission in engine.generate():
                self._print("".join(self.stream.push(token) for token in emission.tokens))
        except StopRequested:
            self._drain(engine, request)
        except BrokenPipeError:
            self.context.flag.note("nobody reads the output", 141)
            self._drain(engine, request)
        with contextlib.suppress(BrokenPipeError):
            self._print(self.stream.flush())
        return self._outcome(request, metrics)

    def _drain(self, engine: Engine, request: Request) -> None:
        engine.stop(request)
        for _ in engine.generate():
            raise AssertionError("a stopped request emitted tokens")

    @property
    def _reader_left(self) -> bool:
        return self.context.flag.exit_code == 141

    def _print(self, text: str) -> None:
        self.text += text
        if self.options.json or self._reader_left:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # the interpreter flushes once more at its end: give it something that takes it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise

    # -- reporting

    def _outcome(self, request: Request, metrics: RequestMetrics) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": request.tokens[len(request.prompt) :],
            "prompt_tokens": list(request.prompt),
            "finish": request.finish.value if request.finish else None,
            "policy": self.options.policy,
            "seed": self.job.sampling.seed,
            "numerics": self.options.numerics,
            "timings": timings(metrics),
            "speculation": speculation(metrics),
        }

    def _cluster_figures(self, figures: dict[int, Any], pipeline: HeadPipeline) -> dict[str, Any]:
        ranks = [0, *self._remote_ranks()]
        hops = [
            {"from": rank, "to": following, "messages": figures[rank]["n_messages"], "bytes": figures[rank]["n_bytes"]}
            for rank, following in pairwise(ranks)
        ]
        return {
            "wire": {"hops": hops, "cancel_messages": pipeline.n_cancel_messages},
            "ranks": [self._rank_figures(rank, figures.get(rank, {})) for rank in range(self.job.plan.n_ranks)],
        }

    def _rank_figures(self, rank: int, figures: dict[str, Any]) -> dict[str, Any]:
        index = self.job.plan.stage_of(rank)
        stage = None if index is None else self.job.plan.stages[index]
        return {
            "rank": rank,
            "host": self.job.hosts[rank].name,
            "role": self.job.plan.describe(rank),
            "layers": [stage.first, stage.last] if stage else None,
            "weight_bytes": stage.weight_bytes if stage else 0,
            "kv_bytes": stage.kv_bytes if stage else 0,
            "threads": self.job.threads[rank],
            **{name: value for name, value in figures.items() if name not in ("spans", "n_messages", "n_bytes")},
        }

    def _report(self, result: dict[str, Any], figures: dict[int, Any]) -> None:
        if self.options.json and not self._reader_left:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(result), flush=True)
        if not self.text.endswith("\n"):
            self.console.print()  # on a terminal the statistics begin on a line of their own
        show_statistics(self.console, result)
        if self.options.verbose:
            show_ranks(self.console, result)
        if self.options.results:
            append_result(self.options.results, result, self.options.model, self.options.draft_in_use)
        if self.options.trace:
            tracks = [
                (f"rank {rank}: {self.job.plan.describe(rank)}", [Span(**span) for span in figures[rank]["spans"]])
                for rank in sorted(figures)
            ]
            write_chrome_trace(self.options.trace, tracks)
