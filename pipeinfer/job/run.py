"""Rank 0's part of `pipeinfer run`: stream the text of one generation, report."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.core.requests import Finish
from pipeinfer.errors import UserError
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.options.options import JobOutput, RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import prepare
from pipeinfer.job.process.streams import complain, lost_output
from pipeinfer.job.process.supervised import tell_exit
from pipeinfer.job.requests.journal import Journal, model_id, open_journal
from pipeinfer.job.requests.request import GenerationRequest, complain_of_mismatch
from pipeinfer.job.session.result import ExperimentSettings, experiment_columns, generation_result
from pipeinfer.job.session.session import Generation, open_session
from pipeinfer.models.text.grammar import TOO_MUCH
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.columns import digest
from pipeinfer.observe.figures import Result
from pipeinfer.observe.report import ProgressBar, show_outcome, show_ranks, show_statistics, show_table, stderr_console
from pipeinfer.observe.table import RESULTS
from pipeinfer.text import json_text

if TYPE_CHECKING:  # imports what most runs do not need
    from pipeinfer.job.planning.machines import TimedMachine


def prepare_run(options: RunOptions, hosts: Sequence[Host]) -> "tuple[JobPlan, RunHead]":
    """Raises UserError for whatever is wrong with options and files."""
    plan, (request, tokenizer) = prepare(options, hosts)
    as_given = replace(request, sampling=replace(request.sampling, seed=options.sampling.seed))
    model, placement = model_id(plan), options.placement
    key = digest((as_given, model[0], options.numerics.rounding))
    journal = open_journal(options.output.resume, model, options.text.now_s)
    settings, is_split = ExperimentSettings.of(options), placement.layer_split is not None and not placement.plan
    has_draft, request = bool(options.models.drafts), journal.begin(key, request.within(plan.capacity.n_ctx))
    return plan, RunHead(plan, request, tokenizer, key, journal, settings, options.output, has_draft, is_split)


@dataclass(slots=True)
class RunHead:
    """Rank 0's part. `key`: names the request in notes. `has_draft`, `is_split`: a draft, a split are given."""

    plan: JobPlan
    request: GenerationRequest
    tokenizer: Tokenizer
    key: str
    journal: Journal
    settings: ExperimentSettings
    output: JobOutput
    has_draft: bool
    is_split: bool
    console: Console = field(default_factory=stderr_console)
    context: Context = field(init=False)

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        self.context = context
        flag, request, verbose = self.context.flag, self.request, self.output.verbose
        n_prompt = len(request.prompt)
        brief = f"context {request.n_ctx}, seed {request.sampling.seed}"
        resumed = f", {len(request.begun)} tokens of it are noted" if request.begun else ""
        n_predict = f"up to {request.n_predict} tokens" if request.n_predict else "no tokens"
        about = f"policy {request.policy.name}, {n_prompt} prompt tokens, {n_predict}, {brief}{resumed}"
        show_start(self.console, self.plan, brief, about, verbose)
        opened = open_session(self.context, self.plan, self.tokenizer, verbose=verbose)
        with closing(self.journal):
            with opened as session:
                progress = ProgressBar(self.console, CLOCK, "prompt", n_prompt - 1, "tokens")
                on_tokens = partial(self.journal.add_output, self.key)
                generation = session.generate(request, on_tokens, progress.update, self.output.json)
                progress.close()
                machine = self._time_machine()
            code = self._report(generation, machine)
            if generation.request.finish is not Finish.STOPPED:
                tell_exit(flag.exit_code or code)  # before notes go, without which a next job has another text
                self.journal.end(self.key)
        if flag.reason and not lost_output(sys.stdout):
            complain(f"{flag.reason}; the text up to here is complete")
        return flag.exit_code or code

    def _time_machine(self) -> "TimedMachine | None":
        """For --machines, while the other ranks are idle."""
        if not self.output.machines or self.context.flag.reason:
            return None
        from pipeinfer.job.planning.machines import time_machine  # its imports take long

        try:
            return time_machine(self.plan)
        except UserError as error:
            complain(f"--machines: {error}")
            return None

    # -- reporting

    def _report(self, generation: Generation, machine: "TimedMachine | None") -> int:
        """Returns the exit code: 2 when a file could not be written, or the grammar took too much."""
        columns = experiment_columns(self.plan, self.request, self.settings)
        result = generation_result(generation, self.plan, columns, generation.text)
        if self.output.json:
            print(json_text(result.data), flush=True)
        if not generation.text.endswith("\n"):
            self.console.print()  # on a terminal the statistics begin on a line of their own
        for notice in generation.metrics.notices:
            complain(notice)
        if self.output.verbose:
            show_statistics(self.console, result.data)
            show_ranks(self.console, result.data["ranks"])
        else:
            show_outcome(self.console, result.data, self.has_draft, self.is_split)
        code = self._write_files(result)
        if machine and generation.request.n_generated > 1:
            self._show_machines(machine, generation)
        if generation.request.finish is Finish.END:
            complain_of_mismatch(self.request.sampling, generation.text)
        if generation.request.finish is Finish.FAILED:
            complain(TOO_MUCH)
            code = 2
        return code

    def _show_machines(self, machine: "TimedMachine", generation: Generation) -> None:
        from pipeinfer.job.planning.machines import COLUMNS, TITLE, machine_speeds, speed_rows, summary

        tokens, counts = generation.request.tokens[len(self.request.prompt) :], self.output.machines
        speeds = machine_speeds(machine, self.request.prompt, tokens, counts)
        self.console.print(f"\n{TITLE}", markup=False, highlight=False)
        show_table(self.console, COLUMNS, speed_rows(speeds))
        self.console.print(summary(speeds), markup=False, highlight=False)

    def _write_files(self, result: Result) -> int:
        """Write the files that were requested, each whether or not the others could be written."""
        code, output = 0, self.output
        append = partial(RESULTS.append, row=result.columns())
        for path, write in ((output.results, append), (output.trace, result.write_trace)):
            try:
                if path:
                    write(path)
            except UserError as error:
                complain(str(error))
                code = 2
        return code
