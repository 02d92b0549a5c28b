"""Rank 0 checks a batch before anything loads: every line, what is done already, what room it takes. Runs nothing."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.batch.batch_file import BatchFile, BatchRequest
from pipeinfer.job.batch.batch_output import WHAT, BatchOutput
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.sections import Output
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.planning.prepare import check_outputs, deploy_largest, inputs_of
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.constraints import constrained
from pipeinfer.job.requests.journal import Journal, ModelId, model_id, open_journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.requests.request_body import Defaults
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.grammar_check import check_grammar
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.outputs import check_separate

N_AT_ONCE = 64
"""Requests whose templates are rendered together: a process is started for them."""

Ready = tuple[BatchRequest, GenerationRequest | UserError]

PATIENCE_S = 2.0
"""How long requests are checked without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """`run`: what holds for all requests. `as_chat`: plain prompts are what a user says. `strict`: nothing of a request
    is passed over."""

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
    """What is left of a batch."""

    file: BatchFile
    output: BatchOutput
    prompts: BodyPrompts
    is_done: bytearray  # of each line
    journal: Journal
    policy: Policy
    printing: Output
    n_requests: int = 0
    n_done: int = 0

    @property
    def n_left(self) -> int:
        return self.n_requests - self.n_done

    def requests(self) -> Iterator[BatchRequest]:
        """Those that are not done, as they stood in the file when it was checked."""
        for request in self.file.requests():
            if request.index >= len(self.is_done):
                return
            if not self.is_done[request.index]:
                yield request

    def ready(self) -> Iterator[Ready]:
        """Of each of them what is to be generated, or what is wrong with it. Raises UserError where all chats fail."""
        rest = self.requests()
        while group := list(islice(rest, N_AT_ONCE)):
            yield from zip(group, map(self._checked, self.prompts.ask([each.body for each in group])), strict=True)

    def _checked(self, asked: GenerationRequest | UserError) -> GenerationRequest | UserError:
        """The same, or what is wrong with its grammar."""
        try:
            if not isinstance(asked, UserError) and asked.sampling.grammar:
                check_grammar(self.prompts.tokenizer, asked.sampling.grammar)
        except UserError as error:
            return error
        return asked

    def id(self, request: BatchRequest) -> str:
        return request.id(self.file.defaults.salt)

    def close(self) -> None:
        self.journal.close()
        self.file.close()
        self.output.close()


def prepare_batch(asked: BatchOptions, hosts: Sequence[Host]) -> tuple[JobPlan, BatchWork] | None:
    """None when nothing is left to do. Raises UserError for whatever is wrong with options, files and lines."""
    options = asked.run
    check_outputs(options)
    outputs = {WHAT: asked.output, "--resume": options.resume}
    check_separate(outputs, inputs_of(options) | {"the batch": [asked.source]})
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    options = constrained(options, tokenizer)
    file = BatchFile(asked.source, _defaults(replace(asked, run=options), info))
    output, prompts = BatchOutput(asked.output), BodyPrompts(options, info, tokenizer)
    work = BatchWork(file, output, prompts, bytearray(), Journal(), options.policy, options)
    try:
        _check_lines(work)
        # all that the file has: what goes on is laid out as it began
        options = replace(options, n_expected=min(options.parallel, work.n_requests))
        plan = _plan(work, lambda *sizes: deploy_largest(options, hosts, info, *sizes)) if work.n_left else None
        _open_journal(work, options.resume, model_id(plan) if plan else (info.fingerprint, options.rounding))
        if not plan:
            work.output.go_on()
            _tell_done(work)
            work.close()
            return None
        return plan, work
    except BaseException:
        work.close()
        raise


def _defaults(asked: BatchOptions, info: ModelInfo) -> Defaults:
    options = asked.run
    others = "".join(f" {backend}" for backend in options.backend if backend.is_torch)
    others += "" if options.parse_special else " no-special"
    others += " special-in-messages" if options.special_in_messages else ""
    salt = f"{info.fingerprint} {options.rounding} {options.chat}{others}"
    return Defaults(
        options.sampling, options.predict, options.stops, options.ignore_eos, asked.as_chat, salt, asked.strict
    )


def _tell_done(work: BatchWork) -> None:
    n = work.n_requests
    complain(f"{work.output.path}: all {n} results are there")
    if work.printing.json:
        print(json_text({"requests": n, "done_before": n, "completed": 0, "failed": 0, "left": 0}), flush=True)


def _open_journal(work: BatchWork, path: Path | None, model: ModelId) -> None:
    """With the texts that are not complete: an interruption may have left notes of one whose result is there."""
    work.journal = open_journal(path, model)
    for _, id in work.output.ids():
        if id in work.journal.texts:
            work.journal.ended(id)


def _check_lines(work: BatchWork) -> None:
    """Every line of what is asked and of what is done. Raises UserError for the first that is wrong."""
    known: dict[str, int] = {}
    for number, id in work.output.ids():
        if (first := known.setdefault(id, number)) != number:
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
        work.is_done[request.index] = known.pop(id, 0) > 0
        work.n_requests += 1
        work.n_done += work.is_done[request.index]
    for reason in passed_over.values():
        complain(f"requests are served without a part of them: {reason}; --strict refuses them")
    if not work.n_requests:
        raise UserError(f"{work.file.path} has no requests; give a JSON object a line")
    if known:
        raise UserError(
            f"{WHAT} {work.output.path} line {min(known.values())} is the result of no request that is asked now: "
            f"{work.file.path}, the model or an option differs; name another file, or remove the line"
        )


def _plan(work: BatchWork, deploy: Callable[[int, int, int], JobPlan]) -> JobPlan:
    """Where -c does not say, as much context as --parallel of the longest request take, or as much as fits. `deploy`:
    with so much, so much at least, for prompts of so many tokens."""
    longest = longest_prompt = n_total = 1
    start_s, told_s = time.monotonic(), PATIENCE_S
    for n_checked, (_, asked) in enumerate(work.ready()):
        if time.monotonic() - start_s > told_s:
            complain(f"{work.file.path}: {n_checked} of {work.n_left} requests are checked after {told_s:g} s")
            told_s *= 2
        if not isinstance(asked, UserError):
            longest, n_total = max(longest, asked.n_ctx), n_total + asked.n_ctx
            longest_prompt = max(longest_prompt, len(asked.prompt))
    options = work.prompts.options
    n_ctx = options.ctx_size or max(longest, min(n_total, options.parallel * longest))
    return deploy(n_ctx, longest, longest_prompt)
