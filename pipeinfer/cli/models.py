"""`pipeinfer info` and `models`: reports on this host and on model files, and slices of them. The commands are in
`job.inspect`, `job.loading` and `job.doctor`. Imports are in the functions: loading libllama takes a while."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.llama_cpp import Command, CommandGroup
from pipeinfer.cli.options.setting_options import command, take
from pipeinfer.cluster.assignment import parse_split
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX, MAX_LAYERS
from pipeinfer.job.options.plan_file import SPLIT, read_plan
from pipeinfer.job.options.sections import Numerics, Servers
from pipeinfer.job.options.text_sections import PromptOptions
from pipeinfer.job.options.values import THREADS, File, Folder, Listed, TextType, Whole

DIFFERENT = 1  # the exit code for vocabularies that differ too much
NUMERICS = click.Choice(["exact", "fast"])
CTX_SIZE_HELP = "Context that stages are weighed with. [default: the model's, 4096 at most]"
NUMERICS_HELP = "As in `run`: fast lays weights out anew, exact has a cache for prompts."
PREDICT_HELP = "Tokens that the target writes after each text; 0: compare the vocabularies alone."
ONLY_HELP = "Slices of these stages alone, counted from 0 as in the plan: for a host with some of the ranks."

json_option = click.option("--json", is_flag=True, help="Print one JSON object.")


@command("info", Servers)
@click.option("--json", is_flag=True, help="Print one JSON object instead of lines.")
def info_command(json: bool, **servers: Any) -> int:
    """Tell what this host can do: versions, backends and their devices, memory, cores, MPI, and what is exact where.

    Under mpirun of the host of every rank. MPI is not started otherwise. The first thing to paste into a report of a
    fault.
    """
    from pipeinfer.job.inspect.info import InfoQuestion, info

    return info(InfoQuestion(json, take(Servers, servers)))


@click.group(cls=CommandGroup)
def models() -> None:
    """Look at model files, and cut them into slices."""


@models.command("info", cls=Command)
@click.argument("file", type=File())
@click.option("-c", "--ctx-size", type=Whole(0, MAX_CTX), default=0, help=CTX_SIZE_HELP)
@click.option("--numerics", type=NUMERICS, default=Numerics.numerics, show_default=True, help=NUMERICS_HELP)
@json_option
def models_info_command(file: Path, ctx_size: int, numerics: str, json: bool) -> int:
    """Tell what a model file is: layers and bytes, vocabulary and template, whether it can be cut, what stages weigh.

    Only the header and the vocabulary are read. Of an adapter (LoRA): architecture, rank, alpha and tensors.
    """
    from pipeinfer.job.inspect.model_report import (
        adapter_lines,
        describe_adapter,
        describe_file,
        file_lines,
        is_adapter,
    )

    path = _fetch(file)
    if is_adapter(path):
        report = describe_adapter(path)
        _print(report, adapter_lines(report), json)
        return 0
    report = describe_file(path, ctx_size, numerics)
    _print(report, file_lines(report), json)
    return 0


@models.command("check", cls=Command)
@click.argument("target", type=File())
@click.argument("draft", type=File())
@click.option(
    "-p", "--prompt", type=TextType(), help="Measure the acceptance on what the target writes after this text."
)
@click.option("-f", "--file", type=File(stdin=True), help="The same with the text of a file; - is standard input.")
@click.option("-n", "--predict", type=Whole(0, MAX_CTX), default=64, show_default=True, help=PREDICT_HELP)
@click.option(
    "-t", "--threads", type=THREADS, default=max(1, (os.cpu_count() or 1) // 2), help="[default: half the cores]"
)
@json_option
def check_command(
    target: Path, draft: Path, prompt: str | None, file: Path | None, predict: int, threads: int, json: bool
) -> int:
    """Tell whether DRAFT can guess for TARGET: do their vocabularies match, and how often is it right?

    Where they differ a little, tokens are translated. Exit code 0 if it can, 1 if not. Without -p and -f three short
    texts are continued.
    """
    from pipeinfer.job.inspect.pair_report import check_lines, check_pair
    from pipeinfer.job.requests.request import read_prompt

    has_text = prompt is not None or file is not None
    text = read_prompt(PromptOptions(prompt=prompt, file=file)) if has_text else None
    if text == "":
        raise UserError(f"--file {file} is empty; give some text, or leave it out")
    report = check_pair(_fetch(target), _fetch(draft), text, predict, threads)
    _print(report, check_lines(report), json)
    return 0 if report["can_draft"] else DIFFERENT


@models.command("list", cls=Command)
@json_option
def list_command(json: bool) -> None:
    """List the models in the hub's cache: what -hf takes without a network."""
    from dataclasses import asdict

    from pipeinfer.models.hub import cached_models

    report = [asdict(model) | {"path": str(model.path)} for model in cached_models()]
    _print({"models": report}, _list_lines(report), json)


@models.command("verify", cls=Command)
@click.argument("files", type=File(), nargs=-1, required=True)
@click.option("--hosts", type=TextType(), help="A hosts file, or names: node1,node2. [default: this machine]")
@json_option
def verify_command(files: tuple[Path, ...], hosts: str | None, json: bool) -> int:
    """Hash whole files (SHA-256, as model hubs show it), on all hosts at once, and tell whether they are the same.

    A hash is kept until its file is written to. Files are also compared with SHA256SUMS in their folder, which
    `models split` writes. Exit code 0 if all are the same, 1 if not.
    """
    from pipeinfer.job.doctor.inquiry import verify_files, verify_lines

    report = verify_files([_fetch(file) for file in files], hosts)
    _print(report, verify_lines(report), json)
    return 0 if report["alike"] else DIFFERENT


@models.command("split", cls=Command)
@click.argument("target", type=File())
@click.option("-o", "--output", type=Folder(), required=True, help="The directory, which --slice-cache then names.")
@click.option("--layer-split", type=SPLIT, help="Layers a stage (4,4,8) or proportions (0.25,0.25,0.5), as in `run`.")
@click.option("--plan", type=File(), help="A plan as `pipeinfer plan --json` prints it: its stages.")
@click.option(
    "--stages", type=Whole(2, MAX_LAYERS), help="So many stages, by size, as `run` cuts for ranks that are alike."
)
@click.option("--only", type=Listed(Whole(0, MAX_LAYERS - 1)), default=(), help=ONLY_HELP)
def split_command(
    target: Path, output: Path, layer_split: str | None, plan: Path | None, stages: int | None, only: tuple[int, ...]
) -> None:
    """Write the slices of TARGET's layers into a directory: ranks of `run --slice-cache` read them and cut nothing.

    The directory may be copied to the ranks' hosts. Slices are verified before they are used: that they are whole, and
    of the file that rank 0, or the rank itself, has now. What is there already and right is left.
    """
    if sum(option is not None for option in (layer_split, plan, stages)) != 1:
        raise UserError("give one of --layer-split, --plan and --stages: which layers belong together")
    from pipeinfer.job.doctor.hashes import write_manifest
    from pipeinfer.job.loading.split import write_slices

    split = parse_split(layer_split) if layer_split else read_plan(plan).layer_split if plan else None
    paths = []
    for each in write_slices(_fetch(target), split, stages or 0, output, only):
        paths.append(each.path)
        state = "written" if each.is_new else "is there"
        click.echo(f"{each.path}: {each.what}, {each.n_bytes / 1e6:.1f} MB, {state}")
    click.echo(f"{write_manifest(paths)}: their SHA-256, for `pipeinfer models verify` and sha256sum")


def _list_lines(cached: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    from pipeinfer.text import markdown_table, size_text

    if not cached:
        return ["no models of the hub are in its cache; -hf USER/MODEL downloads one"]
    sizes = (size_text(model["n_bytes"]) + ("" if model["is_whole"] else ", in part") for model in cached)
    rows = [[m["repo"], m["quant"] or "unknown", size, m["path"]] for m, size in zip(cached, sizes, strict=True)]
    return markdown_table(["model", "quant", "size", "path"], rows, right_aligned=["size"])


def _fetch(path: Path) -> Path:
    from pipeinfer.job.placement.checks import fetch_files

    return fetch_files([path])[0]


def _print(report: dict[str, Any], lines: Iterable[str], json: bool) -> None:
    from pipeinfer.text import json_text, printable, printed

    click.echo(json_text(report) if json else printed(map(printable, lines)))
