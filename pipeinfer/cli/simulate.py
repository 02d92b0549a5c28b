"""`pipeinfer simulate`: what a cluster would do, in virtual time. Needs no MPI; a model only to record its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.load_rules import MAX_REQUESTS, PARALLEL, LoadSizes, check_once, parallel_of
from pipeinfer.cli.options.setting_options import command, take_policies
from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_GBIT, MAX_SEQUENCES, MAX_TOKENS
from pipeinfer.job.options.sections import Ablations, Experiments
from pipeinfer.job.options.text_sections import Traffic
from pipeinfer.job.options.values import PROBABILITY, File, Listed, Number, Text, Whole, WireName
from pipeinfer.observe.loads import show_loads
from pipeinfer.observe.results import check_results
from pipeinfer.observe.summary import print_summary
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies.registry import POLICIES, USUAL
from pipeinfer.virtual.choices import RecordedChoices, ranks_for
from pipeinfer.virtual.compare import generation_of, side_by_side
from pipeinfer.virtual.load import Load
from pipeinfer.virtual.outcome import write_trace
from pipeinfer.virtual.profile import ProfileFile, load_profile, shipped_profiles
from pipeinfer.virtual.study import Question, ask, ask_loads

MAX_SAMPLERS = 1024
HELP = {
    "prepare_ahead": "Ablation: a run's input is prepared when the one before it is evaluated.",
    "post_ahead": "Ablation: stages meet to hand a run over.",
    "cancel": "Ablation: stages are not told of runs that cannot count any more.",
    "partitions": "Ablation: one sequence, so no branches.",
}
POLICY_LIST = Listed(click.Choice(POLICIES))


@command("simulate", LoadSizes, Traffic, Policy, Ablations, Experiments, without=("pace",), helps=HELP)
@click.option(
    "--profile", "profile_name", type=Text(), help="A TOML file, or the name of a shipped profile: --list names them."
)
@click.option("--list", "listing", is_flag=True, help="List the shipped profiles with their model pairs.")
@click.option("--pair", type=Text(), help="Models of the profile. [default: its first pair]")
@click.option("--nodes", type=Whole(0), default=0, help="Nodes of the profile to use. [default: all]")
@click.option("--gbit", type=Number(0, MAX_GBIT, above=True), help="Bandwidth of the links, in place of the profile's.")
@click.option(
    "--wire-type", type=WireName(), default="f32", show_default=True,
    help="What activations travel as: f32, or bf16, half the bytes.",
)  # fmt: skip
@click.option(
    "--policy", "policies", type=POLICY_LIST,
    help=f"One or more. [default: all, side by side; of loads {','.join(USUAL)}]",
)  # fmt: skip
@click.option("-n", "--predict", type=Whole(1, MAX_TOKENS), default=512, show_default=True, help="Tokens to generate.")
@click.option(
    "-p", "--prompt-tokens", type=Whole(1, MAX_TOKENS), default=128, show_default=True, help="Synthetic choices."
)
@click.option("-s", "--seed", type=Whole(0), default=0, show_default=True, help="Of synthetic choices.")
@click.option("-r", "--repetitions", type=Whole(1), default=1, show_default=True, help="With the next seeds.")
@click.option(
    "--acceptance",
    "acceptances",
    type=PROBABILITY,
    multiple=True,
    help="How often the draft's best guess is right; of several drafts, once for each. [default: the pair's]",
)
@click.option(
    "--ranks",
    type=Listed(PROBABILITY),
    multiple=True,
    help="How often its first, second, … guess is right, as in 0.7,0.1,0.05; likewise.",
)
@click.option(
    "--choices",
    "files",
    type=File(),
    multiple=True,
    help="Recorded choices, instead of synthetic ones; likewise. See `pipeinfer record`.",
)
@click.option(
    "-md",
    "--model-draft",
    "drafts",
    type=File(),
    multiple=True,
    help="Ask this draft for branches that --choices lacks, and add them to the file; likewise.",
)
@click.option(
    "--requests", type=Whole(1, MAX_REQUESTS),
    help="Requests of a load, of -p and -n tokens each; without --concurrency and --rate they come at once. [default: "
    f"twice the largest --concurrency, with --rate {2 * PARALLEL} at least]",
)  # fmt: skip
@click.option(
    "--parallel", type=Whole(1, MAX_SEQUENCES),
    help=f"Requests of a load at a time at most. [default: the largest --concurrency, with --rate {PARALLEL} at least; "
    f"at once: all, {MAX_SEQUENCES} at most]",
)  # fmt: skip
@click.option(
    "--sampler-threads",
    "samplers",
    type=Whole(0, MAX_SAMPLERS),
    default=0,
    show_default=True,
    help="Threads beside the last stage that choose tokens, of a profile that says what that takes.",
)
@click.option(
    "-o", "--output", type=click.Choice(["md", "csv", "json", "jsonl"]), default="md", show_default=True,
    help="What to print, as for `bench`.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for every generation instead.")
@click.option("--results", type=File(), help="Append a row for every generation to this CSV file.")
@click.option("--trace", type=File(), help="Write the timeline of the last generation, as Chrome trace events.")
def simulate_command(
    profile_name: str | None, listing: bool, pair: str | None, nodes: int, gbit: float | None, wire_type: WireType,
    policies: tuple[str, ...] | None, predict: int, prompt_tokens: int, seed: int, repetitions: int,
    acceptances: tuple[float, ...], ranks: tuple[tuple[float, ...], ...], files: tuple[Path, ...],
    drafts: tuple[Path, ...], cancel: bool, partitions: bool, output: str, as_json: bool,
    results: Path | None, trace: Path | None, requests: int | None, rates: tuple[float, ...],
    parallel: int | None, concurrencies: tuple[int, ...], max_delay_s: float | None,
    samplers: int, prepare_ahead: bool, post_ahead: bool, **others: Any,
) -> int:  # fmt: skip
    """Predict speed and latency on a cluster described by a profile: the real engine and policies, modelled time.

    The summary goes to standard output. The same options always give the same figures. Without --policy all policies
    are compared on the same texts, guesses and costs. There `of the limit` is beside a pipeline that emits a token
    whenever its slowest stage has evaluated a single row; where rows are cheap, runs from which several tokens come can
    pass it. For real ranks there is `bench`.
    """
    if listing:
        list_profiles()
        return 0
    check_separate({"--results": results, "--trace": trace}, inputs_of(profile_name, files, drafts))
    if results:
        check_results(results)
    if trace:
        check_writable(trace, "--trace")
    if drafts:
        for path in files:
            check_writable(path, "--choices")
    has_load = bool(requests or concurrencies or rates)
    question = Question(
        file=open_profile(profile_name),
        nodes=nodes,
        pair=pair or "",
        gbit=gbit,
        policies=take_policies(policies or (USUAL if has_load else POLICIES), others),
        predict=predict,
        prompt_tokens=prompt_tokens,
        by_rank=ranks_asked(acceptances, ranks, bool(files)),
        known=open_choices(files, drafts),
        cancel=cancel,
        partitions=partitions,
        samplers=samplers,
        ahead=prepare_ahead,
        posted=post_ahead,
        wire_type=wire_type,
    )
    if has_load:
        if results or trace or files or not cancel or not partitions:
            raise UserError("--results, --trace, --choices, --no-cancel and --no-partitions are of single requests; "
                            "leave them out, or --requests, --concurrency and --rate")  # fmt: skip
        like = Load(requests or 0, prompt_tokens, predict, parallel or 0, max_delay_s=max_delay_s)
        loads = [replace(load, seed=each) for each in range(seed, seed + repetitions)
                 for load in loads_of(like, concurrencies, rates)]  # fmt: skip
        show_loads(ask_loads(question, loads), output, as_json)
        return 0
    if parallel or max_delay_s is not None:
        raise UserError("--parallel and --max-delay are of loads; give --concurrency, --rate or --requests too")
    rows, generations = [], []
    for last, result, row in ask(question, range(seed, seed + repetitions), results, as_json):
        rows.append(row)
        generations.append(generation_of(last, result))
    if trace:
        write_trace(trace, last)
    if drafts:
        for path, known in zip(files, question.known, strict=True):
            known.save(path)
    if output == "md" and not (policies or as_json):
        print("\n".join(side_by_side(generations)))
    elif not as_json:
        print_summary(rows, output)
    return 0


def loads_of(like: Load, concurrencies: Sequence[int], rates: Sequence[float]) -> list[Load]:
    """One for each of these, or one whose requests come at once. Where `like` has 0 requests, or 0 at a time, neither
    was said. Raises UserError for what does not go together."""
    check_once("--concurrency", concurrencies)
    check_once("--rate", rates)
    parallel = parallel_of(concurrencies, rates, like.n_requests, like.parallel)
    n_requests = like.n_requests or 2 * max((*concurrencies, PARALLEL if rates else 0))
    like = replace(like, n_requests=n_requests, parallel=parallel or min(n_requests, MAX_SEQUENCES))
    asked = [replace(like, concurrency=count) for count in concurrencies] + [replace(like, rate=rate) for rate in rates]
    return asked or [like]


def inputs_of(profile: str | None, files: Sequence[Path], drafts: Sequence[Path]) -> dict[str, list[Path]]:
    """The files that are read, by the options that name them."""
    return {"--profile": [Path(profile)] if profile else [], "--choices": list(files), "--model-draft": list(drafts)}


def list_profiles() -> None:
    for name in shipped_profiles():
        file = load_profile(name)
        print(f"{name}: 2 to {file.n_nodes_max} nodes; pairs {', '.join(file.pairs)}")


def open_profile(name: str | None) -> ProfileFile:
    if name is None:
        raise UserError(f"give --profile: a TOML file, or one of {', '.join(shipped_profiles())}")
    return load_profile(name)


def open_choices(paths: Sequence[Path], drafts: Sequence[Path]) -> list[RecordedChoices]:
    """Raises UserError when a file is none or not of the same text, or a draft cannot be loaded."""
    if drafts and len(drafts) != len(paths):
        raise UserError("--model-draft answers for branches of recorded choices; give it as often as --choices")
    found = [RecordedChoices.load(path) for path in paths]
    for path, choices in zip(paths, found, strict=True):
        if (choices.prompt, choices.tokens) != (found[0].prompt, found[0].tokens):
            raise UserError(
                f"choices {path} are of another text than {paths[0]}; record both with one target and prompt"
            )
    for choices, draft in zip(found, drafts, strict=False):
        from pipeinfer.job.bench.record import ask_draft  # needs llama-cpp-python

        ask_draft(choices, draft)
    return found


def ranks_asked(
    acceptances: Sequence[float], ranks: Sequence[Sequence[float]], has_choices: bool
) -> Sequence[Sequence[float]]:
    """Probabilities by rank of each draft; empty if the pair's are to be taken. Raises UserError."""
    if bool(acceptances) + bool(ranks) + has_choices > 1:
        raise UserError("give one of --choices, --acceptance and --ranks")
    return [ranks_for(share) for share in acceptances] or ranks
