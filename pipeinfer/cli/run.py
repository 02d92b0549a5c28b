"""`pipeinfer run`: its options. What they do is in `job`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.command import Command
from pipeinfer.cli.options import RunOptions, choose_policy, unescape
from pipeinfer.cli.policy_options import policy_options, take_policy_options
from pipeinfer.cli.values import (
    MAX_CTX,
    PROBABILITY,
    THREADS,
    File,
    Folder,
    GpuLayers,
    Listed,
    Number,
    Split,
    Text,
    Whole,
)
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.factory import POLICIES

MAX_TEMP = 1000
PENALTY = Number(-1000, 1000)


@click.command(cls=Command)
@click.option("-m", "--model", type=File(), help="Target model, GGUF. [default: the shipped demonstration pair]")
@click.option(
    "-md",
    "--model-draft",
    "--spec-draft-model",
    "drafts",
    type=File(),
    multiple=True,
    help="Draft model, GGUF, with the target's vocabulary. Of several the smallest guesses, larger ones refine.",
)
@click.option("-p", "--prompt", type=Text(blank=True), help="The text to continue.")
@click.option(
    "-f",
    "--file",
    type=File(stdin=True),
    help="Read the prompt from this file, without a newline at its end; - is standard input.",
)
@click.option(
    "--escape/--no-escape",
    "-e",
    default=True,
    show_default=True,
    help=r"In -p, \n is a new line; so are \t, \r, \', \", \\, and \x with two digits.",
)
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    type=Whole(-2),
    default=-1,
    show_default=True,
    help="Tokens to generate; -1 or -2: until the model ends or the context is full.",
)
@click.option(
    "-c",
    "--ctx-size",
    type=Whole(0, MAX_CTX),
    default=0,
    show_default=True,
    help="Context in tokens; 0: what prompt and -n need, within what the model was trained for.",
)
@click.option(
    "-b",
    "--batch-size",
    type=Whole(1),
    default=128,
    show_default=True,
    help="Prompt tokens a run, 2048 at most; a prompt is cut into such chunks so that they fill the pipeline.",
)
@click.option(
    "-t",
    "--threads",
    type=Listed(THREADS),
    help="Threads: one value, or one a rank, as in 6,32,20. [default: the host's cores, shared]",
)
@click.option(
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "n_gpu_layers",
    type=GpuLayers(),
    default=0,
    show_default=True,
    help="Layers of each rank's slice to put on its GPU (needs a GPU build of llama-cpp-python); auto: all where there "
    "is one.",
)
@click.option("--policy", type=click.Choice(POLICIES), help="[default: pipeinfer with a draft, iterative without]")
@click.option(
    "--layer-split", type=Split(), help="Layers a stage (4,4,8) or proportions (0.25,0.25,0.5). [default: by size]"
)
@click.option("--temp", "--temperature", type=Number(0, MAX_TEMP), default=0.8, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=Whole(-1), default=40, show_default=True, help="0 switches it off.")
@click.option("--top-p", type=PROBABILITY, default=0.95, show_default=True, help="1 switches it off.")
@click.option("--min-p", type=PROBABILITY, default=0.05, show_default=True, help="0 switches it off.")
@click.option("-s", "--seed", type=Whole(-1, 2**32 - 1), default=-1, show_default=True, help="-1: a random one.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-generation token.")
@click.option(
    "--numerics",
    type=click.Choice(["exact", "fast"]),
    default="exact",
    show_default=True,
    help="exact: every policy and rank count gives the same bits; fast: llama.cpp's default kernels.",
)
@click.option(
    "--slice-cache", type=Folder(), help="Keep each rank's slice in this directory of its host, for the next start."
)
@click.option(
    "--pace",
    type=Text(),
    help="Slow ranks and links down to this profile's (see `simulate`): NAME, or NAME:PAIR of models.",
)
@click.option("--repeat-last-n", type=Whole(0, 4096), default=64, show_default=True, help="Tokens penalised.")
@click.option("--repeat-penalty", type=Number(0.01, 100), default=1.0, show_default=True, help="1: off.")
@click.option("--frequency-penalty", type=PENALTY, default=0.0, show_default=True, help="0: off.")
@click.option("--presence-penalty", type=PENALTY, default=0.0, show_default=True, help="0: off.")
@click.option(
    "--couple-draft/--no-couple-draft",
    "couple",
    default=True,
    show_default=True,
    help="Sampling: guesses share the target's random numbers, so that more are right.",
)
@policy_options
@click.option("--no-cancel", "cancel", flag_value=False, type=bool, default=True, help="Ablation: dead runs go on.")
@click.option(
    "--no-partitions",
    "partitions",
    flag_value=False,
    type=bool,
    default=True,
    help="Ablation: one sequence only.",
)
@click.option(
    "--sequences",
    type=Whole(1, 254),
    default=31,
    show_default=True,
    help="Branches that trees may have at a time; when they run out, trees get narrower.",
)
@click.option("--results", type=File(), help="Append a row of figures to this CSV file.")
@click.option("--trace", type=File(), help="Write the timeline of all ranks, as Chrome trace events.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("-v", "--verbose", is_flag=True, help="More about loading and about each rank.")
def run(
    model: Path | None,
    drafts: tuple[Path, ...],
    policy: str | None,
    threads: tuple[int, ...] | None,
    prompt: str | None,
    escape: bool,
    **others: Any,
) -> int:
    """Generate text. Text goes to standard output, the plan and the statistics to standard error.

    Under mpirun every rank runs this command: rank 0 drafts, the others hold the target's layers. Without a draft rank
    0 holds the first of them; of several drafts each takes a rank.
    """
    if model is None:
        model, drafts = TARGET, drafts or (DRAFT,)
    options = RunOptions(
        model=model,
        drafts=drafts,
        policy=choose_policy(policy, bool(drafts)),
        threads=threads or (),
        prompt=unescape(prompt) if prompt and escape else prompt,
        speculation=take_policy_options(others),
        **others,
    )
    from pipeinfer.cli.job import run_job  # initialises MPI

    return run_job(options)
