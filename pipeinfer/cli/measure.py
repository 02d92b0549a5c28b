"""`pipeinfer measure`: its options. What it does is in `job.measure`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.command import Command
from pipeinfer.cli.hub_options import HUB_NAMES, take_models
from pipeinfer.cli.run import run
from pipeinfer.cli.values import File
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions, choose_drafts
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies import PipeInfer

SHARED = (
    "model", "drafts", "threads", "n_gpu_layers", "n_gpu_layers_draft",
    "device", "numa", "backend", "layer_split", "draft_split", "numerics",
    "wire_type", "cache_type_k", "cache_type_v", "cache_type_k_draft", "cache_type_v_draft",
    "slice_cache", "send_layers", "rank_timeout_s", "verbose", *HUB_NAMES,
)  # fmt: skip
N_TOKENS = 128
PROMPT = "measure"


@click.command("measure", cls=Command)
@click.option("-o", "--output", type=File(), required=True, help="The profile to write, TOML.")
def measure_command(
    output: Path, model: Path | None, drafts: tuple[Path, ...], threads: tuple[int, ...] | None, **others: Any
) -> int:
    """Measure stage, draft and link times of this cluster, under mpirun, and write a profile for `simulate`.

    Rank 0 drafts, larger drafts have the next ranks, the others hold the target's layers.
    """
    model, drafts = take_models(model, drafts, others)
    if model is None:
        model, drafts = TARGET, drafts or (DRAFT,)
    drafts = choose_drafts(drafts, ())
    if not drafts:
        raise UserError("measure needs a draft model too; name one with -md")
    options = RunOptions(
        model=model, drafts=drafts, threads=threads or (), policy=PipeInfer(), prompt=PROMPT, predict=N_TOKENS,
        sampling=SamplingParams(seed=0, temp=0.0), ignore_eos=True, **others,
    )  # fmt: skip
    from pipeinfer.job.bench.measure import measure  # initialises MPI

    return measure(options, output)


measure_command.params += [copy.copy(option) for option in run.params if option.name in SHARED]
for option in measure_command.params:
    option.envvar = None  # what is measured is on the command line
    if isinstance(option, click.Option) and option.name == "draft_split":
        option.hidden = True  # is refused, with the reason: a profile has each draft on one rank
    if isinstance(option, click.Option) and option.name == "drafts" and option.help:
        option.help = option.help.removesuffix(" none: no draft.")  # a profile has a draft
