"""`pipeinfer perplexity`: its options. What it computes is in `job.perplexity`."""

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import take_models
from pipeinfer.cli.options.setting_options import command
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
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
_WITHOUT += ("n_gpu_layers_draft", "cache_type_k_draft", "cache_type_v_draft", "allow_other_numerics")
_WITHOUT += ("kv_disk", "kv_dir", "kv_read_only")  # each token's probabilities are worked out anew
CHUNK_TOKENS = 512
HELP = {
    "chunks": "Of the text, the first; 0: all.",
    "json": "Print one JSON object instead of the estimate.",
    "ctx_size": "Tokens of a chunk.",
    "base": "Write the log-probabilities of all tokens to this file; with --kl-divergence read it.",
    "kl_divergence": "Compare the model with that of --kl-divergence-base, whose file has the text.",
}


@command("perplexity", *_SECTIONS, helps=HELP, without=_WITHOUT, defaults={"ctx_size": CHUNK_TOKENS})
@click.option("-f", "--file", "source", type=File(stdin=True), help="The text; - is standard input.")
@click.option("--chunks", type=Whole(0, INT32_MAX), default=0, show_default=True, help=HELP["chunks"])
@click.option("--save-all-logits", "--kl-divergence-base", "base", type=File(), help=HELP["base"])
@click.option("--kl-divergence", is_flag=True, help=HELP["kl_divergence"])
def perplexity_command(source: Path | None, chunks: int, base: Path | None, kl_divergence: bool, **values: Any) -> int:
    """Measure how well a model foretells a text: llama-perplexity's protocol, over all ranks.

    The text is cut into chunks of -c tokens, each with the model's beginning-of-text token first, and the second half
    of each is scored. Chunks fill the pipeline as requests do. The estimate goes to standard output, the values after
    each chunk to standard error. With exact numerics it is the same number under every split and rank count.
    """
    if kl_divergence and (source or not base):
        raise UserError("--kl-divergence takes its text from --kl-divergence-base FILE; give that file, and no --file")
    if not kl_divergence and not source:
        raise UserError("there is no text; give --file FILE, or --kl-divergence and --kl-divergence-base FILE")
    model, _ = take_models(values | {"drafts": (), "hf_drafts": ()})
    target = model or default_models(False)[0]
    values = {name: value for name, value in values.items() if name not in ("model", "hf_repo", "hf_file")}
    sampling = SamplingParams(seed=0, temp=0.0, n_prompt_logprobs=0)
    options = RunOptions(models=JobModels(target=target)).changed(sampling=sampling, **values)
    from pipeinfer.job.perplexity import PerplexityOptions, run_perplexity  # initialises MPI

    return run_perplexity(PerplexityOptions(run=options, source=source, n_chunks=chunks, base=base))
