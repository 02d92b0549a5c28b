"""`pipeinfer batch`: its options and sections of options. The command is in `job.batch`."""

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import check_sequences, run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command, policy_ablations
from pipeinfer.cli.run import SHARED
from pipeinfer.job.options.limits import INT32_MAX, MAX_SEQUENCES
from pipeinfer.job.options.sections import Models, Records
from pipeinfer.job.options.text_sections import ContextOptions, Traffic
from pipeinfer.job.options.values import File, Whole

HELP = {
    "parallel": "Requests that are open at a time, as far as the context has room for them.",
    "predict": "Tokens to generate where a request does not say.",
    "ctx_size": "Context in tokens, of all open requests together; 0: what --parallel of the longest take, or as much "
    "as fits into the memory.",
    "resume": "Note in this file what comes of texts that are not complete; the same command goes on from it.",
    "json": "Print the summary as a JSON object, too.",
    "seed": "Of requests without one; -1: a random one for each.",
    "escape": r"In -sys and --stop, \n is a new line; so are \t, \r, \', \", \\, and \x with two digits.",
}

SECTIONS = (Models, ContextOptions, *SHARED, Traffic, Records)
WITHOUT = (*policy_ablations(), "results", "trace")


@command("batch", *SECTIONS, without=WITHOUT, helps=HELP, has_variables=True)
@click.argument("source", metavar="FILE.jsonl", type=File())
@click.option("-o", "--output", type=File(), required=True, help="Append a line for every result to this file.")
@click.option("-np", "--parallel", type=Whole(1, MAX_SEQUENCES), default=32, show_default=True, help=HELP["parallel"])
@click.option(
    "-n", "--predict", "--n-predict", type=Whole(1, INT32_MAX), default=256, show_default=True, help=HELP["predict"]
)
@click.option("--chat", "as_chat", is_flag=True, help="Plain prompts are asked with the model's chat template.")
@click.option(
    "--strict", is_flag=True, help="Refuse requests with unknown fields; else these are passed over, with a line."
)
def batch_command(source: Path, output: Path, as_chat: bool, strict: bool, **values: Any) -> int:
    """Answer a file of requests, a JSON object a line, and write each result when it is there.

    {"prompt": "…"} or {"messages": […]}, with max_tokens, temperature, top_k, top_p, min_p, seed, penalties and stop as
    wanted; or OpenAI's batch format, with /v1/completions and /v1/chat/completions. Options are what holds where a
    request does not say. The same command goes on after an interruption: what the output has is left out. With a seed
    and exact numerics a text does not depend on what else is asked.
    """
    warn_of_variables()
    check_sequences(values["sequences"], values["parallel"])
    options = run_options(values, is_chat=True)
    from pipeinfer.job.batch.batch import run_batch  # initialises MPI
    from pipeinfer.job.batch.batch_prepare import BatchOptions

    return run_batch(BatchOptions(run=options, source=source, output=output, as_chat=as_chat, strict=strict))
