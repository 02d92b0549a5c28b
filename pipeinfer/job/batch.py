"""A batch in one MPI job: many requests share the loaded models, each result is written when it is there."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.core.engine import Engine
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.batch_prepare import BatchOptions, BatchWork, prepare_batch
from pipeinfer.job.batch_prompts import Ready
from pipeinfer.job.batch_results import refusal_of, result_of
from pipeinfer.job.batch_summary import Summary
from pipeinfer.job.context import CLOCK, Context, complain
from pipeinfer.job.deployment import Deployment
from pipeinfer.job.plan_table import show_plan
from pipeinfer.job.printer import Printer
from pipeinfer.job.request import GenerationRequest
from pipeinfer.job.session import Session
from pipeinfer.job.start import run_prepared, start_job
from pipeinfer.observe.json_text import json_text
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.progress import BatchProgress
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.throughput import show_throughput

N_NOTED = 20_000
"""Runs after which the ranks are asked what they did: what they note of them would grow without end."""


def run_batch(asked: BatchOptions) -> int:
    """`pipeinfer batch`, on every rank; returns the exit code."""
    return start_job(
        lambda crew: run_prepared(
            crew, asked.run, lambda options, hosts: prepare_batch(asked, hosts), lambda *head: Batch(*head).run()
        ),
        asked,
        asked.run.verbose,
    )


@dataclass(slots=True)
class Open:
    """A request in the engine."""

    ready: Ready
    request: Request
    printer: Printer
    metrics: RequestMetrics
    n_heard: int = 0  # tokens of its text that have come

    @property
    def reads_blocks(self) -> bool:
        """Whether its prompt takes a context of its own now."""
        return bool(self.request.spans) and not self.metrics.token_s


class Batch:
    """Rank 0's part of one."""

    def __init__(self, context: Context, deployment: Deployment, work: BatchWork) -> None:
        self.context, self.deployment, self.work, self.options = context, deployment, work, context.options
        self.console = stderr_console()
        self.session = Session(context, deployment, lambda rank, loaded_s: None)
        self.summary = Summary(deployment, work)
        self.open: dict[int, Open] = {}
        self._coming = work.ready()
        self._next: Ready | None = None

    def run(self) -> int:
        """Returns the exit code."""
        flag, work = self.context.flag, self.work
        show_plan(self.console, self.deployment, self._about())
        try:
            self.session.open()
        except UserError as error:
            complain(str(error))
            work.close()
            return 2
        for warning in self.deployment.warnings:
            complain(warning)
        flag.orderly = True  # what is complete is kept
        self.progress = BatchProgress(self.console, CLOCK, work.n_requests, work.n_done)
        engine = self.session.set_up(self.options)
        self.summary.begin(CLOCK())
        self._next = next(self._coming, None)
        try:
            self._serve(engine)
        except StopRequested:
            pass
        except UserError as error:  # a full disk, or a file that was changed
            flag.note(str(error), 2)
        self._stop(engine)
        self.progress.close()
        self.summary.end(CLOCK(), self.session.take_figures())
        self.session.close()
        work.close()
        return self._report()

    def _about(self) -> str:
        work, policy = self.work, self.options.policy.name
        return (
            f"policy {policy}, {work.n_left} of {work.n_requests} requests left, up to {self.options.parallel} at a "
            f"time, context {work.n_ctx}"
        )

    def _serve(self, engine: Engine) -> None:
        """Until every request has its result."""
        self._admit(engine)
        while engine.busy:
            if emission := engine.step():
                self._take(engine, emission)
            if self.session.n_noted >= N_NOTED:
                self.summary.note(self.session.take_figures(), CLOCK())

    def _stop(self, engine: Engine) -> None:
        """Give up what is open: it is asked again when the batch is resumed."""
        for opened in self.open.values():
            engine.stop(opened.request)
        for _ in engine.generate():
            pass

    # -- requests that begin

    def _admit(self, engine: Engine) -> None:
        """Open those that come next in the file, while there is room."""
        while self._next and (isinstance(self._next.asked, UserError) or self._has_room(self._next.asked)):
            ready, asked = self._next, self._next.asked
            if isinstance(asked, UserError):
                self._refuse(ready, str(asked))
            else:
                self._open(engine, ready, asked)
            self._next = next(self._coming, None)

    def _has_room(self, asked: GenerationRequest) -> bool:
        n_reserved = sum(each.request.n_tokens_most for each in self.open.values())
        n_reading = sum(each.reads_blocks for each in self.open.values())
        return (
            len(self.open) < self.options.parallel
            and (not self.open or n_reserved + asked.n_ctx <= self.work.n_ctx)
            and n_reading < self.options.n_prompts
        )

    def _open(self, engine: Engine, ready: Ready, asked: GenerationRequest) -> None:
        printer = Printer(self.context.flag, self.work.prompts.tokenizer, asked, silent=True)
        opened = Open(ready, asked.open(self.session.next_id()), printer, RequestMetrics())
        self.open[opened.request.id] = opened
        self.summary.open_max = max(self.summary.open_max, len(self.open))
        engine.add(opened.request, self.options.policy.begin(), opened.metrics)

    # -- tokens and results

    def _take(self, engine: Engine, emission: Emission) -> None:
        request = emission.request
        opened = self.open.get(request.id)
        if opened is None:  # a stop string has ended it
            return
        opened.n_heard += len(emission.tokens)
        if opened.printer.push(emission.tokens):
            engine.stop(request, Finish.END)
        self.progress.update(self.summary.n_written, len(emission.tokens))
        if opened.printer.was_cut or (request.finish and opened.n_heard == request.n_generated):
            self._write(opened)
        self._admit(engine)

    def _write(self, opened: Open) -> None:
        """The request has ended: keep its result, and forget it."""
        opened.printer.finish()
        del self.open[opened.request.id]
        asked, printer, model = opened.ready.request, opened.printer, self.deployment.model.path.name
        result = result_of(
            self.work.id(asked), asked, opened.request, printer.text, printer.was_cut, opened.metrics, model
        )
        self.work.output.write(result)
        self.summary.completed(opened.metrics)
        self.progress.update(self.summary.n_written, 0)

    def _refuse(self, ready: Ready, message: str) -> None:
        self.work.output.write(refusal_of(self.work.id(ready.request), ready.request, message))
        self.summary.n_failed += 1

    # -- the end

    def _report(self) -> int:
        """Returns the exit code."""
        flag, result = self.context.flag, self.summary.figures()
        show_throughput(self.console, result)
        if self.options.json:
            print(json_text(result), flush=True)
        if flag.reason:
            complain(f"{flag.reason}; {self.work.output.path} has what is complete, the same command goes on from it")
        return flag.exit_code
