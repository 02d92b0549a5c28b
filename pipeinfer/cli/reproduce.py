"""`pipeinfer reproduce`: its option. What it writes is in `virtual.reproduction`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.cli.command import Command
from pipeinfer.job.options.values import File
from pipeinfer.outputs import check_writable, write_file


@click.command("reproduce", cls=Command)
@click.option(
    "-o", "--output", type=File(), default=Path("docs/reproduction.md"), show_default=True,
    help="The page to write.",
)  # fmt: skip
def reproduce_command(output: Path) -> int:
    """Simulate the published set-ups and write the table of the papers' ratios beside ours (minutes, one core)."""
    from pipeinfer.virtual.reproduction import page

    check_writable(output, "--output")
    write_file(output, "--output", ("\n".join(page()) + "\n").encode())
    click.echo(output)
    return 0
