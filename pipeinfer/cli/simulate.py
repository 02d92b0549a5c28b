"""`pipeinfer simulate`: what a cluster would do, in virtual time. Needs no MPI; a model only to record its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.choices import Choices, RecordedChoices, ranks_for, synthetic_team
from pipeinfer.cli.asked import settings_text, variant_text
from pipeinfer.cli.command import Command
from pipeinfer.cli.json_text import json_text
from pipeinfer.cli.policy_options import policy_options, take_policy_options
from pipeinfer.cli.simulated import make_result, simulated_columns, write_trace
from pipeinfer.cli.summary import print_summary
from pipeinfer.cli.values import PROBABILITY, File, Listed, Number, Text, Whole
from pipeinfer.cluster.costs import Profile
from pipeinfer.cluster.profile import ProfileFile, load_profile, shipped_profiles
from pipeinfer.cluster.simulation import Simulated, simulate
from pipeinfer.errors import UserError
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies.factory import POLICIES, PolicyOptions, make_policy
from pipeinfer.results import Row, append_result, as_read, check_results, result_row

DEFAULT_ACCEPTANCE = 0.7
MAX_GBIT = 10**6
MAX_TOKENS = 1 << 19  # prompt and text together: what synthetic choices hold
POLICY_LIST = Listed(click.Choice(POLICIES))


@click.command("simulate", cls=Command)
@click.option(
    "--profile", "profile_name", type=Text(), help="A TOML file, or the name of a shipped profile: --list names them."
)
@click.option("--list", "listing", is_flag=True, help="List the shipped profiles with their model pairs.")
@click.option("--pair", type=Text(), help="Models of the profile. [default: its first pair]")
@click.option("--nodes", type=Whole(0), default=0, help="Nodes of the profile to use. [default: all]")
@click.option("--gbit", type=Number(0, MAX_GBIT, above=True), help="Bandwidth of the links, in place of the profile's.")
@click.option(
    "--policy", "policies", type=POLICY_LIST, default=",".join(POLICIES), show_default=True, help="One or more."
)
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
@policy_options
@click.option("--no-cancel", is_flag=True, help="Ablation: stages are not told of runs that cannot count any more.")
@click.option("--no-partitions", is_flag=True, help="Ablation: one sequence, so no branches.")
@click.option(
    "-o", "--output", type=click.Choice(["md", "csv", "json", "jsonl"]), default="md", show_default=True,
    help="What to print, as for `bench`.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for every generation instead.")
@click.option("--results", type=File(), help="Append a row for every generation to this CSV file.")
@click.option("--trace", type=File(), help="Write the timeline of the last generation, as Chrome trace events.")
def simulate_command(
    profile_name: str | None, listing: bool, pair: str | None, nodes: int, gbit: float | None,
    policies: tuple[str, ...], predict: int, prompt_tokens: int, seed: int, repetitions: int,
    acceptances: tuple[float, ...], ranks: tuple[tuple[float, ...], ...], files: tuple[Path, ...],
    drafts: tuple[Path, ...], no_cancel: bool, no_partitions: bool, output: str, as_json: bool,
    results: Path | None, trace: Path | None, **others: Any,
) -> int:  # fmt: skip
    """Predict speed and latency on a cluster described by a profile: the real engine and policies, modelled time.

    The summary goes to standard output. The same options always give the same figures.
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
    question = Question(
        file=open_profile(profile_name),
        nodes=nodes,
        pair=pair or "",
        gbit=gbit,
        policies=policies,
        options=take_policy_options(others),
        predict=predict,
        prompt_tokens=prompt_tokens,
        by_rank=ranks_asked(acceptances, ranks, bool(files)),
        known=open_choices(files, drafts),
        cancel=not no_cancel,
        partitions=not no_partitions,
    )
    rows, last = ask(question, range(seed, seed + repetitions), results, as_json)
    if trace:
        write_trace(trace, last)
    if drafts:
        for path, known in zip(files, question.known, strict=True):
            known.save(path)
    if not as_json:
        print_summary(rows, output)
    return 0


@dataclass(frozen=True, slots=True)
class Question:
    """What to simulate, in every combination of policies and seeds. `by_rank`, `known` (choices from files): one for
    each draft, the smallest first; empty if the profile's acceptance is to be taken."""

    file: ProfileFile
    nodes: int
    pair: str
    gbit: float | None
    policies: Sequence[str]
    options: PolicyOptions
    predict: int
    prompt_tokens: int
    by_rank: Sequence[Sequence[float]]
    known: Sequence[RecordedChoices]
    cancel: bool
    partitions: bool

    def answer(self, policy: str, seed: int, repetition: int) -> tuple[Simulated, dict[str, Any], Row]:
        """One generation, its result object and row. Raises UserError when it cannot be simulated."""
        profile = self._lay_out(policy != "iterative")
        first, *larger = self._choices(profile, seed)
        simulated = simulate(
            profile, first, make_policy(policy, self.options), self.predict, cancel=self.cancel,
            partitions=self.partitions, larger=larger if profile.drafts else [],
        )  # fmt: skip
        asked = simulated_columns(simulated, self._guessed(profile), seed, repetition) | {
            "policy": policy,
            "settings": settings_text(policy, self.options),
            "variant": variant_text(self.options, self.cancel, self.partitions),
        }
        result = make_result(simulated, asked)
        return simulated, result, result_row(result, asked)

    def _lay_out(self, has_draft: bool) -> Profile:
        profile = self.file.lay_out(self.nodes, self.pair, has_draft)
        if self.gbit is None:
            return profile
        return replace(profile, link=replace(profile.link, bytes_per_s=self.gbit * 1e9 / 8))

    def _choices(self, profile: Profile, seed: int) -> Sequence[Choices]:
        """Of each draft. Raises UserError when there are not as many as drafts."""
        n_drafts = len(profile.drafts)
        found = self.known or synthetic_team(self._ranks(profile), seed, self.prompt_tokens)
        if n_drafts and len(found) != n_drafts:
            raise UserError(
                f"{profile.name} has {n_drafts} drafts; give --acceptance, --ranks or --choices {n_drafts} times"
            )
        return found

    def _ranks(self, profile: Profile) -> Sequence[Sequence[float]]:
        """How often each draft's first, second, … guess is right."""
        published = profile.acceptance or (DEFAULT_ACCEPTANCE,) * len(profile.drafts) or (DEFAULT_ACCEPTANCE,)
        return self.by_rank or [ranks_for(share) for share in published]

    def _guessed(self, profile: Profile) -> Sequence[object]:
        """What says what each draft guesses."""
        return [(known.prompt, known.tokens, known.about) for known in self.known] or self._ranks(profile)


def ask(question: Question, seeds: Sequence[int], results: Path | None, as_json: bool) -> tuple[list[Row], Simulated]:
    """Simulate everything; the rows of results.csv, and the last generation."""
    rows: list[Row] = []
    for repetition, seed in enumerate(seeds, start=1):
        for policy in question.policies:
            simulated, result, row = question.answer(policy, seed, repetition)
            rows.append(as_read(row))
            if results:
                append_result(results, row)
            if as_json:
                print(json_text(result))
    return rows, simulated


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
        from pipeinfer.cli.record import ask_draft  # needs llama-cpp-python

        ask_draft(choices, draft)
    return found


def ranks_asked(
    acceptances: Sequence[float], ranks: Sequence[Sequence[float]], has_choices: bool
) -> Sequence[Sequence[float]]:
    """Probabilities by rank of each draft; empty if the pair's are to be taken. Raises UserError."""
    if bool(acceptances) + bool(ranks) + has_choices > 1:
        raise UserError("give one of --choices, --acceptance and --ranks")
    return [ranks_for(share) for share in acceptances] or ranks
