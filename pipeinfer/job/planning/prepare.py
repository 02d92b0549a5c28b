"""From options to loaded models on every rank: rank 0 checks all that can be wrong before models load, and makes plan
and request; the other ranks follow the plan. Knows no command."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeinfer.cluster.assignment import check_stages
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import AUTO_LAYERS, MAX_CTX, STDIN
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.placement.checks import fetch_models, open_models, read_adapters
from pipeinfer.job.placement.devices import rank_options
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import DoesNotFit, deploy, schedule_of
from pipeinfer.job.process.streams import complain
from pipeinfer.job.profiling.describe import describe_host
from pipeinfer.job.profiling.speeds import with_layer_times
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.chat_format import open_format
from pipeinfer.job.requests.journal import kept_settings
from pipeinfer.job.requests.request import (
    GenerationRequest,
    check_constraints,
    end_tokens,
    fit_context,
    grammar_of,
    least_context,
    read_prompt,
    settled,
)
from pipeinfer.models.drafts.head_files import read_drafts
from pipeinfer.models.drafts.translation import check_drafts
from pipeinfer.models.gguf.model_info import ModelInfo, part_paths, read_model_info
from pipeinfer.models.llama.ggml import has_gpu, load_library
from pipeinfer.models.text.chat_template import template_of
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.table import RESULTS, Table
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies import Auto
from pipeinfer.virtual.nodes import Node

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch import Context, Crew


class JobHead(Protocol):
    """Rank 0's part of a job."""

    def run(self, context: "Context") -> int:
        """Returns the exit code."""
        ...


Prepare = Callable[[RunOptions, Sequence[Host]], tuple[JobPlan, JobHead] | None]


def start_prepared(settings: object, options: RunOptions, plan_job: Prepare) -> int:
    """A job, on every rank; returns the exit code. `settings`: must be alike on all, as in `start_job`. `plan_job`: on
    rank 0; None: there is nothing to do."""
    from pipeinfer.job.launch import start_job  # initialises MPI

    return start_job(lambda crew: _run(crew, options, plan_job), settings, options.placement, options.output.verbose)


def _run(crew: "Crew", options: RunOptions, plan_job: Prepare) -> int:
    """Rank 0 prepares and is the head, the others serve. Returns the exit code; 0 without a plan. Raises JobError."""
    link = crew.link
    if link.rank:
        get_ready()
    checked = link.agree(lambda: _checked(options, link.size))
    options, warning = without_gpus(checked, lambda: link.all_gather(has_gpu()))
    if warning and not link.rank:
        complain(warning)
    hosts = find_hosts(crew, options)
    prepared: tuple[JobPlan, JobHead] | None = None

    def make_plan() -> JobPlan | None:
        nonlocal prepared
        try:
            prepared = plan_job(options, hosts)
        except DoesNotFit as error:
            from pipeinfer.job.planning.plan_table import show_plan
            from pipeinfer.observe.report import stderr_console

            show_plan(stderr_console(), error.plan)
            raise
        return prepared and prepared[0]

    plan = link.agree(make_plan)
    if plan is None:
        return 0
    context = crew.context(plan, options.output.trace is not None)
    if not prepared:
        from pipeinfer.job.loading.load import run_stage

        return run_stage(context, plan)
    return prepared[1].run(context)


def get_ready() -> None:
    """Import and load what every stage needs, while rank 0 plans."""
    import pipeinfer.job.loading.load  # noqa: F401

    load_library()


def _checked(options: RunOptions, n_ranks: int) -> RunOptions:
    """With what --plan and resumed texts decide, and with files. Raises UserError, also for values not one a rank."""
    options = with_plan(options, n_ranks)
    rank_options(options.placement, n_ranks)
    options = with_files(options.changed(**kept_settings(options.output.resume)), n_ranks)
    if not options.context.may_fit:
        options = options.changed(fitted="")
    if n_ranks > 1:
        check_headers(options, n_ranks)
    return options


def check_headers(options: RunOptions, n_ranks: int) -> None:
    """Raises UserError for what follows from the models' headers, before any rank loads or times layers."""
    info = read_model_info(options.models.target)
    check_drafts(read_drafts(options.drafts_in_use, info), info)
    read_adapters(options.models, info)
    if not options.models.finds_head:  # which may need a rank
        check_stages(len(options.target_ranks(n_ranks)), info.n_layer, n_ranks)


def with_files(options: RunOptions, n_ranks: int) -> RunOptions:
    """With files in the place of models' names, the context that -c 0 stands for, and the default policy of so many
    ranks: `auto` on several, as without guesses they wait for each other; not where layers keep states, as each guess
    needs a state of its own. Raises UserError for a file that cannot be had."""
    options = replace(options, models=fetch_models(options.models))
    if options.speculation.by_ranks and n_ranks > 1 and read_model_info(options.models.target).layers.rewinds:
        options = options.changed(policy=Auto())
    if options.context.ctx_size == 0:
        options = with_trained_context(options, read_model_info(options.models.target))
    return options.changed(by_ranks=False)


def with_trained_context(options: RunOptions, info: ModelInfo) -> RunOptions:
    """With the context that -c 0 stands for, which --fit may cut."""
    context = options.context
    if context.ctx_size != 0:
        return options
    return options.changed(ctx_size=min(info.n_ctx_train, MAX_CTX), fit=context.may_fit)


def without_gpus(options: RunOptions, have_gpus: Callable[[], Iterable[bool]]) -> tuple[RunOptions, str]:
    """As in llama.cpp: where no rank has a GPU, -ngl is ignored, with the second result as a warning. `have_gpus`: of
    each rank; not called where there is no -ngl, or devices are named."""
    placement = options.placement
    n_gpu_layers = placement.n_gpu_layers, max(0, placement.n_gpu_layers_draft)
    if n_gpu_layers == ((0,), 0) or any((*placement.device, *placement.rpc)) or any(have_gpus()):
        return options, ""
    way_out = "it takes a GPU and a build with CMAKE_ARGS=-DGGML_CUDA=on, or --rpc"
    warning = f"-ngl is without effect: libllama has no GPU here, all layers are computed on CPUs; {way_out}"
    return options.changed(n_gpu_layers=(0,), n_gpu_layers_draft=AUTO_LAYERS), warning


def find_hosts(crew: "Crew", options: RunOptions) -> Sequence[Host]:
    """The hosts with all that ranks find out about them. `options`: `with_files`. Collective. Raises JobError."""
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI

    link = crew.link
    hosts = link.all_gather(link.agree_all(lambda: describe_host(options, crew.hosts, link.rank, is_gpu_aware)))
    schedule, target = schedule_of(options, hosts), options.models.target
    return with_layer_times(crew, hosts, schedule, target, options.numerics) if schedule else hosts


# -- on rank 0


def prepare(
    options: RunOptions, hosts: Sequence[Host], is_users: bool = True
) -> tuple[JobPlan, tuple[GenerationRequest, Tokenizer]]:
    """`is_users`: the prompt is the user's. Raises UserError for whatever is wrong with options and files."""
    options, info, drafts, tokenizer = open_job(options)
    format = open_format(options.text, info, tokenizer)
    text, special = read_prompt(options.text), options.text.parse_special
    names = tokenizer.control_names if special else None
    if is_users and not format and template_of(info.metadata) and not (names and names.search(text)):
        complain(f"{info.path.name} has a chat template, and -p is continued as plain text; --chat asks it")
    prompt, thought = format.first_prompt(text) if format else (tokenizer.encode(text, parse_special=special), "")
    if not prompt and format:
        raise format.makes_nothing
    if not prompt:
        raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
    request = make_request(options, info, tokenizer, prompt)
    n_least = least_context(options.context, request.n_ctx, len(prompt))
    if format:
        sampling = format.limited(request.sampling, prompt, thought)
        request = replace(request, stops=format.stops, sampling=sampling)
    try:
        plan = deploy(options, hosts, info, drafts, request.n_ctx, len(prompt), n_least)
    except DoesNotFit as error:
        if options.numerics.resumed:  # advice would be for others
            raise
        from pipeinfer.job.planning.planner import ETHERNET, Planner  # takes a while to import
        from pipeinfer.job.planning.suggestions import with_suggestions

        nodes = list(map(Node, hosts))
        raise with_suggestions(error, Planner(options, info, drafts, nodes, ETHERNET, len(prompt))) from None
    return plan, (request, tokenizer)


def make_request(
    options: RunOptions, info: ModelInfo, tokenizer: Tokenizer, prompt: Sequence[int], n_most: int = 0
) -> GenerationRequest:
    """`n_most`: tokens of the longest prompt that shares its context. Raises UserError when that does not fit."""
    context, text = options.context, options.text
    n_ctx, n_predict = fit_context(context.ctx_size, context.predict, info, max(n_most, len(prompt)))
    sampling, ends = settled(options.sampling, tokenizer), end_tokens(context.ignore_eos, tokenizer)
    request = GenerationRequest(tuple(prompt), n_predict, n_ctx, sampling, ends, text.stops)
    return replace(request, markers=text.chat is not None, policy=options.speculation.policy)


def open_job(options: RunOptions) -> tuple[RunOptions, ModelInfo, list[ModelInfo], Tokenizer]:
    """The options with a schema's grammar, and `open_models`. Raises UserError, also for files not to be written."""
    sampling = replace(options.sampling, grammar=grammar_of(options.constraints))
    check_outputs(options)
    info, drafts, tokenizer = open_models(options)
    check_constraints(sampling, options.context.ignore_eos, tokenizer)
    settled(sampling, tokenizer)  # DRY's breakers may be too many
    return replace(options, sampling=sampling), info, drafts, tokenizer


def defaults_of(options: RunOptions, **more: Any) -> Defaults:
    """Of requests that come one by one. `more`: further fields."""
    context = options.context
    return Defaults(options.sampling, context.predict, options.text.stops, context.ignore_eos, **more)


def deploy_largest(
    options: RunOptions,
    hosts: Sequence[Host],
    info: ModelInfo,
    drafts: Sequence[ModelInfo],
    n_ctx: int,
    least: int,
    n_prompt: int,
) -> JobPlan:
    """The plan for a context of `n_ctx` tokens, or without -c of as many as fit, `least` at least. Where these do not
    fit either --fit gives up something else. Raises UserError."""
    plain, size = options.changed(fit=False), n_ctx
    while True:
        try:
            return deploy(plain, hosts, info, drafts, size, min(size, n_prompt), min(size, least))
        except DoesNotFit as error:
            refusal = error
        if options.context.ctx_size or size <= least:
            break
        size = max(least, size // 2)
    if not options.context.may_fit:
        raise refusal
    try:
        return deploy(options, hosts, info, drafts, n_ctx, min(n_ctx, n_prompt), min(n_ctx, least))
    except DoesNotFit as error:
        raise DoesNotFit(str(refusal), refusal.plan, error.tried) from None


def check_outputs(options: RunOptions, table: Table = RESULTS) -> None:
    """Raises UserError for files that cannot be written, or that are read. `table`: the one of --results."""
    output, cache, inputs = options.output, options.models.slice_cache, inputs_of(options)
    check_separate({"--results": output.results, "--trace": output.trace, "--resume": output.resume}, inputs)
    if cache and os.path.exists(cache) and not os.path.isdir(cache):
        raise UserError(f"--slice-cache {cache} is no directory; name one, it is made if it is not there")
    if output.results:
        table.check(output.results)
    if output.trace:
        check_writable(output.trace, "--trace")


def inputs_of(options: RunOptions) -> dict[str, list[Path]]:
    """The files that a job reads, by the options that name them."""
    text, grammar, pace = options.text, options.constraints, options.experiments.pace
    files = {
        "--file": text.file if text.file != STDIN else None,
        "--grammar-file": grammar.grammar_file,
        "--json-schema-file": grammar.schema_file,
        "--system-prompt-file": text.chat.system_file if text.chat else None,
        "--chat-template-file": text.chat.template_file if text.chat else None,
        "--pace": Path(pace.profile) if pace else None,
    }
    models = {
        "--model": part_paths(options.models.target),
        "--lora": [each.path for each in options.models.adapters],
        "--model-draft": [part for draft in options.models.drafts for part in part_paths(draft)],
    }
    return models | {option: [file] if file else [] for option, file in files.items()}
