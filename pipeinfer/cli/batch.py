"""`pipeinfer batch`: its options, and those that `serve` has too. The command is in `job.batch`."""

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import check_sequences, run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command, policy_ablations
from pipeinfer.cli.run import SHARED
from pipeinfer.job.options.limits import INT32_MAX, MAX_SEQUENCES
from pipeinfer.job.options.sections import Models, Records
from pipeinfer.job.options.text_sections import ESCAPES, ContextOptions, Traffic
from pipeinfer.job.options.values import File, Whole

HELP = {"seed": "Of requests without one; -1: a random one for each.", "escape": f"In -sys and --stop, {ESCAPES}"}
BATCH_HELP = HELP | {
    "parallel": "Requests that are open at a time, as far as the context has room for them.",
    "predict": "Tokens to generate where a request does not say.",
    "ctx_size": "Context in tokens, of all open requests together; 0: what --parallel of the longest take, or as much "
    "as fits into the memory.",
    "resume": "Note in this file what comes of texts that are not complete; the same command goes on from it.",
    "json": "Print the summary as a JSON object, too.",
    "strict": "Refuse requests with unknown fields; else these are passed over, with a line.",
}
_BATCH = (Models, ContextOptions, *SHARED, Traffic, Records)
_BATCH_WITHOUT = (*policy_ablations(), "results", "trace")


def parallel_option(default: int, help: str) -> Any:
    number = Whole(1, MAX_SEQUENCES)
    return click.option("-np", "--parallel", type=number, default=default, show_default=True, help=help)


def predict_option(least: int, default: int, help: str) -> Any:
    flags, number = ("-n", "--predict", "--n-predict"), Whole(least, INT32_MAX)
    return click.option(*flags, type=number, default=default, show_default=True, help=help)


@command("batch", *_BATCH, without=_BATCH_WITHOUT, helps=BATCH_HELP, has_variables=True)
@click.argument("source", metavar="FILE.jsonl", type=File())
@click.option("-o", "--output", type=File(), required=True, help="Append a line for every result to this file.")
@parallel_option(32, BATCH_HELP["parallel"])
@predict_option(1, 256, BATCH_HELP["predict"])
@click.option("--chat", "as_chat", is_flag=True, help="Plain prompts are asked with the model's chat template.")
@click.option("--strict", is_flag=True, help=BATCH_HELP["strict"])
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
    from pipeinfer.job.batch.batch import BatchOptions, run_batch  # initialises MPI

    return run_batch(BatchOptions(run=options, source=source, output=output, as_chat=as_chat, strict=strict))
