"""`pipeinfer bench`: its options. What is measured, and how, is in `job.bench`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.given import check_sequences, take_token
from pipeinfer.cli.options.setting_options import command, take, take_policies
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.bench.sweep import Sweep
from pipeinfer.job.options.loads import Loads, check_once
from pipeinfer.job.options.options import RunOptions, choose_drafts, choose_policy
from pipeinfer.job.options.sections import Experiments, Guesses, HubAccess, Loading, Numerics, Placement
from pipeinfer.job.options.text_sections import Context, Traffic
from pipeinfer.job.options.values import SPLIT, File, Listed, Text, Whole
from pipeinfer.job.requests.conversation import Prompt, read_prompts
from pipeinfer.job.requests.prompts import TEXTS
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.registry import ABLATIONS, POLICIES, USUAL

REPETITIONS = 5
DEFAULTS = {"temp": 0.0, "seed": 0}
"""Other than those of `run`: a benchmark can be repeated."""


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
        (), "--prompt", "--prompts", "-p", type=Text(), repeated=True, first=True,
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
    "bench", BenchOptions, Loads, HubAccess, Loading, Context, Traffic, Placement, Numerics, SamplingParams,
    Guesses, Policy, Experiments, without=("layer_split", "continuous", "asynchronous"), defaults=DEFAULTS,
)  # fmt: skip
def bench(**others: Any) -> int:
    """Measure speed and latency of every combination of models, policies, prompts and lengths, in one job.

    Models are loaded once for all that share them. Generation goes on after an end token, so that all texts have the
    same length. The summary goes to standard output, the progress to standard error. With --concurrency or --rate many
    requests share the models at a time, and what is measured is throughput and latencies.
    """
    asked = take(BenchOptions, others)
    if asked.resume and not asked.results:
        raise UserError("--resume needs --results: the file that has what was measured before")
    loads = _loads(others)
    if loads and asked.turns > 1:
        raise UserError(f"--turns {asked.turns}: a load's requests do not wait for answers; it has the first turn of "
                        "each question, leave --turns out")  # fmt: skip
    take_token(others)
    models = asked.models or (TARGET,)
    teams = tuple(choose_drafts(team, ()) for team in asked.drafts or (() if asked.models else ((DRAFT,),))) or ((),)
    has_guesses = any(teams) or others["lookup"]
    names = [choose_policy(name, has_guesses) for name in asked.policies or (USUAL if has_guesses else ("iterative",))]
    chosen = take_policies(names, others)
    teams_shown = [",".join(map(str, team)) or "none" for team in teams]
    lists = {"-m": asked.models, "-md": teams_shown, "--policy": names, "-n": asked.predicts,
             "--layer-split": asked.splits, "--ablate": asked.ablate}  # fmt: skip
    for option, given in lists.items():
        check_once(option, given)
    base = RunOptions(
        model=models[0], predict=0, policy=chosen[0], sampling=take(SamplingParams, others), ignore_eos=True,
        results=asked.results, verbose=asked.verbose, **others,
    )  # fmt: skip
    sweep = Sweep(
        base=base,
        pairs=tuple((model, team) for model in models for team in teams),
        policies=chosen,
        splits=asked.splits,
        prompts=_prompts(asked.sources or tuple(map(str, TEXTS)), asked.questions, 1 if loads else asked.turns),
        predicts=asked.predicts,
        ablations=asked.ablate,
        repetitions=asked.repetitions or (1 if loads else REPETITIONS),
        cut=asked.cut,
        loads=loads,
        warm_up=asked.warm_up,
        output=asked.output,
        resume=asked.resume,
    )
    if loads:
        from pipeinfer.job.bench.bench_load import run_loads  # initialises MPI

        return run_loads(sweep)
    from pipeinfer.job.bench.bench import run_sweep  # initialises MPI

    return run_sweep(sweep)


def _loads(others: dict[str, Any]) -> Loads | None:
    """None where no loads are measured. Raises UserError for options that do not go together."""
    given = take(Loads, others)
    if given.concurrencies or given.rates:
        loads = given.checked()
        check_sequences(others["sequences"], loads.parallel or 0)
        return loads
    if given.requests or given.parallel or others["max_delay_s"] < math.inf:
        raise UserError("--requests, --parallel and --max-delay are of loads; give --concurrency or --rate too")
    return None


def _prompts(sources: tuple[str, ...], questions: int, turns: int) -> tuple[Prompt, ...]:
    """Raises UserError when two have one name: their rows could not be told apart."""
    prompts = tuple(prompt for source in sources for prompt in read_prompts(source, questions, turns))
    names = [prompt.name for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two prompts are called {twice}; rename a file, or give it once")
    return prompts
