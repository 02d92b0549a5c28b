"""`pipeinfer chat`: its options, which are those of `run`. What it does is in `job.chat`."""

from __future__ import annotations

import copy
from typing import Any

import click

from pipeinfer.cli.command import Command
from pipeinfer.cli.run import run, run_options, warn_of_variables

NOT_SHARED = ("chat", "conversation", "results", "trace")


@click.command("chat", cls=Command)
def chat_command(**given: Any) -> int:
    """Talk with a model, turn by turn. Answers go to standard output, all else to standard error.

    What was said stays in the caches: a turn costs its new tokens. -p is said first. On a terminal Ctrl-C stops an
    answer, a second one, or one at the prompt, ends the chat; a backslash at the end of a line goes on in the next one.
    /help lists what else can be typed. Under mpirun rank 0 reads and prints.
    """
    warn_of_variables(chat_command)
    options = run_options(**given, chat=True)
    from pipeinfer.job.chat.chat import run_chat  # initialises MPI

    return run_chat(options)


chat_command.params += [copy.copy(option) for option in run.params if option.name not in NOT_SHARED]
for option in chat_command.params:
    if option.name == "json" and isinstance(option, click.Option):
        option.help = "Print a JSON object for each answer instead of its text."
    if option.name == "prompt" and isinstance(option, click.Option):
        option.help = "What is said first."
    if option.name == "file" and isinstance(option, click.Option):
        option.help = "The same, from a file."
