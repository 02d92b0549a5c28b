"""`pipeinfer chat`: its sections of options. The command is in `job.chat`."""

from typing import Any

from pipeinfer.cli.options.job_options import run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command
from pipeinfer.cli.run import OF_ONE_USER
from pipeinfer.job.options.sections import Models
from pipeinfer.job.options.text_sections import ContextOptions, PromptOptions

HELP = {
    "json": "Print a JSON object for each answer instead of its text.",
    "prompt": "What is said first.",
    "file": "The same, from a file.",
    "resume": "Note in this file what is said; where it has such notes, the chat goes on from them.",
}

SECTIONS = (Models, PromptOptions, ContextOptions, *OF_ONE_USER)


@command("chat", *SECTIONS, without=("results", "trace"), helps=HELP, has_variables=True)
def chat_command(**values: Any) -> int:
    """Talk with a model, turn by turn. Answers go to standard output, all else to standard error.

    What was said stays in the caches: a turn costs its new tokens. -p is said first. On a terminal Ctrl-C stops an
    answer, a second one, or one at the prompt, ends the chat; a backslash at the end of a line goes on in the next one.
    /help lists what else can be typed. Under mpirun rank 0 reads and prints.
    """
    warn_of_variables()
    options = run_options(values, is_chat=True)
    from pipeinfer.job.chat.chat import run_chat  # initialises MPI

    return run_chat(options)
