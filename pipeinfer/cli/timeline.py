"""`pipeinfer timeline`: draw a trace as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.job.options.values import File, Number
from pipeinfer.observe.timeline import N_SETTLED, draw_timeline

MAX_MS = 10**9


@click.command(cls=Command)
@click.argument("trace", type=File())
@click.option("-o", "--output", type=File(), required=True, help="Picture; .png, .svg or .pdf. [extra: plot]")
@click.option("--from", "from_ms", type=Number(0, MAX_MS), help="Begin here (ms). [default: the first token]")
@click.option(
    "--for",
    "for_ms",
    type=Number(0, MAX_MS, above=True),
    help=f"Draw this long (ms). [default: {N_SETTLED} accepted verdicts]",
)
def timeline(trace: Path, output: Path, from_ms: float | None, for_ms: float | None) -> None:
    """Draw what each rank did, from a file that `run --trace` wrote."""
    draw_timeline(trace, output, from_ms, for_ms)
    click.echo(output)
