"""`pipeinfer models info`: its options. What it tells is in `job.model_report`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.options import DEFAULT
from pipeinfer.job.options.values import File, Whole


@click.command("info", cls=Command)
@click.argument("file", type=File())
@click.option(
    "-c",
    "--ctx-size",
    type=Whole(0, MAX_CTX),
    default=0,
    help="Context that stages are weighed with. [default: the model's, 4096 at most]",
)
@click.option(
    "--numerics",
    type=click.Choice(["exact", "fast"]),
    default=DEFAULT.numerics,
    show_default=True,
    help="As in `run`: fast lays weights out anew, exact has a cache for prompts.",
)
@click.option("--json", is_flag=True, help="Print one JSON object.")
def info_command(file: Path, ctx_size: int, numerics: str, json: bool) -> int:
    """Tell what a model file is: layers and bytes, vocabulary and template, whether it can be cut, what stages weigh.

    Only the header and the vocabulary are read.
    """
    from pipeinfer.job.inspect.model_report import describe_file  # loads libllama
    from pipeinfer.job.placement.fetch import fetch_files
    from pipeinfer.observe.texts.json_text import json_text
    from pipeinfer.observe.texts.model_text import info_lines

    (path,) = fetch_files([file])
    found = describe_file(path, ctx_size, numerics)
    click.echo(json_text(found) if json else "\n".join(info_lines(found)))
    return 0
