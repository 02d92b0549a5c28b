"""`pipeinfer bench`: its options. What is measured is in `job.sweep`, how in `job.bench` and `job.bench_load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.given import take_token
from pipeinfer.cli.load_options import load_options, take_loads
from pipeinfer.cli.load_rules import check_once
from pipeinfer.cli.setting_options import command, take, take_policies
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.bench.sweep import Sweep
from pipeinfer.job.options.options import RunOptions, choose_drafts, choose_policy
from pipeinfer.job.options.sections import Experiments, Guesses, HubAccess, Loading, Numerics, Placement
from pipeinfer.job.options.text_sections import Context, Traffic
from pipeinfer.job.options.values import File, Listed, Split, Text, Whole
from pipeinfer.job.requests.conversation import Prompt, read_prompts
from pipeinfer.job.requests.prompts import TEXTS
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.registry import ABLATIONS, POLICIES, USUAL

REPETITIONS = 5
DEFAULTS = {"temp": 0.0, "seed": 0}
"""Other than those of `run`: a benchmark can be repeated."""


@command(
    "bench", HubAccess, Loading, Context, Traffic, Placement, Numerics, SamplingParams, Guesses, Policy, Experiments,
    without=("layer_split", "continuous", "asynchronous"), defaults=DEFAULTS,
)  # fmt: skip
@click.option("-m", "--model", "models", type=File(), multiple=True, help="Target; repeatable. [default: shipped]")
@click.option(
    "-md",
    "--model-draft",
    "drafts",
    type=Listed(File()),
    multiple=True,
    help="Draft; repeatable. SMALL,LARGE is one team of drafts, of which the larger refines what the smaller guesses.",
)
@click.option(
    "--policy", "policies", type=Listed(click.Choice(POLICIES)),
    help=f"One or more, as in iterative,pipeinfer. [default: {','.join(USUAL)}, without guesses iterative]",
)  # fmt: skip
@click.option(
    "-p",
    "--prompt",
    "--prompts",
    "sources",
    type=Text(),
    multiple=True,
    help="A text file, a number of tokens of text, or a .jsonl whose objects have `turns` or a `prompt`; may be given "
    "again. "
    "[default: three texts: a program, a tale, an excerpt]",
)
@click.option(
    "-n", "--predict", "--n-predict", "predicts", type=Listed(Whole(1)), default="128", show_default=True,
    help="Tokens to generate: 64,128.",
)  # fmt: skip
@click.option(
    "--layer-split", "splits", type=Split(), multiple=True, help="As for run; used where it has one part a stage."
)
@click.option(
    "--ablate", type=Listed(click.Choice(ABLATIONS)), default=(),
    help=f"Measure each policy also without each of these that it has: {','.join(ABLATIONS)}.",
)  # fmt: skip
@click.option("-r", "--repetitions", type=Whole(1), help="Of everything. [default: 5, of loads 1]")
@click.option("--warm-up", type=Whole(0), default=1, show_default=True, help="Generations not counted.")
@click.option("--questions", type=Whole(0), default=0, help="Of each .jsonl at most. [default: all]")
@click.option("--turns", type=Whole(0), default=0, help="Of each question at most. [default: all]")
@click.option(
    "--cut",
    type=Whole(0),
    default=0,
    help="Tokens of a prompt at most: the first ones, of a later turn the newest. [default: all]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "csv", "json", "jsonl"]),
    default="md",
    show_default=True,
    help="What to print: means, deviations and percentiles of each combination.",
)
@click.option("--results", type=File(), help="Append a row for every generation, or load, to this CSV file.")
@click.option("--resume", is_flag=True, help="Leave out what --results has already.")
@click.option("-v", "--verbose", is_flag=True, help="A traceback when something fails.")
@load_options
def bench(
    models: tuple[Path, ...],
    drafts: tuple[tuple[Path, ...], ...],
    policies: tuple[str, ...] | None,
    sources: tuple[str, ...],
    predicts: tuple[int, ...],
    splits: tuple[str, ...],
    ablate: tuple[str, ...],
    repetitions: int | None,
    warm_up: int,
    questions: int,
    turns: int,
    cut: int,
    output: str,
    results: Path | None,
    resume: bool,
    verbose: bool,
    **others: Any,
) -> int:
    """Measure speed and latency of every combination of models, policies, prompts and lengths, in one job.

    Models are loaded once for all that share them. Generation goes on after an end token, so that all texts have the
    same length. The summary goes to standard output, the progress to standard error. With --concurrency or --rate many
    requests share the models at a time, and what is measured is throughput and latencies.
    """
    if resume and not results:
        raise UserError("--resume needs --results: the file that has what was measured before")
    loads = take_loads(others)
    if loads and turns > 1:
        raise UserError(f"--turns {turns}: a load's requests do not wait for answers; it has the first turn of each "
                        "question, leave --turns out")  # fmt: skip
    take_token(others)
    drafts = drafts or (() if models else ((DRAFT,),))
    teams = tuple(choose_drafts(team, ()) for team in drafts) or ((),)
    has_guesses = any(teams) or others["lookup"]
    names = [choose_policy(name, has_guesses) for name in policies or (USUAL if has_guesses else ("iterative",))]
    chosen = take_policies(names, others)
    teams_shown = [",".join(map(str, team)) or "none" for team in teams]
    lists = {"-m": models, "-md": teams_shown, "--policy": names, "-n": predicts,
             "--layer-split": splits, "--ablate": ablate, "--concurrency": loads.concurrencies if loads else (),
             "--rate": loads.rates if loads else ()}  # fmt: skip
    for option, given in lists.items():
        check_once(option, given)
    base = RunOptions(
        model=(models or (TARGET,))[0],
        predict=0,
        policy=chosen[0],
        sampling=take(SamplingParams, others),
        ignore_eos=True,
        results=results,
        verbose=verbose,
        **others,
    )
    sweep = Sweep(
        base=base,
        pairs=tuple((model, team) for model in models or (TARGET,) for team in teams),
        policies=chosen,
        splits=splits,
        prompts=_prompts(sources or tuple(map(str, TEXTS)), questions, 1 if loads else turns),
        predicts=predicts,
        ablations=ablate,
        repetitions=repetitions or (1 if loads else REPETITIONS),
        cut=cut,
    )
    if loads:
        from pipeinfer.job.bench.bench_load import run_loads  # initialises MPI

        return run_loads(sweep, loads, warm_up, output, resume)
    from pipeinfer.job.bench.bench import run_sweep  # initialises MPI

    return run_sweep(sweep, warm_up, output, resume)


def _prompts(sources: tuple[str, ...], questions: int, turns: int) -> tuple[Prompt, ...]:
    """Raises UserError when two have one name: their rows could not be told apart."""
    prompts = tuple(prompt for source in sources for prompt in read_prompts(source, questions, turns))
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two prompts are called {twice}; rename a file, or give it once")
    return prompts
