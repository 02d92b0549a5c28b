"""`pipeinfer perplexity`: its options. What it computes is in `job.perplexity`."""

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import take_models
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.options import sections as jobs
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.options.options import JobModels, RunOptions
from pipeinfer.job.options.text_sections import ContextOptions
from pipeinfer.job.options.values import File, Whole
from pipeinfer.models.demo import default_models

_SECTIONS = (
    jobs.Models,
    jobs.Adapters,
    jobs.Loading,
    ContextOptions,
    jobs.PlacementOptions,
    jobs.Numerics,
    jobs.OutputOptions,
)
_WITHOUT: tuple[str, ...] = ("drafts", "hf_drafts", "predict", "ignore_eos", "samplers", "draft_rank", "draft_split")
_WITHOUT += ("n_gpu_layers_draft", "draft_cache_type_k", "draft_cache_type_v", "allow_other_numerics")
CHUNK_TOKENS = 512
HELP = {
    "chunks": "Of the text, the first; 0: all.",
    "json": "Print one JSON object instead of the estimate.",
    "ctx_size": "Tokens of a chunk.",
}


@command("perplexity", *_SECTIONS, helps=HELP, without=_WITHOUT, defaults={"ctx_size": CHUNK_TOKENS})
@click.option("-f", "--file", "source", type=File(stdin=True), required=True, help="The text; - is standard input.")
@click.option("--chunks", type=Whole(0, INT32_MAX), default=0, show_default=True, help=HELP["chunks"])
def perplexity_command(source: Path, chunks: int, **values: Any) -> int:
    """Measure how well a model foretells a text: llama-perplexity's protocol, over all ranks.

    The text is cut into chunks of -c tokens, each with the model's beginning-of-text token first, and the second half
    of each is scored. Chunks fill the pipeline as requests do. The estimate goes to standard output, the values after
    each chunk to standard error. With exact numerics it is the same number under every split and rank count.
    """
    model, _ = take_models(values | {"drafts": (), "hf_drafts": ()})
    target = model or default_models(False)[0]
    values = {name: value for name, value in values.items() if name not in ("model", "hf_repo", "hf_file")}
    sampling = SamplingParams(seed=0, temp=0.0, n_prompt_logprobs=0)
    options = RunOptions(models=JobModels(target=target)).changed(sampling=sampling, **values)
    from pipeinfer.job.perplexity import PerplexityOptions, run_perplexity  # initialises MPI

    return run_perplexity(PerplexityOptions(run=options, source=source, n_chunks=chunks))
