"""Rank 0 checks a batch before models load: every line, results so far, the context it needs. Runs nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.batch.batch_file import WHAT, BatchFile, BatchOutput, BatchRequest
from pipeinfer.job.options.options import JobOutput, RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.prepare import defaults_of, deploy_largest, inputs_of, open_job
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.journal import Journal, ModelId, model_id, open_journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.grammar import check_grammar
from pipeinfer.outputs import check_separate
from pipeinfer.text import json_text

N_AT_ONCE = 64
"""Requests whose templates are rendered together, by one process."""

Ready = tuple[BatchRequest, GenerationRequest | UserError]

PATIENCE_S = 2.0
"""Seconds of checking before a line says how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """`run`: options of the job, and defaults of requests. `as_chat`: plain prompts are a user's messages. `strict`:
    requests with fields that are not served are refused."""

    run: RunOptions
    source: Path
    output: Path
    as_chat: bool = False
    strict: bool = False

    @property
    def goes_on_from(self) -> Path:
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

    def requests(self) -> Iterator[BatchRequest]:
        """The requests without a result, among the lines that were checked."""
        for request in self.file.requests():
            if request.index >= len(self.is_done):
                return
            if not self.is_done[request.index]:
                yield request

    def ready(self) -> Iterator[Ready]:
        """Each of them as a request to the engine, or its error. Raises UserError if all chats fail."""
        rest = self.requests()
        while group := list(islice(rest, N_AT_ONCE)):
            yield from zip(group, map(self._checked, self.prompts.ask([each.body for each in group])), strict=True)

    def _checked(self, request: GenerationRequest | UserError) -> GenerationRequest | UserError:
        """The request under the policy, or the error of its grammar."""
        try:
            if not isinstance(request, UserError) and request.sampling.grammar:
                check_grammar(self.prompts.tokenizer, request.sampling.grammar)
        except UserError as error:
            return error
        return request if isinstance(request, UserError) else replace(request, policy=self.policy)

    def id(self, request: BatchRequest) -> str:
        return request.id(self.file.defaults.salt)

    def close(self) -> None:
        self.journal.close()
        self.file.close()
        self.output.close()


def prepare_batch(batch: BatchOptions, hosts: Sequence[Host]) -> tuple[JobPlan, BatchWork] | None:
    """None if all results are there. Raises UserError for whatever is wrong with options, files and lines."""
    options = batch.run
    outputs = {WHAT: batch.output, "--resume": options.output.resume}
    check_separate(outputs, inputs_of(options) | {"the batch": [batch.source]})
    options, info, tokenizer = open_job(options)
    file = BatchFile(batch.source, _defaults(replace(batch, run=options), info))
    output, prompts = BatchOutput(batch.output), BodyPrompts(options.text, options.context, info, tokenizer)
    work = BatchWork(file, output, prompts, bytearray(), Journal(), options.speculation.policy, options.output)
    try:
        _check_lines(work)
        # by all lines of the file, so that a resumed batch has the plan of its first job
        options = options.changed(n_expected=min(options.traffic.parallel, work.n_requests))
        plan = None
        if work.n_left:
            context = options.context.ctx_size, options.traffic.parallel
            plan = _plan(work, *context, lambda *sizes: deploy_largest(options, hosts, info, *sizes))
        model = model_id(plan) if plan else (info.fingerprint, options.numerics.rounding)
        _open_journal(work, options.output.resume, model)
        if not plan:
            work.output.go_on()
            _tell_done(work)
            work.close()
            return None
        return plan, work
    except BaseException:
        work.close()
        raise


def _defaults(batch: BatchOptions, info: ModelInfo) -> Defaults:
    options, text = batch.run, batch.run.text
    others = "".join(f" {backend}" for backend in options.placement.backend if backend.is_torch)
    others += "" if text.parse_special else " no-special"
    others += " special-in-messages" if text.special_in_messages else ""
    salt = f"{info.fingerprint} {options.numerics.rounding} {text.chat}{others}"
    return defaults_of(options, as_chat=batch.as_chat, salt=salt, strict=batch.strict)


def _tell_done(work: BatchWork) -> None:
    n = work.n_requests
    complain(f"{work.output.path}: all {n} results are there")
    if work.printing.json:
        print(json_text({"requests": n, "done_before": n, "completed": 0, "failed": 0, "left": 0}), flush=True)


def _open_journal(work: BatchWork, path: Path | None, model: ModelId) -> None:
    """Open the notes, without those of requests that have a result: an interruption may have left some."""
    work.journal = open_journal(path, model)
    for _, id in work.output.ids():
        if id in work.journal.texts:
            work.journal.ended(id)


def _check_lines(work: BatchWork) -> None:
    """Check every line of requests and of results. Raises UserError for the first that is wrong."""
    results: dict[str, int] = {}
    for number, id in work.output.ids():
        if (first := results.setdefault(id, number)) != number:
            raise UserError(f"{WHAT} {work.output.path} line {number} is of the same request as line {first}; remove "
                            "one of them")  # fmt: skip
    custom_ids: dict[str, int] = {}
    passed_over = dict[str, str]()
    for request in work.file.requests():
        passed_over = {**request.passed_over, **passed_over}
        name = request.custom_id
        if name is not None and (first := custom_ids.setdefault(name, request.index)) != request.index:
            raise UserError(f"{work.file.path} line {request.index + 1}: custom_id {name!r} is that of line "
                            f"{first + 1} too; give each request its own")  # fmt: skip
        work.is_done.extend(bytes(request.index + 1 - len(work.is_done)))
        id = work.id(request)
        work.is_done[request.index] = results.pop(id, 0) > 0
        work.n_requests += 1
        work.n_done += work.is_done[request.index]
    for reason in passed_over.values():
        complain(f"requests are served without a part of them: {reason}; --strict refuses them")
    if not work.n_requests:
        raise UserError(f"{work.file.path} has no requests; give a JSON object a line")
    if results:
        raise UserError(
            f"{WHAT} {work.output.path} line {min(results.values())} is the result of no request that is asked now: "
            f"{work.file.path}, the model or an option differs; name another file, or remove the line"
        )


def _plan(work: BatchWork, ctx_size: int, parallel: int, deploy: Callable[[int, int, int], JobPlan]) -> JobPlan:
    """The plan with the context of -c, else of --parallel times the longest request, or as much as fits. `deploy`
    makes it of the tokens of context, the least of these, and the tokens of the longest prompt."""
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
    return deploy(n_ctx, longest, longest_prompt)
