"""`pipeinfer batch` and `serve`: their options, by the names of `run` and of llama.cpp's server. The commands are in
`job.batch` and `job.serve`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeinfer.cli.options.job_options import check_sequences, run_options, warn_of_variables
from pipeinfer.cli.options.setting_options import command, policy_ablations, take
from pipeinfer.cli.run import SHARED
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import INT32_MAX, MAX_SEQUENCES
from pipeinfer.job.options.sections import Models
from pipeinfer.job.options.text_sections import ESCAPES, ContextOptions, Records, Traffic
from pipeinfer.job.options.values import File, Number, TextType, Whole
from pipeinfer.server.front import HttpOptions

HELP = {"seed": "Of requests without one; -1: a random one for each.", "escape": f"In -sys and --stop, {ESCAPES}"}
BATCH_HELP = HELP | {
    "parallel": "Requests that are open at a time, as far as the context has room for them.",
    "predict": "Tokens to generate where a request does not say.",
    "ctx_size": "Context in tokens, of all open requests together; 0: what the model was trained for. [default: what "
    "--parallel of the longest take, or as much as fits into the memory]",
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


KEY_VARIABLE = "LLAMA_API_KEY"
LEAST_TOKENS = 2  # of a request: one of the prompt, one of the text
KEY_HELP = (
    "Who asks must send this key, or one of these; repeatable. Others can see it in the list of processes: better "
    f"in {KEY_VARIABLE}, or in a file."
)
SERVE_HELP = HELP | {
    "parallel": "Texts that are written at a time, as far as the context has room for them. Given, and 8 or more, "
    "exact numerics are laid out for many texts.",
    "predict": "Tokens to generate where a request does not say; -1: until the model ends, -c / --parallel tokens at "
    "most.",
    "drain_s": "Seconds that open requests have when the server is stopped (Ctrl-C, SIGTERM).",
    "ctx_size": "Context in tokens, of all open requests together; 0: what the model was trained for. [default: 4096 "
    "for each of --parallel, or as much as fits into the memory]",
}
_SERVE = (Models, ContextOptions, HttpOptions, *SHARED, Traffic)


class Keys(TextType):
    """Keys with commas between them, which click leaves to `_keys_in` but in a variable."""

    envvar_list_splitter = ","

    def __init__(self) -> None:
        super().__init__(blank=True)


@command("serve", *_SERVE, without=("json", *policy_ablations()), helps=SERVE_HELP, has_variables=True)
@parallel_option(16, SERVE_HELP["parallel"])
@predict_option(-1, -1, SERVE_HELP["predict"])
@click.option("--api-key", "api_keys", type=Keys(), multiple=True, envvar=KEY_VARIABLE, metavar="KEY,…", help=KEY_HELP)
@click.option("--drain", "drain_s", type=Number(0, 1e6), default=30.0, show_default=True, help=SERVE_HELP["drain_s"])
def serve_command(**values: Any) -> int:
    """Answer OpenAI's, Anthropic's and llama-server's APIs: many requests share the ranks of this job.

    Rank 0 listens: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models, /completion,
    /infill, /apply-template, /tokenize, /detokenize, /props, /slots, /health, /metrics, and a page to try it. Options
    of sampling are what holds where a request does not say. With a seed and exact numerics a text does not depend on
    what else is asked. Ctrl-C and SIGTERM let open requests end first.
    """
    warn_of_variables()
    keys = _keys_in(values.pop("api_keys"))
    front = replace(take(HttpOptions, values), api_keys=keys)
    drain_s, sequences, parallel = values.pop("drain_s"), values["sequences"], values["parallel"]
    check_sequences(sequences, parallel)
    n_least = LEAST_TOKENS * parallel
    if 0 < (values["ctx_size"] or 0) < n_least:
        raise UserError(
            f"-c {values['ctx_size']} is all that --parallel {parallel} requests have together, and each takes "
            f"{LEAST_TOKENS} tokens at least; give -c {n_least} or more, or lower --parallel"
        )
    # the default is no expectation: then a single text is as fast as possible
    is_default = click.get_current_context().get_parameter_source("parallel") is ParameterSource.DEFAULT
    options = run_options(values | {"n_expected": 1 if is_default else parallel}, is_chat=True)
    from pipeinfer.job.serve.serve import ServeOptions, run_serve  # initialises MPI
    from pipeinfer.server.front import HttpFront

    return run_serve(ServeOptions(run=options, front=front, drain_s=drain_s), HttpFront)


def _keys_in(texts: Sequence[str]) -> tuple[str, ...]:
    """Raises UserError for options without a key: the server would be open without the user's knowledge."""
    keys = tuple(key.strip() for text in texts for key in text.split(",") if key.strip())
    if texts and not keys:
        reason = f"--api-key (or {KEY_VARIABLE}) has no key, only commas or spaces"
        raise UserError(f"{reason}; write one, or leave it out and everybody may ask")
    return keys
