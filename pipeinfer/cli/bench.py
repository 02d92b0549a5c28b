"""`pipeinfer bench`: its options. What is measured, and how, is in `job.bench`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.job_options import check_sequences
from pipeinfer.cli.options.setting_options import command, take, take_policies
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import JobModels, RunOptions, choose_drafts, choose_policy
from pipeinfer.job.options.plan_file import SPLIT
from pipeinfer.job.options.sections import Experiments, Guesses, Loading, Numerics, PlacementOptions
from pipeinfer.job.options.text_sections import ContextOptions, Loads, Traffic, check_once
from pipeinfer.job.options.values import File, Listed, TextType, Whole
from pipeinfer.job.requests.conversation import TEXTS, BenchPrompt, read_prompts
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies import ABLATIONS, POLICIES, USUAL

REPETITIONS = 5
DEFAULTS = {"temp": 0.0, "seed": 0}  # other than those of `run`: a benchmark can be repeated


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is combined and how often it is measured."""

    heading = "Measurement"
    models: tuple[Path, ...] = setting(
        (), "--model", "-m", type=File(), repeated=True, first=True, help="Target; repeatable. [default: shipped]"
    )
    drafts: tuple[tuple[Path, ...], ...] = setting(
        (), "--model-draft", "-md", type=Listed(File()), repeated=True, first=True,
        help="Draft; repeatable. SMALL,LARGE is one team of drafts, of which the larger refines what the smaller "
        "guesses.",
    )  # fmt: skip
    policies: tuple[str, ...] | None = setting(
        None, "--policy", type=Listed(click.Choice(list(POLICIES))), first=True,
        help=f"One or more, as in iterative,pipeinfer. [default: {','.join(USUAL)}, without guesses iterative]",
    )  # fmt: skip
    sources: tuple[str, ...] = setting(
        (), "--prompt", "--prompts", "-p", type=TextType(), repeated=True, first=True,
        help="A text file, a number of tokens of text, or a .jsonl whose objects have `turns` or a `prompt`; may be "
        "given again. [default: three texts: a program, a tale, an excerpt]",
    )  # fmt: skip
    predicts: tuple[int, ...] = setting(
        (128,), "--predict", "--n-predict", "-n", type=Listed(Whole(1)), first=True, help="Tokens to generate: 64,128."
    )
    splits: tuple[str, ...] = setting(
        (), "--layer-split", type=SPLIT, repeated=True, help="As for run; used where it has one part a stage."
    )
    ablate: tuple[str, ...] = setting(
        (), "--ablate", type=Listed(click.Choice(ABLATIONS)),
        help=f"Measure each policy also without each of these that it has: {','.join(ABLATIONS)}.",
    )  # fmt: skip
    repetitions: int | None = setting(
        None, "--repetitions", "-r", type=Whole(1), help="Of everything. [default: 5, of loads 1]"
    )
    warm_up: int = setting(1, "--warm-up", help="Generations not counted.")
    questions: int = setting(0, "--questions", help="Of each .jsonl at most. [default: all]")
    turns: int = setting(0, "--turns", help="Of each question at most. [default: all]")
    cut: int = setting(
        0, "--cut", help="Tokens of a prompt at most: the first ones, of a later turn the newest. [default: all]"
    )
    output: str = setting(
        "md", "--output", "-o", type=click.Choice(["md", "csv", "json", "jsonl"]),
        help="What to print: means, deviations and percentiles of each combination.",
    )  # fmt: skip
    results: Path | None = setting(
        None, "--results", type=File(), help="Append a row for every generation, or load, to this CSV file."
    )
    resume: bool = setting(False, "--resume", help="Leave out what --results has already.")
    verbose: bool = setting(False, "--verbose", "-v", help="A traceback when something fails.")


@command(
    "bench", BenchOptions, Loads, Loading, ContextOptions, Traffic, PlacementOptions, Numerics,
    SamplingParams, Guesses, Policy, Experiments, defaults=DEFAULTS,
    without=("layer_split", "continuous", "asynchronous", "predict", "ignore_eos"),
)  # fmt: skip
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
        raise UserError(f"--turns {options.turns}: a load's requests do not wait for answers; it has the first turn of "
                        "each question, leave --turns out")  # fmt: skip
    models = options.models or (TARGET,)
    drafts = options.drafts or (() if options.models else ((DRAFT,),))
    teams = tuple(choose_drafts(team, ()) for team in drafts) or ((),)
    has_guesses = any(teams) or others["lookup"]
    default = USUAL if has_guesses else ("iterative",)
    names = [choose_policy(name, has_guesses) for name in options.policies or default]
    policies = take_policies(names, others)
    teams_shown = [",".join(map(str, team)) or "none" for team in teams]
    lists = {"-m": options.models, "-md": teams_shown, "--policy": names, "-n": options.predicts,
             "--layer-split": options.splits, "--ablate": options.ablate}  # fmt: skip
    for option, values in lists.items():
        check_once(option, values)
    base = RunOptions(models=JobModels(target=models[0])).changed(
        predict=0, policy=policies[0], sampling=take(SamplingParams, others), ignore_eos=True,
        results=options.results, verbose=options.verbose, **others,
    )  # fmt: skip
    prompts = _prompts(options.sources or tuple(map(str, TEXTS)), options.questions, 1 if loads else options.turns)
    from pipeinfer.job.bench.bench import run_sweep  # these initialise MPI
    from pipeinfer.job.bench.bench_load import run_loads
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
    return run_loads(sweep) if loads else run_sweep(sweep)


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


def _prompts(sources: tuple[str, ...], questions: int, turns: int) -> tuple[BenchPrompt, ...]:
    """Raises UserError if two have one name, as their rows would look alike."""
    prompts = tuple(prompt for source in sources for prompt in read_prompts(source, questions, turns))
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two prompts are called {twice}; rename a file, or give it once")
    return prompts
