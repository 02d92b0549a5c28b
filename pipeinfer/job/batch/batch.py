"""A batch in one MPI job: many requests share the loaded models, each result is written when it is complete, a line in
OpenAI's format or the plain one."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from pipeinfer import __version__
from pipeinfer.core.requests import Finish
from pipeinfer.errors import StopRequested, UserError
from pipeinfer.job.batch.batch_file import BatchRequest
from pipeinfer.job.batch.batch_prepare import BatchOptions, BatchWork, prepare_batch
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import start_prepared
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.answers import (
    Entry,
    Spell,
    chat_logprobs,
    completion_logprobs,
    finish_of,
    message_of,
    reader_of,
    speller,
)
from pipeinfer.job.requests.fields import CHAT
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.ranks import MAX_RECORDS
from pipeinfer.job.session.result import RankUses, describe_drafts, describe_model
from pipeinfer.job.session.session import OpenRequest, Output, open_session
from pipeinfer.models.text.grammar import TOO_MUCH
from pipeinfer.observe.figures import Throughput, timings
from pipeinfer.observe.report import ProgressBar, show_throughput, stderr_console
from pipeinfer.text import json_text

SERVED, NOT_SERVED = 200, 400

OBJECTS = {CHAT: "chat.completion"}

TIMES = ("ttft_s", "tpot_s", "total_s")


def result_line(
    id: str, line: BatchRequest, opened: OpenRequest, entries: Sequence[Entry], spell: Spell, model: str
) -> dict[str, Any]:
    """The result of a request that has ended. `model`: its name."""
    form = chat_logprobs if line.body.messages else completion_logprobs
    logprobs = form(entries, spell) if line.body.sampling.n_logprobs >= 0 else None
    request, text, finish = opened.state, opened.printer.text, opened.finish
    n_prompt, n_predicted = len(request.prompt), opened.n_output
    if not line.url:
        times = timings(opened.metrics)
        return {
            **_plain(id, line), "text": text, "finish": finish, "tokens_evaluated": n_prompt,
            "tokens_cached": opened.metrics.n_kept, "tokens_predicted": n_predicted, "seed": request.sampling.seed,
            **{name: times[name] for name in TIMES},
            **({"logprobs": logprobs} if logprobs else {}),
        }  # fmt: skip
    answer: dict[str, Any] = {"text": text}
    if line.url == CHAT:
        reader = reader_of(line.body, opened.request.thought)
        answer = {
            "message": message_of([*reader.push(text), *reader.finish(finish == "length" or opened.printer.was_cut)])
        }
        finish = finish_of(finish, reader)
    body = {
        "id": id,
        "object": OBJECTS.get(line.url, "text_completion"),
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **answer, "logprobs": logprobs, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": n_prompt, "completion_tokens": n_predicted, "total_tokens": n_prompt + n_predicted,
            "prompt_tokens_details": {"cached_tokens": opened.metrics.n_kept},
        },
        "seed": request.sampling.seed,
    }  # fmt: skip
    return _response(id, line, SERVED, body, None)


def error_line(id: str, line: BatchRequest, message: str) -> dict[str, Any]:
    """The error of a request that cannot be served."""
    if not line.url:
        return {**_plain(id, line), "error": message}
    error = {"message": message, "type": "invalid_request_error", "code": "invalid_request"}
    return _response(id, line, NOT_SERVED, {"error": error}, {"code": error["code"], "message": message})


def _plain(id: str, line: BatchRequest) -> dict[str, Any]:
    custom = {"custom_id": line.custom_id} if line.custom_id is not None else {}
    return {"id": id, "index": line.index, **custom}


def _response(id: str, line: BatchRequest, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": id, "body": body}
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}


def run_batch(batch: BatchOptions) -> int:
    """`pipeinfer batch`, on every rank; returns the exit code."""
    return start_prepared(
        batch, batch.run, lambda options, hosts: prepare_batch(replace(batch, run=options), hosts),
        lambda *head: Batch(*head).run(),
    )  # fmt: skip


class Batch:
    """Rank 0's part of a batch."""

    def __init__(self, context: Context, plan: JobPlan, work: BatchWork) -> None:
        self.context, self.plan, self.work, self.printing = context, plan, work, work.printing
        self.console = stderr_console()
        self.throughput = Throughput()
        self.n_completed = self.n_failed = self.open_max = 0
        self._lines: dict[OpenRequest, tuple[BatchRequest, str]] = {}  # and ids
        self._entries: dict[OpenRequest, list[Entry]] = {}
        self._spell = speller(work.prompts.tokenizer)
        self._coming = work.ready()
        self._next: tuple[BatchRequest, GenerationRequest | UserError, str] | None = None

    def run(self) -> int:
        """Returns the exit code."""
        work = self.work
        brief = f"context {self.plan.capacity.n_ctx}, {work.n_left} of {work.n_requests} requests left"
        show_start(self.console, self.plan, brief, self._headline(), self.printing.verbose)
        session = open_session(self.context, self.plan, work.prompts.tokenizer, verbose=self.printing.verbose)
        with closing(work), session as self.session:
            self.progress = ProgressBar(self.console, CLOCK, "batch", work.n_requests, "requests", stays=True)
            self.start_s = self.context.clock()
            self.uses = RankUses(self.plan, self.start_s)
            try:
                self._generate()
            except StopRequested:
                pass
            except UserError as error:  # a full disk, or a file that was changed
                self.context.flag.note(str(error), 2)
            self.session.stop_all()  # a resumed batch generates them again
            self.progress.close()
            self.end_s = self.context.clock()
            self.uses.note(self.session.ranks.take_figures(), self.end_s)
        return self._report()

    def _headline(self) -> str:
        work, n_open = self.work, self.plan.capacity.n_requests
        return (
            f"policy {work.policy.name}, {work.n_left} of {work.n_requests} requests left, up to {n_open} at a time, "
            f"context {self.plan.capacity.n_ctx}"
        )

    def _generate(self) -> None:
        """Until every request has its result."""
        self.work.output.go_on()
        self._advance()
        self._admit()
        while self.session.engine.busy:
            self.session.engine.step()
            if self.session.ranks.n_records >= MAX_RECORDS:
                self.uses.note(self.session.ranks.take_figures(), self.context.clock())

    def _advance(self) -> None:
        """Go to the next request in the file, with its noted output."""
        self._next = None
        for line, request in self._coming:
            id = self.work.id(line)
            self._next = line, request if isinstance(request, UserError) else self.work.journal.begin(id, request), id
            return

    def _admit(self) -> None:
        """Begin the next requests in the file, while there is room."""
        while self._next:
            line, request, id = self._next
            if isinstance(request, UserError):
                self._refuse(line, id, str(request))
            elif self.session.has_room(request):
                self._lines[self.session.begin(request, self._take)] = line, id
                self.open_max = max(self.open_max, self.session.n_open)
            else:
                return
            self._advance()

    @property
    def _n_written(self) -> int:
        """Results in the file."""
        return self.work.n_done + self.n_completed + self.n_failed

    def _take(self, outputs: Sequence[Output]) -> None:
        for each in outputs:
            self.progress.update(self._n_written, len(each.tokens))
            self.work.journal.came(self._lines[each.opened][1], each.tokens)
            if each.entries:
                self._entries.setdefault(each.opened, []).extend(each.entries)
            if each.ended:
                self._write(each.opened)
        self._admit()

    def _write(self, opened: OpenRequest) -> None:
        """Write the result of a request that has ended, and forget it."""
        (line, id), model = self._lines.pop(opened), self.plan.model.path.name
        entries = self._entries.pop(opened, [])
        if opened.state.finish is Finish.FAILED:
            self._refuse(line, id, TOO_MUCH)
            return
        self.work.output.write(result_line(id, line, opened, entries, self._spell, model))
        self.work.journal.ended(id)
        self.n_completed += 1
        self.throughput.add(opened.metrics)
        self.progress.update(self._n_written, 0)

    def _refuse(self, line: BatchRequest, id: str, message: str) -> None:
        self.work.output.write(error_line(id, line, message))
        self.work.journal.ended(id)
        self.n_failed += 1

    # -- the end

    def _report(self) -> int:
        """Returns the exit code."""
        flag, result = self.context.flag, self._figures()
        show_throughput(self.console, result, self.printing.verbose)
        if notice := self.uses.missed_pace:
            complain(notice)
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
