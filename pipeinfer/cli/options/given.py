"""Options of a job from the words of a command line. Checks how options go together."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.command import is_from_environment, variable_of
from pipeinfer.cli.options.environment import ignored_variables
from pipeinfer.cli.options.setting_options import asks_for_guesses, policy_meant, take, take_policies
from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.core.logit_bias import bias_text
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions, choose_drafts, unescape
from pipeinfer.job.options.sections import Models
from pipeinfer.job.options.text_sections import ChatOptions, GrammarOptions, Texts
from pipeinfer.models.demo import default_models
from pipeinfer.models.hub_names import parse_name
from pipeinfer.models.text.stop_strings import check_stops
from pipeinfer.policies import Auto


def run_options(given: dict[str, Any], is_chat: bool = False) -> RunOptions:
    """What a command asks for. Raises UserError or click.UsageError for options that do not go together."""
    given = dict(given)
    texts = take(Texts, given)
    return job_options(
        given,
        sampling=replace(take(SamplingParams, given), logit_bias=take_biases(given)),
        prompt=_unescaped(given.pop("prompt", None), texts.escape, "--prompt"),
        chat=take_chat(given, is_chat, texts.escape),
        stops=_stops(texts),
        parse_special=texts.parse_special,
        special_in_messages=texts.special_in_messages,
        grammar=take_grammar(given),
    )


def job_options(given: dict[str, Any], **found: Any) -> RunOptions:
    """The same of a command that makes no text. `found`: fields that are known."""
    model, named = take_models(given)
    target, its_drafts = (model, ()) if model else default_models(bool(named) or asks_for_guesses(given))
    drafts = choose_drafts(named, its_drafts)
    (policy,) = take_policies([policy_meant(given.pop("policy"), bool(drafts) or given["lookup"], given)], given)
    finds_head = isinstance(policy, Auto) and not (named or drafts)
    return RunOptions(model=target, drafts=drafts, finds_head=finds_head, policy=policy, **found, **given)


def take_models(given: dict[str, Any]) -> tuple[Path | None, tuple[Path, ...]]:
    """Move the target and the drafts out of a command's keyword arguments. Raises UserError."""
    take_token(given)
    models = take(Models, given)
    repo, file = models.hf_repo, models.hf_file
    drafts = (*models.drafts, *(name.path for name in models.hf_drafts))
    if file and not repo:
        raise UserError(f"--hf-file {file} is a file of no repository; give -hf USER/MODEL too")
    if repo and models.model:
        raise UserError(f"--model {models.model} and --hf-repo {repo} both name the target; give one of them")
    if repo is None:
        return models.model, drafts
    return (parse_name(f"{repo.repo}:{file}") if file else repo).path, drafts


def take_token(given: dict[str, Any]) -> None:
    """Hand it to huggingface_hub by the environment: options are printed where ranks differ."""
    if token := given.pop("hf_token"):
        os.environ["HF_TOKEN"] = token


def take_chat(given: dict[str, Any], is_chat: bool, escape: bool) -> ChatOptions | None:
    """None where there is no chat. Raises click.UsageError for options of chats alone, and for two system messages."""
    chat = take(ChatOptions, given)
    if not is_chat:
        ctx = click.get_current_context(silent=True)
        for name, default, setting in settings_of(ChatOptions):
            if getattr(chat, name) != default and not (ctx and is_from_environment(ctx, name)):
                raise click.UsageError(f"{setting.flag} is for chats; give --chat or -cnv too, or leave it out")
        return None
    if chat.system is not None and chat.system_file is not None:
        raise click.UsageError("-sys and -sysf both give the system's message; give one of them")
    return replace(chat, system=_unescaped(chat.system, escape, "--system-prompt"))


def take_biases(given: dict[str, Any]) -> str:
    """Raises click.UsageError for too many."""
    try:
        return bias_text(given.pop("biases"))
    except ValueError as error:
        raise click.UsageError(f"--logit-bias {error}") from None


def take_grammar(given: dict[str, Any]) -> GrammarOptions:
    """Raises click.UsageError for more than one."""
    found = take(GrammarOptions, given)
    flags = [setting.flag for _, _, setting in settings_of(GrammarOptions)]
    if sum(getattr(found, name) is not None for name, _, _ in settings_of(GrammarOptions)) > 1:
        raise click.UsageError(
            f"{', '.join(flags[:-1])} and {flags[-1]} all say what the text must be; give one of them"
        )
    return found


def check_sequences(sequences: int, parallel: int) -> None:
    """Raises UserError where requests that are open at a time would have no sequence."""
    if sequences and sequences < parallel:
        raise UserError(f"--sequences {sequences} is less than --parallel {parallel}, and each request needs one; "
                        "leave it out, or lower --parallel")  # fmt: skip


def warn_of_variables() -> None:
    """Say, on one rank, which of llama.cpp's variables are read, and which are set in vain."""
    ctx = click.get_current_context()
    if rank_from_environment() == 0:
        read = [variable_of(param) for param in ctx.command.params if is_from_environment(ctx, str(param.name))]
        if read:
            click.echo(f"pipeinfer: options are given by {', '.join(sorted(read))}", err=True)
        for line in ignored_variables(ctx.command, os.environ):
            click.echo(f"pipeinfer: {line}", err=True)


def _stops(texts: Texts) -> tuple[str, ...]:
    stops = tuple(unescape(text, "--stop") if texts.escape else text for text in texts.stops)
    check_stops("--stop", stops)
    return stops


def _unescaped(text: str | None, escape: bool, option: str) -> str | None:
    return unescape(text, option) if text and escape else text
