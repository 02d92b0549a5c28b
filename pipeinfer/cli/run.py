"""`pipeinfer run` and `chat`: their sections of options. The commands are in `job.run` and `job.chat`."""

from typing import Any

from pipeinfer.cli.options.job_options import SpecTypes, run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options import sections as jobs
from pipeinfer.job.options import text_sections as texts

_MODELS = (jobs.Models, jobs.Adapters, jobs.Loading)
_TEXTS = (texts.ChatOptions, texts.AnswerOptions, texts.Texts)
_SAMPLING = (SamplingParams, texts.SamplerTexts, texts.Biases, texts.GrammarOptions)
_SPECULATION = (jobs.PolicyName, jobs.Guesses, SpecTypes, Policy, jobs.Experiments)
SHARED = (*_MODELS, *_TEXTS, jobs.PlacementOptions, jobs.Numerics, *_SAMPLING, *_SPECULATION, texts.OutputOptions)
"""The sections of all commands that write texts for users."""

_OF_ONE_USER = (*SHARED, jobs.Ablations, texts.Records)
_RUN = (jobs.Models, texts.PromptOptions, texts.ChatModes, texts.ContextOptions, *_OF_ONE_USER, texts.Machines)
_CHAT = (jobs.Models, texts.PromptOptions, texts.ContextOptions, *_OF_ONE_USER)
CHAT_HELP = {
    "json": "Print a JSON object for each answer instead of its text.",
    "prompt": "What is said first.",
    "file": "The same, from a file.",
    "resume": "Note in this file what is said; where it has such notes, the chat goes on from them.",
}
MANY_TEXTS = "--results, --trace and --machines are of one text, -cnv has many; leave them out, or ask with --chat"


@command("run", *_RUN, has_variables=True)
def run(chat: bool, conversation: bool, single_turn: bool, **values: Any) -> int:
    """Generate text. Text goes to standard output, the plan and the statistics to standard error.

    Under mpirun every rank runs this command: one drafts, rank 0 as a rule, the others hold the target's layers.
    Without a draft all do; of several drafts each takes a rank, a larger one as many as --draft-split says.
    """
    warn_of_variables()
    options = run_options(values, is_chat=chat or conversation or single_turn)
    if conversation and not single_turn:
        if options.output.results or options.output.trace or options.output.machines:
            raise UserError(MANY_TEXTS)
        from pipeinfer.job.chat.chat import run_chat  # initialises MPI

        return run_chat(options)
    from pipeinfer.job.planning.prepare import start_prepared  # initialises MPI

    return start_prepared(options, options, _prepare)


def _prepare(*job: Any) -> Any:
    from pipeinfer.job.run import prepare_run  # other ranks do not import what rank 0 draws with

    return prepare_run(*job)


@command("chat", *_CHAT, without=("results", "trace"), helps=CHAT_HELP, has_variables=True)
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
