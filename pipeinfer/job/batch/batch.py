"""A batch in one MPI job: many requests share the loaded models, each result is written when it is complete. Rank 0
checks every line, the results so far and the context before models load."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from pipeinfer import __version__
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import HostFault, StopRequested, UserError
from pipeinfer.job.batch.batch_file import WHAT, BatchFile, BatchOutput, BatchRequest, error_line, result_line
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.options.options import JobOutput, RunOptions
from pipeinfer.job.placement.checks import read_adapters
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import defaults_of, deploy_largest, inputs_of, open_job, start_prepared
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.answers import Entry, speller
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.chat_format import contents_of
from pipeinfer.job.requests.journal import Journal, ModelId, model_id, open_journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.ranks import MAX_RECORDS
from pipeinfer.job.session.result import RankUses, describe_drafts, describe_model
from pipeinfer.job.session.session import OpenRequest, Output, open_session
from pipeinfer.models.gguf.adapter import digest_of
from pipeinfer.models.gguf.model_info import LONG, ModelInfo
from pipeinfer.models.text.grammar import TOO_MUCH, check_grammar
from pipeinfer.observe.figures import Throughput
from pipeinfer.observe.report import ProgressBar, show_throughput, stderr_console
from pipeinfer.outputs import check_separate
from pipeinfer.text import json_text

N_AT_ONCE = 64  # requests whose templates are rendered together, by one process
PATIENCE_S = 2.0  # seconds of checking before a line says how far it is


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """`run`: of the job, and defaults of requests. `as_chat`: plain prompts are messages. `strict`: see `Defaults`."""

    run: RunOptions
    source: Path
    output: Path
    as_chat: bool = False
    strict: bool = False

    @property
    def resume_file(self) -> Path:
        return self.output


@dataclass(slots=True)
class BatchWork:
    """What rank 0 does: the rest of a batch."""

    file: BatchFile
    output: BatchOutput
    prompts: BodyPrompts
    is_done: bytearray  # of each line
    journal: Journal
    policy: Policy
    printing: JobOutput
    n_requests: int = 0
    n_done: int = 0

    @property
    def n_left(self) -> int:
        return self.n_requests - self.n_done

    def ready(self) -> Iterator[tuple[BatchRequest, GenerationRequest | UserError]]:
        """Checked lines without a result, as requests to the engine or errors. Raises UserError if all chats fail;
        HostFault."""
        lines = takewhile(lambda each: each.index < len(self.is_done), self.file.requests())
        rest = (each for each in lines if not self.is_done[each.index])
        while group := list(islice(rest, N_AT_ONCE)):
            yield from zip(group, map(self._checked, self.prompts.ask([each.body for each in group])), strict=True)

    def _checked(self, request: GenerationRequest | UserError) -> GenerationRequest | UserError:
        """The request under the policy, or the error of its grammar."""
        try:
            if not isinstance(request, UserError) and request.sampling.grammar:
                check_grammar(self.prompts.tokenizer, request.sampling.grammar)
        except HostFault:  # no result of this request
            raise
        except UserError as error:
            return error
        return request if isinstance(request, UserError) else request.with_policy(self.policy)

    def noted(self) -> Iterator[tuple[BatchRequest, str, GenerationRequest | UserError]]:
        """The same with their ids, and with their noted output."""
        for line, request in self.ready():
            id = self.id(line, self._depends_on_context(line, request))
            yield line, id, request if isinstance(request, UserError) else self.journal.begin(id, request)

    def id(self, line: BatchRequest, depends_on_context: bool) -> str:
        """Of its result. `depends_on_context`: that might be another one with another -c."""
        salt = self.file.defaults.salt
        return line.id(f"{salt} context-{self.prompts.n_ctx}" if depends_on_context else salt)

    @staticmethod
    def _depends_on_context(line: BatchRequest, request: GenerationRequest | UserError) -> bool:
        """Whether its result is an error, such as of a long prompt, or the context has less room than it asks for."""
        return isinstance(request, UserError) or request.n_predict < line.body.n_predict

    def close(self) -> None:
        self.journal.close()
        self.file.close()
        self.output.close()


def _prepare(options: RunOptions, hosts: Sequence[Host], batch: BatchOptions) -> "tuple[JobPlan, Batch] | None":
    """None if all results are there. Raises UserError for whatever is wrong with options, files and lines."""
    outputs = {WHAT: batch.output, "--resume": options.output.resume}
    check_separate(outputs, inputs_of(options) | {"the batch": [batch.source]})
    options, info, drafts, tokenizer = open_job(options)
    prompts = BodyPrompts(options.text, options.context, info, tokenizer)
    file, output = BatchFile(batch.source, _defaults(batch, options, info, prompts)), BatchOutput(batch.output)
    work = BatchWork(file, output, prompts, bytearray(), Journal(), options.speculation.policy, options.output)
    try:
        _check_lines(work)
        # by all lines of the file, so that a resumed batch has the plan of its first job
        options = options.changed(n_expected=min(options.traffic.parallel, work.n_requests))
        plan = None
        if work.n_left:
            sizes = _sizes(work, options.context.ctx_size, options.traffic.parallel)
            plan = deploy_largest(options, hosts, info, drafts, *sizes)
        model = model_id(plan) if plan else ModelId(info.fingerprint, options.numerics.rounding)
        work.journal = open_journal(options.output.resume, model, options.text.now_s)
        for _, id in work.output.ids():
            if id in work.journal.texts:  # an interruption may have left the notes of a result
                work.journal.end(id)
        if not plan:
            work.output.go_on()
            complain(f"{batch.output}: all {work.n_requests} results are there")
            if work.printing.json:
                counts = {"requests": work.n_requests, "done_before": work.n_requests}
                print(json_text(counts | {"completed": 0, "failed": 0, "left": 0}), flush=True)
            work.close()
            return None
        return plan, Batch(plan, work)
    except BaseException:
        work.close()
        raise


def _defaults(batch: BatchOptions, options: RunOptions, info: ModelInfo, prompts: BodyPrompts) -> Defaults:
    text = options.text
    others = "".join(f" {backend}" for backend in options.placement.backend if backend.is_torch)
    others += "" if text.parse_special else " no-special"
    adapters = read_adapters(options.models, info)
    others += f" lora-{digest_of(adapters)}" if adapters else ""
    others += " special-in-messages" if text.special_in_messages else ""
    others += f" {LONG}" if info.rope_factors == LONG else ""
    if text.reasoning_budget >= 0:
        others += f" reasoning-{text.reasoning_budget} {text.reasoning_message or ''}"
    others += f" template-{text.template}" if text.template else ""
    chat, source = contents_of(text.chat, lambda: prompts.format)
    others += "" if source is None else f" template-file-{source}"
    salt = f"{info.fingerprint} {options.numerics.rounding} {chat}{others}"
    return defaults_of(options, as_chat=batch.as_chat, salt=salt, strict=batch.strict, adapters=adapters)


def _check_lines(work: BatchWork) -> None:
    """Check every line of requests and of results. Raises UserError for the first that is wrong."""
    results: dict[str, int] = {}
    for number, id in work.output.ids():
        if (first := results.setdefault(id, number)) != number:
            lines = f"{WHAT} {work.output.path} line {number} is of the same request as line {first}"
            raise UserError(f"{lines}; remove one of them")
    custom_ids: dict[str, int] = {}
    passed_over = dict[str, str]()
    for request in work.file.requests():
        passed_over = {**request.passed_over, **passed_over}
        name = request.custom_id
        if name is not None and (first := custom_ids.setdefault(name, request.index)) != request.index:
            line = f"{work.file.path} line {request.index + 1}"
            raise UserError(f"{line}: custom_id {name!r} is that of line {first + 1} too; give each request its own")
        work.is_done.extend(bytes(request.index + 1 - len(work.is_done)))
        if results:  # an id takes long, in a file of many lines
            work.is_done[request.index] = any(results.pop(work.id(request, each), 0) for each in (False, True))
        work.n_requests += 1
        work.n_done += work.is_done[request.index]
    for reason in passed_over.values():
        complain(f"requests are served without a part of them: {reason}; --strict refuses them")
    if not work.n_requests:
        raise UserError(f"{work.file.path} has no requests; give a JSON object a line")
    if results:
        line = f"{WHAT} {work.output.path} line {min(results.values())} is the result of no request that is asked now"
        differs = f"{work.file.path}, the model or an option, such as -c, differs"
        raise UserError(f"{line}: {differs}; name another file, or remove the line")


def _sizes(work: BatchWork, ctx_size: int | None, parallel: int) -> tuple[int, int, int]:
    """(tokens of context: of -c, else --parallel times the longest request; of that; of the longest prompt)."""
    longest = longest_prompt = n_total = 1
    start_s, report_s = time.monotonic(), PATIENCE_S
    for n_checked, (_, request) in enumerate(work.ready()):
        if time.monotonic() - start_s > report_s:
            complain(f"{work.file.path}: {n_checked} of {work.n_left} requests are checked after {report_s:g} s")
            report_s *= 2
        if not isinstance(request, UserError):
            longest, n_total = max(longest, request.n_ctx), n_total + request.n_ctx
            longest_prompt = max(longest_prompt, len(request.prompt))
    n_ctx = ctx_size or max(longest, min(n_total, parallel * longest))
    return n_ctx, longest, longest_prompt


def run_batch(batch: BatchOptions) -> int:
    """`pipeinfer batch`, on every rank; returns the exit code."""
    return start_prepared(batch, batch.run, partial(_prepare, batch=batch))


class Batch:
    """Rank 0's part of a batch."""

    def __init__(self, plan: JobPlan, work: BatchWork) -> None:
        self.plan, self.work, self.printing = plan, work, work.printing
        self.console = stderr_console()
        self.throughput = Throughput()
        self.n_completed = self.n_failed = self.open_max = 0
        self._spell = speller(work.prompts.tokenizer)
        self._coming = work.noted()
        self._next: tuple[BatchRequest, str, GenerationRequest | UserError] | None = None

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        self.context, work, capacity = context, self.work, self.plan.capacity
        size, requests = f"context {capacity.n_ctx}", f"{work.n_left} of {work.n_requests} requests left"
        about = f"policy {work.policy.name}, {requests}, up to {capacity.n_requests} at a time, {size}"
        show_start(self.console, self.plan, f"{size}, {requests}", about, self.printing.verbose)
        session = open_session(self.context, self.plan, work.prompts.tokenizer, verbose=self.printing.verbose)
        new_bar = partial(ProgressBar, self.console, CLOCK, "batch", work.n_requests, "requests", stays=True)
        with closing(work), session as self.session, closing(new_bar()) as self.progress:
            self.start_s = self.context.clock()
            self.uses = RankUses(self.plan, self.start_s)
            try:
                self._generate()
            except StopRequested:
                pass
            except UserError as error:  # a full disk, a file that was changed, or a fault of this host
                self.context.flag.note(str(error), 2)
            self.session.stop_all()  # a resumed batch generates them again
            self.end_s = self.context.clock()
            self.uses.note(self.session.ranks.take_figures(), self.end_s)
        return self._report()

    def _generate(self) -> None:
        """Until every request has its result."""
        self.work.output.go_on()
        self._next = next(self._coming, None)
        self._admit()
        while self.session.engine.busy:
            self.session.engine.step()
            if self.session.ranks.n_records >= MAX_RECORDS:
                self.uses.note(self.session.ranks.take_figures(), self.context.clock())

    def _admit(self) -> None:
        while self._next:
            line, id, request = self._next
            if isinstance(request, UserError):
                self._refuse(line, id, str(request))
            elif self.session.has_room(request):
                entries = list[Entry]()
                self.session.begin(request, self._take).origin = line, id, entries
                self.open_max = max(self.open_max, self.session.n_open)
            else:
                return
            self._next = next(self._coming, None)

    @property
    def _n_written(self) -> int:
        """Results in the file."""
        return self.work.n_done + self.n_completed + self.n_failed

    def _take(self, outputs: Sequence[Output]) -> None:
        for each in outputs:
            self.progress.update(self._n_written, len(each.tokens))
            _, id, entries = each.opened.origin
            self.work.journal.add_output(id, each.tokens)
            entries.extend(each.entries)
            if each.ended:
                self._write(each.opened)
        self._admit()

    def _write(self, opened: OpenRequest) -> None:
        (line, id, entries), model = opened.origin, self.plan.model.path.name
        if opened.finish == "error":
            self._refuse(line, id, TOO_MUCH)
            return
        self.work.output.write(result_line(id, line, opened, entries, self._spell, model))
        self.work.journal.end(id)
        self.n_completed += 1
        self.throughput.add(opened.metrics)
        self.progress.update(self._n_written, 0)

    def _refuse(self, line: BatchRequest, id: str, message: str) -> None:
        self.work.output.write(error_line(id, line, message))
        self.work.journal.end(id)
        self.n_failed += 1

    # -- the end

    def _report(self) -> int:
        flag, result = self.context.flag, self._figures()
        show_throughput(self.console, result, self.printing.verbose)
        if notice := self.uses.missed_pace:
            complain(notice)
        if self.printing.json:
            print(json_text(result), flush=True)
        if flag.reason:
            text = f"{self.work.output.path} has what is complete" if self._n_written else "no result is complete yet"
            complain(f"{flag.reason}; {text}, the same command goes on from there")
        return flag.exit_code

    def _figures(self) -> dict[str, Any]:
        """The object that --json prints and the statistics show."""
        work = self.work
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
            "model_draft": describe_drafts(self.plan.drafts),
            "ranks": self.uses.ranks(),
        }
