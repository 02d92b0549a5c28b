"""The commands: dispatch to a file each, and turn errors into one line and an exit code."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from pipeinfer import __version__
from pipeinfer.child import package_version
from pipeinfer.cli.options.llama_cpp import CommandGroup
from pipeinfer.cluster.hosts.launch import exit_together, fail_together, rank_from_environment
from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import final_code

COMMANDS = {
    "run": "run:run",
    "chat": "run:chat_command",
    "bench": "bench:bench",
    "batch": "serve:batch_command",
    "serve": "serve:serve_command",
    "models": "models:models",
    "simulate": "simulate:simulate_command",
    "plan": "plan:plan_command",
    "info": "models:info_command",
    "measure": "bench:measure_command",
    "perplexity": "bench:perplexity_command",
    "submit": "submit:submit_command",
    "supervise": "submit:supervise_command",
    "doctor": "plan:doctor_command",
}
"""Command -> module in `pipeinfer.cli`, and function."""


class LazyGroup(CommandGroup):
    """Imports a command when it is called, so that ranks do not pay for other commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(import_module(f"pipeinfer.cli.{module}"), name)
        return command


def show_version(ctx: click.Context, option: click.Parameter, is_set: bool) -> None:
    if is_set and not ctx.resilient_parsing:
        from pipeinfer.models.llama.ggml import describe_build

        click.echo(f"pipeinfer {__version__}, {describe_build()}, {describe_surroundings()}")
        ctx.exit()


VERSION_HELP = "Show this version and what else a report of a fault needs."
REPORTED = ("mpi4py", "mpich", "openmpi", "numpy", "llguidance", "torch")  # packages for a report of a fault


def describe_surroundings() -> str:
    """The versions of Python, of the installed packages of `REPORTED`, and of the system."""
    versions = [f"{name} {version}" for name in REPORTED if (version := package_version(name))]
    return ", ".join([f"Python {platform.python_version()}", *versions, platform.platform()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version, help=VERSION_HELP)
def cli() -> None:
    """Generate text with a model spread over MPI ranks, kept busy by speculation."""


def run_command(arguments: Sequence[str] | None, has_output: bool) -> NoReturn:
    """Run one command and end the process with its exit code."""
    if not has_output:
        fail_together(2, "standard output is closed; give it a place, such as > /dev/null")
    # every rank parses the same command line; one prints help and version
    if rank_from_environment() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (kept for the process)
    try:
        code = cli.main(args=arguments, prog_name="pipeinfer", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        if rank_from_environment() == 0:
            print(error.format_message(), file=sys.stderr)
        code = 2
    except click.ClickException as error:
        fail_together(2, error.format_message())
    except UserError as error:
        fail_together(2, str(error))
    exit_together(final_code(code if isinstance(code, int) else 0))
