"""Rank 0's part of `pipeinfer run`: stream the text of one generation, report."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from pipeinfer.core.requests import Finish
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.process.complain import complain
from pipeinfer.job.process.streams import lost
from pipeinfer.job.requests.constraints import complain_of_mismatch
from pipeinfer.job.requests.experiment import experiment_columns
from pipeinfer.job.requests.printer import Printer
from pipeinfer.job.run.run_work import RunWork
from pipeinfer.job.session.open_session import open_session
from pipeinfer.job.session.outcome import make_result, write_trace
from pipeinfer.job.session.session import Generation
from pipeinfer.models.text.grammar_check import TOO_MUCH
from pipeinfer.observe.progress import ProgressBar
from pipeinfer.observe.report import show_outcome, show_ranks, show_statistics, stderr_console
from pipeinfer.observe.results import Record, append_result, result_row
from pipeinfer.observe.texts.json_text import json_text


class Head:
    """Rank 0's part of one job."""

    def __init__(self, context: Context, plan: JobPlan, work: RunWork) -> None:
        self.context, self.plan, self.work = context, plan, work
        self.console = stderr_console()
        self.request = work.journal.begin(work.key, work.request)
        self.printer = Printer(context.flag, work.tokenizer, self.request, work.output.json)

    def run(self) -> int:
        """Returns the exit code."""
        flag, verbose = self.context.flag, self.work.output.verbose
        brief = f"context {self.request.n_ctx}, seed {self.request.sampling.seed}"
        show_start(self.console, self.plan, brief, self._about(), verbose)
        with open_session(self.context, self.plan, verbose=verbose) as session:
            progress = ProgressBar(self.console, CLOCK, "prompt", len(self.request.prompt) - 1, "tokens")
            self.printer.push(self.request.begun)
            generation = session.generate(self.request, self._take, progress.update)
            progress.close()
            self.printer.finish()
            if generation.request.finish is not Finish.STOPPED:
                self.work.journal.ended(self.work.key)
        code = self._report(generation)
        if generation.request.finish is Finish.END:
            complain_of_mismatch(self.request.sampling, self.printer.text)
        if generation.request.finish is Finish.FAILED:
            complain(TOO_MUCH)
            code = 2
        if flag.reason and not lost(sys.stdout):
            complain(f"{flag.reason}; the text up to here is complete")
        return flag.exit_code or code

    def _take(self, tokens: Sequence[int]) -> bool:
        self.work.journal.came(self.work.key, tokens)
        return self.printer.push(tokens)

    def _about(self) -> str:
        request, policy = self.request, self.request.policy.name
        noted = f", {len(request.begun)} tokens of it are noted" if request.begun else ""
        n_predict = f"up to {request.n_predict} tokens" if request.n_predict else "no tokens"
        return (
            f"policy {policy}, {len(request.prompt)} prompt tokens, {n_predict}, context {request.n_ctx}, "
            f"seed {request.sampling.seed}{noted}"
        )

    # -- reporting

    def _report(self, generation: Generation) -> int:
        """Returns the exit code: 2 when a file could not be written."""
        work = self.work
        asked = experiment_columns(self.plan, self.request, work.settings)
        result = make_result(self.printer.text, generation, self.plan, asked)
        if work.output.json:
            print(json_text(result), flush=True)
        if not self.printer.text.endswith("\n"):
            self.console.print()  # on a terminal the statistics begin on a line of their own
        for notice in generation.metrics.notices:
            complain(notice)
        if work.output.verbose:
            show_statistics(self.console, result)
            show_ranks(self.console, result["ranks"])
        else:
            show_outcome(self.console, result, work.has_draft, work.is_split)
        return self._write_files(result, asked, generation)

    def _write_files(self, result: dict[str, Any], asked: Record, generation: Generation) -> int:
        """Every file that was asked for, whatever became of the others."""
        results, trace = self.work.records.results, self.work.records.trace
        writing: list[Callable[[], None]] = []
        if results:
            writing.append(lambda: append_result(results, result_row(result, asked)))
        if trace:
            writing.append(lambda: write_trace(trace, generation, self.plan))
        code = 0
        for write in writing:
            try:
                write()
            except UserError as error:
                complain(str(error))
                code = 2
        return code
