"""Options of a job from the keyword arguments of a command, and how they go together; `--spec-type`, llama.cpp's names
of what guesses."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.llama_cpp import ignored_variables, is_from_environment, variable_of
from pipeinfer.cli.options.setting_options import requests_guesses, select_policy, take, take_policies
from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.core.samplers import SAMPLERS, bias_text, order_text, sampler_names, switched_off
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import setting, settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import NO_DRAFT
from pipeinfer.job.options.options import JobModels, RunOptions, choose_drafts, unescape
from pipeinfer.job.options.sections import Models
from pipeinfer.job.options.text_sections import AnswerOptions, ChatOptions, GrammarOptions
from pipeinfer.job.options.values import Listed
from pipeinfer.models.demo import default_models
from pipeinfer.models.gguf.model_info import OWN_HEAD
from pipeinfer.models.hub import parse_name
from pipeinfer.models.text.stops import check_stops
from pipeinfer.models.text.tokenizer import BREAKERS_OPTION, breakers_json
from pipeinfer.policies import Auto, Iterative

Values = dict[str, Any]  # a command's keyword arguments, by the names of its parameters


def run_options(values: Values, is_chat: bool = False) -> RunOptions:
    """Those of a job that writes texts. Raises UserError or click.UsageError for options that exclude each other."""
    values, escape = dict(values), values["escape"]
    stops = tuple(_unescaped(text, escape, "--stop") or "" for text in values.pop("stops"))
    check_stops("--stop", stops)
    return job_options(
        values,
        sampling=replace(take_sampling(values, escape), logit_bias=take_biases(values)),
        prompt=_unescaped(values.pop("prompt", None), escape, "--prompt"),
        chat=take_chat(values, is_chat, escape),
        stops=stops,
        constraints=take_grammar(values),
    )


def job_options(values: Values, **fields: Any) -> RunOptions:
    """The options of any job. `fields`: further ones of its sections."""
    values = with_spec_types(values)
    model, named = take_models(values)
    target, its_drafts = (model, ()) if model else default_models(bool(named) or requests_guesses(values))
    drafts = choose_drafts(named, its_drafts)
    has_guesses = bool(drafts) or values["lookup"]
    name = values.pop("policy")
    (policy,) = take_policies([select_policy(name, has_guesses, values)], values)
    by_ranks = name is None and not policy.drafts and values["lookup"] is None
    is_torch = any(backend.is_torch for backend in values["backend"])
    models = JobModels(
        target=target, drafts=drafts, finds_head=isinstance(policy, Auto) and not (named or drafts or is_torch)
    )
    return RunOptions(models=models).changed(policy=policy, by_ranks=by_ranks, **fields, **values)


def take_models(values: Values) -> tuple[Path | None, tuple[Path, ...]]:
    """Move the target and the drafts out of a command's values. Raises UserError."""
    models = take(Models, values)
    repo, file = models.hf_repo, models.hf_file
    drafts = (*models.drafts, *(name.path for name in models.hf_drafts))
    if file and not repo:
        raise UserError(f"--hf-file {file} is a file of no repository; give -hf USER/MODEL too")
    if repo and models.model:
        raise UserError(f"--model {models.model} and --hf-repo {repo} both name the target; give one of them")
    if repo is None:
        return models.model, drafts
    return (parse_name(f"{repo.repo}:{file}") if file else repo).path, drafts


def take_chat(values: Values, is_chat: bool, escape: bool) -> ChatOptions | None:
    """None without a chat. Raises click.UsageError for options of chats alone, and for two system messages."""
    chat = take(ChatOptions, values)
    if not is_chat:
        ctx = click.get_current_context(silent=True)
        for name, default, setting in (*settings_of(ChatOptions), *settings_of(AnswerOptions)):
            value = values[name] if name in values else getattr(chat, name)
            if value != default and not (ctx and is_from_environment(ctx, name)):
                raise click.UsageError(f"{setting.flag} is for chats; give --chat or -cnv too, or leave it out")
        return None
    if chat.system is not None and chat.system_file is not None:
        raise click.UsageError("-sys and -sysf both give the system's message; give one of them")
    return replace(chat, system=_unescaped(chat.system, escape, "--system-prompt"))


def take_biases(values: Values) -> str:
    """Raises click.UsageError for too many."""
    try:
        return bias_text(values.pop("biases"))
    except ValueError as error:
        raise click.UsageError(f"--logit-bias {error}") from None


def take_sampling(values: Values, escape: bool = True) -> SamplingParams:
    """Without biases. Raises UserError for wrong breakers or samplers."""
    params, names = take(SamplingParams, values), values.pop("sampler_names")
    texts = tuple(_unescaped(text, escape, BREAKERS_OPTION) or "" for text in values.pop("dry_breakers"))
    breakers = breakers_json([] if texts == ("none",) else texts, BREAKERS_OPTION) if texts else ""
    return replace(params, dry_sequence_breakers=breakers, **({} if names is None else _samplers(names)))


def _samplers(text: str) -> dict[str, Any]:
    names = sampler_names(text)
    if unknown := [name for name in names if name not in SAMPLERS]:
        raise UserError(f"--samplers {text}: there is no sampler {unknown[0]}; give some of {';'.join(SAMPLERS)}")
    try:
        return {**switched_off(names), "sampler_order": order_text(names)}
    except ValueError as error:
        raise UserError(f"--samplers {text} {error}") from None


def take_grammar(values: Values) -> GrammarOptions:
    """Raises click.UsageError for more than one."""
    options, settings = take(GrammarOptions, values), list(settings_of(GrammarOptions))
    if sum(getattr(options, name) is not None for name, _, _ in settings) > 1:
        *flags, last = (setting.flag for _, _, setting in settings)
        raise click.UsageError(f"{', '.join(flags)} and {last} all say what the text must be; give one of them")
    return options


def check_sequences(sequences: int, parallel: int) -> None:
    """Raises UserError if open requests would have no sequence."""
    if sequences and sequences < parallel:
        limit = f"--sequences {sequences} is less than --parallel {parallel}, and each request needs one"
        raise UserError(f"{limit}; leave it out, or lower --parallel")


def warn_of_variables() -> None:
    """Print, on one rank, llama.cpp's variables that are read, and those that are set without effect."""
    ctx = click.get_current_context()
    if rank_from_environment() == 0:
        read = [variable_of(param) for param in ctx.command.params if is_from_environment(ctx, str(param.name))]
        if read:
            click.echo(f"pipeinfer: options are given by {', '.join(sorted(read))}", err=True)
        for line in ignored_variables(ctx.command, os.environ):
            click.echo(f"pipeinfer: {line}", err=True)


def _unescaped(text: str | None, escape: bool, option: str) -> str | None:
    return unescape(text, option) if text and escape else text


NONE, MTP = "none", "draft-mtp"
DRAFTS = ("draft-simple", "draft-eagle3")
N_GRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
MISSING = ("draft-dflash", "draft-dspark")
TYPES = (NONE, MTP, *DRAFTS, *N_GRAMS)


class SpecType(click.Choice[str]):
    """Of llama.cpp's names those that have a meaning here."""

    def __init__(self) -> None:
        super().__init__(TYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in MISSING:
            way_out = f"{', '.join((*DRAFTS, MTP))} and n-grams can"
            self.fail(f"{value!r} guesses with a model that cannot be loaded here; {way_out}", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class SpecTypes:
    """What guesses, by llama.cpp's names.

    spec_types: llama.cpp's names of what guesses, with commas between them: draft-simple and draft-eagle3 are the draft
        of -md, draft-mtp is -md mtp, those that begin with ngram are --lookup, none is no guesses at all.
    """

    heading = "Speculation"
    spec_types: tuple[str, ...] = setting((), "--spec-type", type=Listed(SpecType()))


def with_spec_types(values: dict[str, Any]) -> dict[str, Any]:
    """A command's values with what `--spec-type` stands for. Raises UserError where other options contradict it."""
    values = dict(values)
    types = values.pop("spec_types", ())
    if not types:
        return values
    option = f"--spec-type {','.join(types)}"
    names_draft = {*values["drafts"], *values["hf_drafts"]} - {NO_DRAFT}
    has_grams, has_draft = any(each in N_GRAMS for each in types), any(each in (MTP, *DRAFTS) for each in types)
    if NONE in types:  # as in llama.cpp, whatever else is named
        has_grams = has_draft = False
    if names_draft and not has_draft:
        raise UserError(f"{option} has no draft, and -md names one; leave one of them out, or add draft-simple")
    if has_draft and not names_draft:
        if NO_DRAFT in values["drafts"] or MTP not in types:
            raise UserError(f"{option} guesses with a draft, and -md names none; give -md FILE, or leave that out")
        values["drafts"] = (OWN_HEAD,)
    if not has_draft:
        values["drafts"] = (NO_DRAFT,)
    if has_grams or not has_draft:
        if values["lookup"] not in (None, has_grams):
            raise UserError(f"{option} and {'--lookup' if values['lookup'] else '--no-lookup'} contradict each other")
        if has_grams or values["policy"]:
            values["lookup"] = has_grams
        else:
            values["policy"] = Iterative.name
    return values
