"""`pipeinfer run`: the sections of options that it takes. What it does is in `job.run`."""

from typing import Any

from pipeinfer.cli.options.given import run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.sections import (
    Ablations,
    Experiments,
    Guesses,
    HubAccess,
    Loading,
    Models,
    Numerics,
    Output,
    Placement,
    PolicyName,
    Records,
    Resuming,
)
from pipeinfer.job.options.text_sections import (
    Asking,
    Biases,
    ChatOptions,
    Context,
    GrammarOptions,
    Length,
    Prompt,
    Texts,
)

SHARED = (
    Models, HubAccess, Loading, ChatOptions, Texts, Context, Placement, Numerics, SamplingParams, Biases,
    GrammarOptions, PolicyName, Guesses, Policy, Experiments, Output,
)  # fmt: skip
"""What all commands have that write texts for users."""


@command("run", Models, Prompt, Asking, Length, *SHARED, Ablations, Records, Resuming, has_variables=True)
def run(chat: bool, conversation: bool, single_turn: bool, **given: Any) -> int:
    """Generate text. Text goes to standard output, the plan and the statistics to standard error.

    Under mpirun every rank runs this command: one drafts, rank 0 as a rule, the others hold the target's layers.
    Without a draft all do; of several drafts each takes a rank, a larger one as many as --draft-split says.
    """
    warn_of_variables()
    options = run_options(given, is_chat=chat or conversation or single_turn)
    if conversation and not single_turn:
        if options.results or options.trace:
            raise UserError("--results and --trace are of one text, -cnv has many; leave them out, or ask with --chat")
        from pipeinfer.job.chat.chat import run_chat  # initialises MPI

        return run_chat(options)
    from pipeinfer.job.run.run import run_job  # initialises MPI

    return run_job(options)
