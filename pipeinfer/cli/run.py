"""`pipeinfer run`: its sections of options. Rank 0's part of the command is in `job.run`."""

from typing import Any

from pipeinfer.cli.options.job_options import run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options import sections as jobs
from pipeinfer.job.options import text_sections as texts

_MODELS = (jobs.Models, jobs.Loading)
_TEXTS = (texts.ChatOptions, texts.Texts)
_SAMPLING = (SamplingParams, texts.Biases, texts.GrammarOptions)
_SPECULATION = (jobs.PolicyName, jobs.Guesses, Policy, jobs.Experiments)
SHARED = (*_MODELS, *_TEXTS, jobs.PlacementOptions, jobs.Numerics, *_SAMPLING, *_SPECULATION, jobs.OutputOptions)
"""The sections of all commands that write texts for users."""

OF_ONE_USER = (*SHARED, jobs.Ablations, jobs.Records)


_SECTIONS = (jobs.Models, texts.PromptOptions, texts.Asking, texts.ContextOptions, *OF_ONE_USER, texts.Machines)


@command("run", *_SECTIONS, has_variables=True)
def run(chat: bool, conversation: bool, single_turn: bool, **values: Any) -> int:
    """Generate text. Text goes to standard output, the plan and the statistics to standard error.

    Under mpirun every rank runs this command: one drafts, rank 0 as a rule, the others hold the target's layers.
    Without a draft all do; of several drafts each takes a rank, a larger one as many as --draft-split says.
    """
    warn_of_variables()
    options = run_options(values, is_chat=chat or conversation or single_turn)
    if conversation and not single_turn:
        if options.output.results or options.output.trace or options.output.machines:
            raise UserError("--results, --trace and --machines are of one text, -cnv has many; leave them out, or ask "
                            "with --chat")  # fmt: skip
        from pipeinfer.job.chat.chat import run_chat  # initialises MPI

        return run_chat(options)
    from pipeinfer.job.planning.prepare import start_prepared  # initialises MPI

    return start_prepared(
        options, options, lambda *job: _head().prepare_run(*job), lambda *head: _head().Head(*head).run()
    )


def _head() -> Any:
    """The module for rank 0: other ranks do not import what it draws with."""
    from pipeinfer.job import run

    return run
