"""Rank 0 turns options into a plan and a request, and checks all that can be wrong before models load."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import STDIN
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deploy import DoesNotFit, deploy
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.chat_format import ChatFormat, open_format
from pipeinfer.job.requests.constraints import constrained
from pipeinfer.job.requests.request import DEFAULT_CTX, GenerationRequest, end_tokens, make_request, read_prompt
from pipeinfer.models.gguf.model_info import ModelInfo, part_paths
from pipeinfer.models.text.chat_template import template_of
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.results import RESULTS
from pipeinfer.observe.table import Table
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.virtual.nodes import Node


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """`request`: the settings of all answers, without a prompt. `first`: the user's first message, if given."""

    request: GenerationRequest
    format: ChatFormat
    first: str | None


def prepare(
    options: RunOptions, hosts: Sequence[Host], given: bool = True
) -> tuple[JobPlan, tuple[GenerationRequest, Tokenizer]]:
    """`given`: whether the prompt is the user's. Raises UserError for whatever is wrong with the options, the files and
    how they fit together."""
    check_outputs(options)
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    options = constrained(options, tokenizer)
    text, format = read_prompt(options), open_format(options, info, tokenizer)
    names = tokenizer.control_names if options.parse_special else None
    if given and not format and template_of(info.metadata) and not (names and names.search(text)):
        complain(f"{info.path.name} has a chat template, and -p is continued as plain text; --chat asks it")
    prompt = format.first_prompt(text) if format else tokenizer.encode(text, parse_special=options.parse_special)
    if not prompt and format:
        raise format.makes_nothing
    if not prompt:
        raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
    request = make_request(options, info, tokenizer, prompt)
    if format:
        request = replace(request, stops=format.stops)
    try:
        plan = deploy(options, hosts, info, request.n_ctx, len(prompt))
    except DoesNotFit as error:
        if options.kept_numerics:  # advice would be for others
            raise
        from pipeinfer.job.planning.planner import ETHERNET, open_planner  # takes a while to import
        from pipeinfer.job.planning.suggestions import advised

        nodes = list(map(Node, hosts))
        raise advised(error, open_planner(options, info, nodes, ETHERNET, len(prompt), ())) from None
    return plan, (request, tokenizer)


def prepare_chat(options: RunOptions, hosts: Sequence[Host]) -> tuple[JobPlan, ChatSetup]:
    """The same for a chat; `options.chat` must be there. A template that is broken is refused here."""
    check_outputs(options)
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    options = constrained(options, tokenizer)
    format = open_format(options, info, tokenizer)
    assert format, "a chat without its options"
    format.template.check()
    asked = options.prompt is not None or options.file is not None
    first = read_prompt(options) if asked else None
    n_ctx = options.ctx_size or min(info.n_ctx_train, DEFAULT_CTX)
    n_predict = options.predict if options.predict >= 0 else n_ctx
    request = GenerationRequest(
        (), n_predict, n_ctx, options.sampling.settled, end_tokens(options.ignore_eos, tokenizer), format.stops,
        markers=True, keep=True, policy=options.policy,
    )  # fmt: skip
    return deploy(options, hosts, info, n_ctx, n_ctx), ChatSetup(request, format, first)


def deploy_largest(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_ctx: int, least: int, n_prompt: int
) -> JobPlan:
    """The plan for a context of `n_ctx` tokens, or without -c of as many as fit, `least` at least. Raises UserError."""
    while True:
        try:
            return deploy(options, hosts, info, n_ctx, min(n_ctx, n_prompt))
        except DoesNotFit:
            if options.ctx_size or n_ctx <= least:
                raise
            n_ctx = max(least, n_ctx // 2)


def check_outputs(options: RunOptions, table: Table = RESULTS) -> None:
    """Raises UserError for files that cannot be written, or that are read. `table`: the one of --results."""
    outputs = {"--results": options.results, "--trace": options.trace, "--resume": options.resume}
    check_separate(outputs, inputs_of(options))
    cache = options.slice_cache
    if cache and cache.exists() and not cache.is_dir():
        raise UserError(f"--slice-cache {cache} is no directory; name one, it is made if it is not there")
    if options.results:
        table.check(options.results)
    if options.trace:
        check_writable(options.trace, "--trace")


def inputs_of(options: RunOptions) -> dict[str, list[Path]]:
    """The files that a job reads, by the options that name them."""
    return {
        "--model": part_paths(options.model),
        "--model-draft": [part for draft in options.drafts for part in part_paths(draft)],
        "--file": [options.file] if options.file not in (None, STDIN) else [],
        "--grammar-file": [options.grammar.grammar_file] if options.grammar.grammar_file else [],
        "--json-schema-file": [options.grammar.schema_file] if options.grammar.schema_file else [],
        "--system-prompt-file": [options.chat.system_file] if options.chat and options.chat.system_file else [],
        "--chat-template-file": [options.chat.template_file] if options.chat and options.chat.template_file else [],
        "--pace": [Path(options.pace.partition(":")[0])] if options.pace else [],
    }
