"""The `pipeinfer` command: dispatches to one file a command and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from pipeinfer import __version__
from pipeinfer.cli.bench import bench
from pipeinfer.cli.command import Group
from pipeinfer.cli.models import models
from pipeinfer.cli.record import record_command
from pipeinfer.cli.reproduce import reproduce_command
from pipeinfer.cli.run import run
from pipeinfer.cli.simulate import simulate_command
from pipeinfer.cli.streams import settle, take_streams
from pipeinfer.cli.survey import measure_command
from pipeinfer.cli.timeline import timeline
from pipeinfer.cluster.launch import exit_together, rank_from_environment
from pipeinfer.errors import UserError


def show_version(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from pipeinfer.models.build import describe_build

        click.echo(f"pipeinfer {__version__}, {describe_build()}")
        ctx.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version,
    help="Show this version and llama.cpp's.",
)  # fmt: skip
def cli() -> None:
    """Generate text with a model spread over MPI ranks, kept busy by speculation."""


cli.add_command(run)
cli.add_command(bench)
cli.add_command(models)
cli.add_command(simulate_command)
cli.add_command(record_command)
cli.add_command(measure_command)
cli.add_command(reproduce_command)
cli.add_command(timeline)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script. Exit codes: 0, 2 for bad input, 130 after Ctrl-C, 1 for a fault."""
    speaks = rank_from_environment() == 0
    if not take_streams():
        print("pipeinfer: standard output is closed; give it a place, such as > /dev/null", file=sys.stderr)
        exit_together(2)
    if not speaks:  # every rank parses the same command line; one prints help, version and usage errors
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (kept for the process)
    try:
        code = cli.main(args=arguments, prog_name="pipeinfer", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        if speaks:
            print(error.format_message(), file=sys.stderr)
        code = 2
    except (click.ClickException, UserError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if speaks:
            print(f"pipeinfer: {' '.join(message.split())}", file=sys.stderr)
        code = 2
    except click.exceptions.Abort:
        code = 130
    exit_together(settle(code if isinstance(code, int) else 0))
