"""`pipeinfer models`: look at model files, compare them, and cut them. What is done is in `job.inspect`, `job.loading`.

Imports are in the functions: what loads libllama takes a while.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.command import Command, Group
from pipeinfer.cluster.assignment import parse_split
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX, MAX_LAYERS
from pipeinfer.job.options.options import DEFAULT, RunOptions
from pipeinfer.job.options.plan_file import read_plan
from pipeinfer.job.options.values import SPLIT, THREADS, File, Folder, Listed, Text, Whole

DIFFERENT = 1
"""The exit code for vocabularies that differ too much."""

as_json = click.option("--json", is_flag=True, help="Print one JSON object.")


@click.group(cls=Group)
def models() -> None:
    """Look at model files, and cut them into slices."""


@models.command("info", cls=Command)
@click.argument("file", type=File())
@click.option(
    "-c", "--ctx-size", type=Whole(0, MAX_CTX), default=0,
    help="Context that stages are weighed with. [default: the model's, 4096 at most]",
)  # fmt: skip
@click.option(
    "--numerics", type=click.Choice(["exact", "fast"]), default=DEFAULT.numerics, show_default=True,
    help="As in `run`: fast lays weights out anew, exact has a cache for prompts.",
)  # fmt: skip
@as_json
def info_command(file: Path, ctx_size: int, numerics: str, json: bool) -> int:
    """Tell what a model file is: layers and bytes, vocabulary and template, whether it can be cut, what stages weigh.

    Only the header and the vocabulary are read.
    """
    from pipeinfer.job.inspect.model_report import describe_file
    from pipeinfer.observe.texts.model_text import info_lines

    found = describe_file(_fetched(file), ctx_size, numerics)
    _tell(found, info_lines(found), json)
    return 0


@models.command("check", cls=Command)
@click.argument("target", type=File())
@click.argument("draft", type=File())
@click.option("-p", "--prompt", type=Text(), help="Measure the acceptance on what the target writes after this text.")
@click.option("-f", "--file", type=File(stdin=True), help="The same with the text of a file; - is standard input.")
@click.option(
    "-n", "--predict", type=Whole(0, MAX_CTX), default=64, show_default=True,
    help="Tokens that the target writes after each text; 0: compare the vocabularies alone.",
)  # fmt: skip
@click.option(
    "-t", "--threads", type=THREADS, default=max(1, (os.cpu_count() or 1) // 2), help="[default: half the cores]"
)
@as_json
def check_command(
    target: Path, draft: Path, prompt: str | None, file: Path | None, predict: int, threads: int, json: bool
) -> int:
    """Tell whether DRAFT can guess for TARGET: do their vocabularies match, and how often is it right?

    Where they differ a little, tokens are translated. Exit code 0 if it can, 1 if not. Without -p and -f three short
    texts are continued.
    """
    from pipeinfer.job.inspect.pair_report import check_pair
    from pipeinfer.job.requests.request import read_prompt
    from pipeinfer.observe.texts.model_text import check_lines

    given = prompt is not None or file is not None
    text = read_prompt(RunOptions(model=target, prompt=prompt, file=file)) if given else None
    if text == "":
        raise UserError(f"--file {file} is empty; give some text, or leave it out")
    found = check_pair(_fetched(target), _fetched(draft), text, predict, threads)
    _tell(found, check_lines(found), json)
    return 0 if found["can_draft"] else DIFFERENT


@models.command("list", cls=Command)
@as_json
def list_command(json: bool) -> None:
    """List the models in the hub's cache: what -hf takes without a network."""
    from dataclasses import asdict

    from pipeinfer.models.hub import cached_models
    from pipeinfer.observe.texts.model_text import list_lines

    found = [asdict(model) | {"path": str(model.path)} for model in cached_models()]
    _tell({"models": found}, list_lines(found), json)


@models.command("split", cls=Command)
@click.argument("target", type=File())
@click.option("-o", "--output", type=Folder(), required=True, help="The directory, which --slice-cache then names.")
@click.option("--layer-split", type=SPLIT, help="Layers a stage (4,4,8) or proportions (0.25,0.25,0.5), as in `run`.")
@click.option("--plan", type=File(), help="A plan as `pipeinfer plan --json` prints it: its stages.")
@click.option(
    "--stages", type=Whole(2, MAX_LAYERS), help="So many stages, by size, as `run` cuts for ranks that are alike."
)
@click.option(
    "--only", type=Listed(Whole(0, MAX_LAYERS - 1)), default=(),
    help="Slices of these stages alone, counted from 0 as in the plan: for a host with some of the ranks.",
)  # fmt: skip
def split_command(
    target: Path, output: Path, layer_split: str | None, plan: Path | None, stages: int | None, only: tuple[int, ...]
) -> None:
    """Write the slices of TARGET's layers into a directory: ranks of `run --slice-cache` read them and cut nothing.

    The directory may be copied to the ranks' hosts. Slices are verified before they are used: that they are whole, and
    of the file that rank 0, or the rank itself, has now. What is there already and right is left.
    """
    if sum(given is not None for given in (layer_split, plan, stages)) != 1:
        raise UserError("give one of --layer-split, --plan and --stages: which layers belong together")
    from pipeinfer.job.loading.split import write_slices

    split = parse_split(layer_split) if layer_split else read_plan(plan).layer_split if plan else None
    for each in write_slices(_fetched(target), split, stages or 0, output, only):
        state = "written" if each.is_new else "is there"
        click.echo(f"{each.path}: {each.what}, {each.n_bytes / 1e6:.1f} MB, {state}")


def _fetched(path: Path) -> Path:
    from pipeinfer.job.placement.model_files import fetch_files

    return fetch_files([path])[0]


def _tell(found: dict[str, Any], lines: Iterable[str], json: bool) -> None:
    from pipeinfer.observe.texts.json_text import json_text

    click.echo(json_text(found) if json else "\n".join(lines))
