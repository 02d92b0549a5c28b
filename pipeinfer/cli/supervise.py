"""`pipeinfer supervise`: its options. What it does is in `supervisor`."""

import os

import click

from pipeinfer.cli.options.llama_cpp import Command
from pipeinfer.job.options.values import TextType, Whole

RESTARTS_HELP = "Starts after the first one, within ten minutes."
WORDS = "[LAUNCHER ...] pipeinfer {run|chat|batch|serve} ..."


@click.command("supervise", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("--restarts", type=Whole(0, 1_000_000), default=10, show_default=True, help=RESTARTS_HELP)
@click.argument("words", nargs=-1, type=TextType(blank=True), metavar=WORDS)
def supervise_command(restarts: int, words: tuple[str, ...]) -> int:
    """Start a job, and when a rank or a host is lost start it again, to go on where it was with the same text.

    The launcher's words come last: pipeinfer supervise mpirun -f hosts -np 4 pipeinfer batch in.jsonl -o out.jsonl.
    Hosts that take no ranks, as their slots come last, are spares. A host that cannot be reached, or on which ranks die
    twice within ten minutes, is left out; with fewer hosts there are fewer ranks. Bad input ends with exit code 2.
    """
    from pipeinfer.cluster.hosts.launcher import read_launcher
    from pipeinfer.supervisor.supervisor import Supervisor

    return Supervisor(read_launcher(words), restarts, os.environ).run()
