"""`pipeinfer models`: look at models, compare them, and make some for experiments."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import click

from pipeinfer.cli.command import Command, Group
from pipeinfer.cli.model_check import check_command
from pipeinfer.cli.model_info import info_command
from pipeinfer.cli.model_list import list_command
from pipeinfer.cli.model_split import split_command
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX, MAX_LAYERS
from pipeinfer.job.options.values import THREADS, File, Number, Whole
from pipeinfer.models.demo import TARGET
from pipeinfer.outputs import check_separate, check_writable, path_of, whole_file

MAX_NOISE = 1000
TOLERANCE = 0.03
N_TRIALS = 12


@click.group(cls=Group)
def models() -> None:
    """Look at model files, and make models for experiments."""


models.add_command(info_command)
models.add_command(check_command)
models.add_command(list_command)
models.add_command(split_command)


@models.command(cls=Command)
@click.option("-m", "--model", type=File(), default=TARGET, help="Model to grow, GGUF. [default: the shipped target]")
@click.option("-o", "--output", type=File(), required=True, help="The grown model's file.")
@click.option("--layers", type=Whole(1, MAX_LAYERS), required=True, help="Layers it shall have.")
@click.option(
    "--noise",
    type=Number(0, MAX_NOISE),
    default=0.0,
    show_default=True,
    help="What added layers add to the residual stream, as a share of what the originals add; 0: the same function.",
)
@click.option(
    "--acceptance",
    type=Number(0, 1, above=True),
    help="Search the noise with which the draft is right this often.",
)
@click.option(
    "-md", "--model-draft", type=File(), help="Draft to measure with. [with --acceptance: the original model]"
)
@click.option("-n", "--predict", type=Whole(1, MAX_CTX), default=64, show_default=True, help="Tokens a measured text.")
@click.option("-s", "--seed", type=Whole(0), default=0, show_default=True, help="Of the noise.")
@click.option(
    "-t",
    "--threads",
    type=THREADS,
    default=max(1, (os.cpu_count() or 1) // 2),
    help="[default: half the cores]",
)
def grow(
    model: Path,
    output: Path,
    layers: int,
    noise: float,
    acceptance: float | None,
    model_draft: Path | None,
    predict: int,
    seed: int,
    threads: int,
) -> None:
    """Make a deeper model that computes (nearly) the same: real cost, and an acceptance rate that can be set.

    Every added layer costs what a layer costs. With the original model (or its draft) as the draft, the acceptance rate
    is that of the original pair at --noise 0, and falls with the noise. Measured rates are those of greedy text.
    """
    from pipeinfer.job.placement.fetch import fetch_files
    from pipeinfer.job.placement.memory import check_alone
    from pipeinfer.models.gguf.model_info import read_model_info
    from pipeinfer.models.grow import write_grown

    if acceptance is not None and noise:
        raise UserError(f"--noise {noise:g} and --acceptance {acceptance:g} both choose the noise; give one of them")
    model, *given = fetch_files([model, *([model_draft] if model_draft else [])])
    model_draft = given[0] if given else None
    info = read_model_info(model)
    draft = model_draft or (model if acceptance is not None else None)
    check_separate({"--output": output}, {"--model": info.paths, "--model-draft": [draft] if draft else []})
    check_writable(output, "--output")
    if draft:
        n_cells_grown = predict * layers // info.n_layer  # cells of the model's own depth, as many bytes
        check_alone([(info, True)], n_cells_grown, n_rows=32)
    measure = _measuring(model, draft, predict, threads) if draft else None
    with whole_file(output, "--output") as file:

        def make(strength: float) -> float:
            file.seek(0)
            write_grown(info, file, layers, strength, seed)
            return measure(path_of(file)) if measure else float("nan")

        if acceptance is None:
            rate = make(noise)
        else:
            noise, rate = search_noise(make, acceptance)
    size = f"{layers} layers, {output.stat().st_size / 1e6:.1f} MB, noise {noise:.4g}"
    click.echo(f"{output}: {size}" + (f", acceptance rate of {draft} {rate:.3f}" if draft else ""))


def search_noise(make: Callable[[float], float], wanted: float) -> tuple[float, float]:
    """(noise, rate) of the model that `make(noise)` leaves behind: the nearest to `wanted` of a dozen trials.

    The rate falls with the noise, if not at every step. Raises UserError when no noise gives the rate.
    """
    rate = make(0.0)
    if rate < wanted - TOLERANCE:
        raise UserError(
            f"--acceptance {wanted:g} cannot be reached: without noise the draft is right in {rate:.3f} of the cases; "
            "ask for less, or leave out -md to draft with the original model"
        )
    tried = {0.0: rate}
    low, high, noise = 0.0, math.inf, 0.25
    while min(abs(found - wanted) for found in tried.values()) > TOLERANCE and len(tried) < N_TRIALS:
        tried[noise] = make(noise)
        low, high = (noise, high) if tried[noise] > wanted else (low, noise)
        noise = 2 * low if high == math.inf else (low + high) / 2
    best = min(tried, key=lambda noise: abs(tried[noise] - wanted))
    if best != list(tried)[-1]:
        make(best)
    return best, tried[best]


def _measuring(model: Path, draft: Path, n_predict: int, n_threads: int) -> Callable[[Path], float]:
    """What gives a grown target's acceptance rate. Raises UserError when the draft's vocabulary is quite another."""
    from pipeinfer.job.placement.model_files import draft_translation
    from pipeinfer.models.agreement import TEXTS, acceptance
    from pipeinfer.models.tokenizer import Tokenizer

    tokenizer, translation = Tokenizer(model), draft_translation(model, draft)
    prompts = [tokens for text in TEXTS if (tokens := tokenizer.encode(text))]
    if not prompts:
        raise UserError(
            f"{model} has no tokenizer; the acceptance rate cannot be measured, leave -md and --acceptance out"
        )
    return lambda grown: acceptance(grown, draft, prompts, n_predict, n_threads, translation)
