"""A batch in one MPI job: many requests share the loaded models, each result is written when it is there."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from pipeinfer import __version__
from pipeinfer.core.requests import Finish
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.batch.batch_file import BatchRequest
from pipeinfer.job.batch.batch_prepare import BatchOptions, BatchWork, prepare_batch
from pipeinfer.job.batch.batch_results import refusal_of, result_of
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.experiment import describe_drafts, describe_model
from pipeinfer.job.requests.logprobs import Entry, speller
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.open_requests import News, Open, OpenRequests
from pipeinfer.job.session.open_session import open_session
from pipeinfer.job.session.rank_uses import RankUses
from pipeinfer.job.session.session import N_NOTED
from pipeinfer.models.text.grammar_check import TOO_MUCH
from pipeinfer.observe.progress import ProgressBar
from pipeinfer.observe.report import stderr_console
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.observe.throughput import Throughput, show_throughput


def run_batch(asked: BatchOptions) -> int:
    """`pipeinfer batch`, on every rank; returns the exit code."""
    return start_prepared(
        asked, asked.run, lambda options, hosts: prepare_batch(replace(asked, run=options), hosts),
        lambda *head: Batch(*head).run(),
    )  # fmt: skip


class Batch:
    """Rank 0's part of one."""

    def __init__(self, context: Context, plan: JobPlan, work: BatchWork) -> None:
        self.context, self.plan, self.work, self.printing = context, plan, work, work.printing
        self.console = stderr_console()
        self.throughput = Throughput()
        self.n_completed = self.n_failed = self.open_max = 0
        self._asked: dict[Open, tuple[BatchRequest, str]] = {}  # with its id
        self._entries: dict[Open, list[Entry]] = {}
        self._spell = speller(work.prompts.tokenizer)
        self._coming = work.ready()
        self._next: tuple[BatchRequest, GenerationRequest | UserError, str] | None = None

    def run(self) -> int:
        """Returns the exit code."""
        work = self.work
        brief = f"context {self.plan.capacity.n_ctx}, {work.n_left} of {work.n_requests} requests left"
        show_start(self.console, self.plan, brief, self._about(), self.printing.verbose)
        with closing(work), open_session(self.context, self.plan, verbose=self.printing.verbose) as self.session:
            self.progress = ProgressBar(self.console, CLOCK, "batch", work.n_requests, "requests", stays=True)
            self.requests = OpenRequests(self.context, self.session, work.prompts.tokenizer, self._take)
            self.start_s = CLOCK()
            self.uses = RankUses(self.plan, self.start_s)
            try:
                self._serve()
            except StopRequested:
                pass
            except UserError as error:  # a full disk, or a file that was changed
                self.context.flag.note(str(error), 2)
            self.requests.stop_all()  # it is asked again when the batch is resumed
            self.progress.close()
            self.end_s = CLOCK()
            self.uses.note(self.session.take_figures(), self.end_s)
        return self._report()

    def _about(self) -> str:
        work, n_open = self.work, self.plan.capacity.n_requests
        return (
            f"policy {work.policy.name}, {work.n_left} of {work.n_requests} requests left, up to {n_open} at a time, "
            f"context {self.plan.capacity.n_ctx}"
        )

    def _serve(self) -> None:
        """Until every request has its result."""
        self.work.output.go_on()
        self._advance()
        self._admit()
        while self.requests.engine.busy:
            self.requests.step()
            if self.session.n_noted >= N_NOTED:
                self.uses.note(self.session.take_figures(), CLOCK())

    def _advance(self) -> None:
        """To the next one in the file, with what was noted of it."""
        self._next = None
        for request, asked in self._coming:
            id = self.work.id(request)
            self._next = request, asked if isinstance(asked, UserError) else self.work.journal.begin(id, asked), id
            return

    def _admit(self) -> None:
        """Open those that come next in the file, while there is room."""
        while self._next:
            request, asked, id = self._next
            if isinstance(asked, UserError):
                self._refuse(request, id, str(asked))
            elif self.requests.has_room(asked):
                self._asked[self.requests.begin(asked)] = request, id
                self.open_max = max(self.open_max, len(self.requests))
            else:
                return
            self._advance()

    @property
    def _n_written(self) -> int:
        """Results in the file."""
        return self.work.n_done + self.n_completed + self.n_failed

    def _take(self, news: Sequence[News]) -> None:
        for each in news:
            self.progress.update(self._n_written, len(each.tokens))
            self.work.journal.came(self._asked[each.opened][1], each.tokens)
            if each.entries:
                self._entries.setdefault(each.opened, []).extend(each.entries)
            if each.ended:
                self._write(each.opened)
        self._admit()

    def _write(self, opened: Open) -> None:
        """The request has ended: keep its result, and forget it."""
        (asked, id), model = self._asked.pop(opened), self.plan.model.path.name
        entries = self._entries.pop(opened, [])
        if opened.request.finish is Finish.FAILED:
            self._refuse(asked, id, TOO_MUCH)
            return
        self.work.output.write(result_of(id, asked, opened, entries, self._spell, model))
        self.work.journal.ended(id)
        self.n_completed += 1
        self.throughput.add(opened.metrics)
        self.progress.update(self._n_written, 0)

    def _refuse(self, asked: BatchRequest, id: str, message: str) -> None:
        self.work.output.write(refusal_of(id, asked, message))
        self.work.journal.ended(id)
        self.n_failed += 1

    # -- the end

    def _report(self) -> int:
        """Returns the exit code."""
        flag, result = self.context.flag, self._figures()
        show_throughput(self.console, result, self.printing.verbose)
        if self.printing.json:
            print(json_text(result), flush=True)
        if flag.reason:
            kept = f"{self.work.output.path} has what is complete" if self._n_written else "no result is complete yet"
            complain(f"{flag.reason}; {kept}, the same command goes on from there")
        return flag.exit_code

    def _figures(self) -> dict[str, Any]:
        """The object that --json prints and the statistics show."""
        work, drafts = self.work, self.plan.drafts
        return {
            "requests": work.n_requests,
            "done_before": work.n_done,
            "completed": self.n_completed,
            "failed": self.n_failed,
            "left": work.n_requests - self._n_written,
            "open_max": self.open_max,
            "preempted_n": self.throughput.n_preempted,
            **self.throughput.figures(self.end_s - self.start_s, self.n_completed),
            "version": __version__,
            "model": describe_model(self.plan.model),
            "model_draft": describe_drafts(drafts) if drafts else None,
            "ranks": self.uses.ranks(),
        }
