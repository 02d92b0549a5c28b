"""Rank 0's part of `pipeinfer run`: stream the text of one generation, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from pipeinfer.cli.asked import asked_of
from pipeinfer.cli.context import CLOCK, Context, complain
from pipeinfer.cli.json_text import json_text
from pipeinfer.cli.outcome import make_result
from pipeinfer.cli.progress import PromptProgress
from pipeinfer.cli.report import show_plan, show_ranks, show_statistics, stderr_console
from pipeinfer.cli.session import Generation, Session
from pipeinfer.cli.setup import Job
from pipeinfer.cli.streams import exit_code, lost
from pipeinfer.cli.tracks import write_trace
from pipeinfer.errors import UserError
from pipeinfer.models.tokenizer import TextStream, Tokenizer
from pipeinfer.policies.factory import make_policy
from pipeinfer.results import append_result, result_row


class Head:
    """Rank 0's part of one job."""

    def __init__(self, context: Context, job: Job, tokenizer: Tokenizer) -> None:
        self.context, self.job, self.options = context, job, context.options
        self.console = stderr_console()
        self.stream = TextStream(tokenizer)
        self.text = ""

    def run(self) -> int:
        """Returns the exit code."""
        flag = self.context.flag
        show_plan(self.console, self.job, self.options.policy)
        session = Session(self.context, self.job, self._show_loaded)
        try:
            session.open()
        except UserError as error:
            complain(str(error))
            return 2
        for warning in self.job.warnings:
            complain(warning)
        flag.orderly = True  # from now on there is a text to be kept
        progress = PromptProgress(self.console, CLOCK, len(self.job.prompt) - 1)
        generation = session.generate(
            self.job,
            self.options,
            make_policy(self.options.policy, self.options.speculation),
            self._push,
            cancel=self.options.cancel,
            on_prompt=lambda request, n_rows: progress.update(n_rows),
        )
        progress.close()
        self._print(self.stream.flush())
        session.close()
        code = self._report(generation)
        if flag.reason and not lost(sys.stdout):
            complain(f"{flag.reason}; the text up to here is complete")
        return flag.exit_code or code

    def _show_loaded(self, rank: int, loaded_s: float) -> None:
        self.console.print(f"rank {rank} ({self.job.plan.describe(rank)}) loaded in {loaded_s:.1f} s", style="dim")

    # -- text

    def _push(self, tokens: Sequence[int]) -> None:
        self._print("".join(self.stream.push(token) for token in tokens))

    def _print(self, text: str) -> None:
        self.text += text
        if self.options.json:
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        if error := lost(sys.stdout):
            self.context.flag.set("standard output is lost", exit_code(error))  # the next wait ends the request

    # -- reporting

    def _report(self, generation: Generation) -> int:
        """Returns the exit code: 2 when a file could not be written."""
        result: dict[str, Any] = make_result(self.text, generation, self.job, self.options)
        if self.options.json:
            print(json_text(result), flush=True)
        if not self.text.endswith("\n"):
            self.console.print()  # on a terminal the statistics begin on a line of their own
        for notice in generation.metrics.notices:
            complain(notice)
        show_statistics(self.console, result)
        if self.options.verbose:
            show_ranks(self.console, result)
        return self._write_files(result, generation)

    def _write_files(self, result: dict[str, Any], generation: Generation) -> int:
        """Every file that was asked for, whatever became of the others."""
        results, trace = self.options.results, self.options.trace
        writing: list[Callable[[], None]] = []
        if results:
            writing.append(lambda: append_result(results, result_row(result, asked_of(self.job, self.options))))
        if trace:
            writing.append(lambda: write_trace(trace, generation, self.job))
        code = 0
        for write in writing:
            try:
                write()
            except UserError as error:
                complain(str(error))
                code = 2
        return code
