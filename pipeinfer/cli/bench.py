"""`pipeinfer bench`, `measure` and `perplexity`: their options. What is measured, and how, is in `job.bench` and
`job.perplexity`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import check_sequences, take_models, take_sampling
from pipeinfer.cli.options.setting_options import command, take, take_policies
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options import sections as jobs
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.options.options import JobModels, RunOptions, choose_drafts, choose_policy
from pipeinfer.job.options.plan_file import SPLIT
from pipeinfer.job.options.text_sections import ContextOptions, Loads, OutputOptions, SamplerTexts, Traffic, check_once
from pipeinfer.job.options.values import File, Listed, Number, TextType, Whole
from pipeinfer.job.requests.bench_prompts import TEXTS, BenchPrompt, read_prompts
from pipeinfer.models.demo import DRAFT, TARGET, default_models
from pipeinfer.policies import ABLATIONS, POLICIES, USUAL, PipeInfer

REPETITIONS = 5
MEASURED_TOKENS = 128  # of the job with which `measure` compares its profile
POLICY_HELP = f"One or more, as in iterative,pipeinfer. [default: {','.join(USUAL)}, without guesses iterative]"
ABLATE_HELP = f"Measure each policy also without each of these that it has: {','.join(ABLATIONS)}."
DEFAULTS: dict[str, Any] = {"temp": 0.0, "seed": 0}  # other than those of `run`: a benchmark can be repeated


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is combined and how often it is measured.

    models: Target; repeatable. [default: shipped]
    drafts: Draft; repeatable. SMALL,LARGE is one team of drafts, of which the larger refines what the smaller guesses.
    sources: A text file, numbers of tokens of text (128,512), or a .jsonl whose objects have `turns` or a `prompt`;
        may be given again. [default: three texts: a program, a tale, an excerpt]
    predicts: Tokens to generate: 64,128.
    splits: As for run; used where it has one part a stage.
    repetitions: Of everything. [default: 5, of loads 1]
    warm_up: Generations not counted.
    questions: Of each .jsonl at most. [default: all]
    turns: Of each question at most. [default: all]
    cut: Tokens of a prompt at most: the first ones, of a later turn the newest. [default: all]
    output: What to print: means, deviations and percentiles of each combination.
    results: Append a row for every generation, or load, to this CSV file.
    resume: Leave out what --results has already.
    verbose: A traceback when something fails.
    """

    heading = "Measurement"
    models: tuple[Path, ...] = setting((), "--model", "-m", type=File(), repeated=True, first=True)
    drafts: tuple[tuple[Path, ...], ...] = setting(
        (), "--model-draft", "-md", type=Listed(File()), repeated=True, first=True
    )
    policies: tuple[str, ...] | None = setting(
        None, "--policy", type=Listed(click.Choice(list(POLICIES))), first=True, help=POLICY_HELP
    )
    sources: tuple[str, ...] = setting((), "--prompt", "--prompts", "-p", type=TextType(), repeated=True, first=True)
    predicts: tuple[int, ...] = setting((128,), "--predict", "--n-predict", "-n", type=Listed(Whole(1)), first=True)
    splits: tuple[str, ...] = setting((), "--layer-split", type=SPLIT, repeated=True)
    ablate: tuple[str, ...] = setting((), "--ablate", type=Listed(click.Choice(ABLATIONS)), help=ABLATE_HELP)
    repetitions: int | None = setting(None, "--repetitions", "-r", type=Whole(1))
    warm_up: int = setting(1, "--warm-up")
    questions: int = setting(0, "--questions")
    turns: int = setting(0, "--turns")
    cut: int = setting(0, "--cut")
    output: str = setting("md", "--output", "-o", type=click.Choice(["md", "csv", "json", "jsonl"]))
    results: Path | None = setting(None, "--results", type=File())
    resume: bool = setting(False, "--resume")
    verbose: bool = setting(False, "--verbose", "-v")


_CONTEXT = (jobs.Adapters, jobs.Loading, ContextOptions)
_JOB = (*_CONTEXT, Traffic, jobs.PlacementOptions, jobs.Numerics)
_SECTIONS = (BenchOptions, Loads, *_JOB, SamplingParams, SamplerTexts, jobs.Guesses, Policy, jobs.Experiments)
_WITHOUT: tuple[str, ...] = ("layer_split", "continuous", "asynchronous", "predict", "ignore_eos")
# times would depend on what an earlier job, or the warm-up, left in a folder, which no column can say
_WITHOUT += ("kv_disk", "kv_dir", "kv_read_only", "cache_ram")
_WITHOUT += ("fit", "fit_target", "fit_ctx")  # what is measured is what columns say was asked for


@command("bench", *_SECTIONS, defaults=DEFAULTS, without=_WITHOUT)
def bench(**others: Any) -> int:
    """Measure speed and latency of every combination of models, policies, prompts and lengths, in one job.

    Models are loaded once for all that share them. Generation goes on after an end token, so that all texts have the
    same length. The summary goes to standard output, the progress to standard error. With --concurrency or --rate many
    requests share the models at a time, and what is measured is throughput and latencies.
    """
    options = take(BenchOptions, others)
    if options.resume and not options.results:
        raise UserError("--resume needs --results: the file that has what was measured before")
    loads = _loads(others)
    if loads and options.turns > 1:
        reason = "a load's requests do not wait for answers; it has the first turn of each question"
        raise UserError(f"--turns {options.turns}: {reason}, leave --turns out")
    models = options.models or (TARGET,)
    drafts = options.drafts or (() if options.models else ((DRAFT,),))
    teams = tuple(choose_drafts(team, ()) for team in drafts) or ((),)
    has_guesses = any(teams) or others["lookup"]
    default = USUAL if has_guesses else ("iterative",)
    names = [choose_policy(name, has_guesses) for name in options.policies or default]
    policies = take_policies(names, others)
    check_once("-m", options.models)
    check_once("-md", [",".join(map(str, team)) or "none" for team in teams])
    check_once("--policy", names)
    check_once("-n", options.predicts)
    check_once("--layer-split", options.splits)
    check_once("--ablate", options.ablate)
    others |= {"predict": 0, "fit": False, "ignore_eos": True, "results": options.results, "verbose": options.verbose}
    sampling = take_sampling(others)
    base = RunOptions(models=JobModels(target=models[0])).changed(policy=policies[0], sampling=sampling, **others)
    sources, turns = options.sources or tuple(map(str, TEXTS)), 1 if loads else options.turns
    prompts = _prompts(sources, options.questions, turns, options.cut)
    from pipeinfer.job.bench.bench import run_bench  # initialises MPI
    from pipeinfer.job.bench.sweep import Sweep

    sweep = Sweep(
        base=base,
        pairs=tuple((model, team) for model in models for team in teams),
        policies=policies,
        splits=options.splits,
        prompts=prompts,
        predicts=options.predicts,
        ablations=options.ablate,
        repetitions=options.repetitions or (1 if loads else REPETITIONS),
        cut=options.cut,
        loads=loads,
        warm_up=options.warm_up,
        output=options.output,
        resume=options.resume,
    )
    return run_bench(sweep)


def _loads(others: dict[str, Any]) -> Loads | None:
    """None if no loads are measured. Raises UserError for options that do not go together."""
    loads = take(Loads, others)
    if loads.concurrencies or loads.rates:
        loads = loads.checked()
        check_sequences(others["sequences"], loads.parallel or 0)
        return loads
    if loads.requests or loads.parallel or others["max_delay_s"] < math.inf:
        raise UserError("--requests, --parallel and --max-delay are of loads; give --concurrency or --rate too")
    return None


def _prompts(sources: tuple[str, ...], questions: int, turns: int, cut: int) -> tuple[BenchPrompt, ...]:
    """Raises UserError if two have one name, as their rows would look alike."""
    prompts = tuple(prompt for source in sources for prompt in read_prompts(source, questions, turns, cut))
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two prompts are called {twice}; rename a file, or give it once")
    return prompts


MEASURE_HELP = {
    "model": "Target model, GGUF. [default: the shipped pair]",
    "drafts": "Draft model, GGUF, with nearly the target's vocabulary. Of several the smallest guesses, larger ones "
    "refine. Needed with -m.",
    "tolerance": "By what share the profile may foretell another speed, without guesses, than a job of these ranks "
    "has: 0.15 is 15%.",
}
_MEASURED = (jobs.Models, jobs.Loading, jobs.PlacementOptions, jobs.Numerics, OutputOptions)
_UNMEASURED = ("samplers", "draft_rank", "draft_split", "gpu_aware", "json", "allow_other_numerics")


@command("measure", *_MEASURED, helps=MEASURE_HELP, without=_UNMEASURED)
@click.option("-o", "--output", type=File(), required=True, help="The profile to write, TOML.")
@click.option("--tolerance", type=Number(0, 100), default=0.15, show_default=True, help=MEASURE_HELP["tolerance"])
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
    values |= {"policy": PipeInfer(), "sampling": SamplingParams(**DEFAULTS), "prompt": "measure", "ignore_eos": True}
    options = RunOptions(models=JobModels(target=model, drafts=drafts)).changed(
        predict=MEASURED_TOKENS, fit=False, **values
    )
    from pipeinfer.job.bench.measure import measure  # initialises MPI

    return measure(options, output, tolerance)


_SCORED = (jobs.Models, *_CONTEXT, jobs.PlacementOptions, jobs.Numerics, OutputOptions)
_UNSCORED: tuple[str, ...] = ("drafts", "hf_drafts", "predict", "ignore_eos", "samplers", "draft_rank", "draft_split")
_UNSCORED += ("n_gpu_layers_draft", "cache_type_k_draft", "cache_type_v_draft", "allow_other_numerics")
# each token's probabilities are worked out anew
_UNSCORED += ("kv_disk", "kv_dir", "kv_read_only", "cache_ram", "fit_ctx")
_UNSCORED += ("plan",)  # the chunks decide the context
CHUNK_TOKENS = 512
PERPLEXITY_HELP = {
    "chunks": "Of the text, the first; 0 or -1: all.",
    "json": "Print one JSON object instead of the estimate.",
    "ctx_size": f"Tokens of a chunk; 0: as trained; with --kl-divergence the file's. [default: {CHUNK_TOKENS}]",
    "base": "Write the log-probabilities of all tokens to this file; with --kl-divergence read it.",
    "kl_divergence": "Compare the model with that of --kl-divergence-base, whose file has the text.",
}


@command("perplexity", *_SCORED, helps=PERPLEXITY_HELP, without=_UNSCORED, defaults={"ctx_size": CHUNK_TOKENS})
@click.option("-f", "--file", "source", type=File(stdin=True), help="The text; - is standard input.")
@click.option("--chunks", type=Whole(-1, INT32_MAX), default=0, show_default=True, help=PERPLEXITY_HELP["chunks"])
@click.option("--save-all-logits", "--kl-divergence-base", "base", type=File(), help=PERPLEXITY_HELP["base"])
@click.option("--kl-divergence", is_flag=True, help=PERPLEXITY_HELP["kl_divergence"])
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

    return run_perplexity(PerplexityOptions(run=options, source=source, n_chunks=max(0, chunks), base=base))
