"""Options that name models on the hub, under llama.cpp's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import Text
from pipeinfer.errors import UserError
from pipeinfer.models.hub_names import HubName, parse_name

Command = TypeVar("Command", bound=Callable[..., Any])

HUB_NAMES = ("hf_repo", "hf_file", "hf_drafts", "offline", "hf_token")


class Repo(Text):
    """The name of a model on the hub."""

    name = "user/model[:quant]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> HubName:
        if isinstance(value, HubName):
            return value
        try:
            return parse_name(str(super().convert(value, param, ctx)))
        except UserError as error:
            self.fail(str(error), param, ctx)


def hub_options(command: Command) -> Command:
    """Add them; `take_models` collects what they gave."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS = (
    click.option(
        "-hf", "-hfr", "--hf-repo", "hf_repo", type=Repo(),
        help="Target model on the hub, downloaded once. Of its GGUF files Q4_K_M, else Q8_0, else the first; or the "
        "quantisation behind the colon. -m hf:USER/MODEL[:QUANT] is the same, in every command.",
    ),
    click.option("-hff", "--hf-file", "hf_file", type=Text(), help="The file of -hf to take."),
    click.option(
        "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "hf_drafts", type=Repo(), multiple=True,
        help="Draft model on the hub; may be given again, as -md.",
    ),
    click.option(
        "-hft", "--hf-token", "hf_token", type=Text(), help="For models that are private or gated. [default: HF_TOKEN]",
    ),
    click.option("--offline", is_flag=True, help="Take models of the hub from its cache only."),
)  # fmt: skip


def take_models(
    model: Path | None, drafts: tuple[Path, ...], others: dict[str, Any]
) -> tuple[Path | None, tuple[Path, ...]]:
    """The models that -m and -md, and these options, which are taken out of `others`, name. Raises UserError."""
    take_token(others)
    repo, file = others.pop("hf_repo"), others.pop("hf_file")
    drafts += tuple(name.path for name in others.pop("hf_drafts"))
    if file and not repo:
        raise UserError(f"--hf-file {file} is a file of no repository; give -hf USER/MODEL too")
    if repo and model:
        raise UserError(f"--model {model} and --hf-repo {repo} both name the target; give one of them")
    if repo is None:
        return model, drafts
    return (parse_name(f"{repo.repo}:{file}") if file else repo).path, drafts


def take_token(others: dict[str, Any]) -> None:
    """Hand it to huggingface_hub by the environment: options are printed where ranks differ."""
    if token := others.pop("hf_token"):
        os.environ["HF_TOKEN"] = token
