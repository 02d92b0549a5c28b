"""`pipeinfer measure`: its options, and the sections that it takes. What it does is in `job.bench.measure`."""

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import take_models
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import JobModels, RunOptions, choose_drafts
from pipeinfer.job.options.sections import Loading, Models, Numerics, OutputOptions, PlacementOptions
from pipeinfer.job.options.values import File, Number
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies import PipeInfer

N_TOKENS = 128
PROMPT = "measure"
HELP = {
    "model": "Target model, GGUF. [default: the shipped pair]",
    "drafts": "Draft model, GGUF, with nearly the target's vocabulary. Of several the smallest guesses, larger ones "
    "refine. Needed with -m.",
}


@command(
    "measure", Models, Loading, PlacementOptions, Numerics, OutputOptions, helps=HELP,
    without=("samplers", "draft_rank", "draft_split", "gpu_aware", "json"),
)  # fmt: skip
@click.option("-o", "--output", type=File(), required=True, help="The profile to write, TOML.")
@click.option(
    "--tolerance",
    type=Number(0, 100),
    default=0.15,
    show_default=True,
    help="By what share the profile may foretell another speed, without guesses, than a job of these ranks has.",
)
def measure_command(output: Path, tolerance: float, **values: Any) -> int:
    """Measure stage, draft and link times of this cluster, under mpirun, and write a profile for `simulate`.

    Rank 0 drafts, larger drafts have the next ranks, the others hold the target's layers. A profile that does not
    foretell a job of these ranks is refused.
    """
    model, drafts = take_models(values)
    if model is None:
        model, drafts = TARGET, drafts or (DRAFT,)
    drafts = choose_drafts(drafts, ())
    if not drafts:
        raise UserError("measure needs a draft model too; name one with -md")
    options = RunOptions(models=JobModels(target=model, drafts=drafts)).changed(
        policy=PipeInfer(), prompt=PROMPT, predict=N_TOKENS, sampling=SamplingParams(seed=0, temp=0.0),
        ignore_eos=True, **values,
    )  # fmt: skip
    from pipeinfer.job.bench.measure import measure  # initialises MPI

    return measure(options, output, tolerance)
