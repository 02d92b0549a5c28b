"""`pipeinfer models check`: its options. What it tells is in `job.pair_report`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import THREADS, File, Text, Whole

DIFFERENT = 1
"""The exit code for vocabularies that differ too much."""


@click.command("check", cls=Command)
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
@click.option("--json", is_flag=True, help="Print one JSON object.")
def check_command(
    target: Path, draft: Path, prompt: str | None, file: Path | None, predict: int, threads: int, json: bool
) -> int:
    """Tell whether DRAFT can guess for TARGET: do their vocabularies match, and how often is it right?

    Where they differ a little, tokens are translated. Exit code 0 if it can, 1 if not. Without -p and -f three short
    texts are continued.
    """
    from pipeinfer.job.inspect.pair_report import check_pair  # loads libllama
    from pipeinfer.job.placement.fetch import fetch_files
    from pipeinfer.job.requests.request import read_prompt
    from pipeinfer.observe.texts.json_text import json_text
    from pipeinfer.observe.texts.model_text import check_lines

    given = prompt is not None or file is not None
    text = read_prompt(RunOptions(model=target, prompt=prompt, file=file)) if given else None
    if text == "":
        raise UserError(f"--file {file} is empty; give some text, or leave it out")
    target, draft = fetch_files([target, draft])
    found = check_pair(target, draft, text, predict, threads)
    click.echo(json_text(found) if json else "\n".join(check_lines(found)))
    return 0 if found["can_draft"] else DIFFERENT
