"""`pipeinfer simulate`: predicts a cluster in virtual time. Needs no MPI and no model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.setting_options import command, take, take_policies
from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_GBIT, MAX_SEQUENCES, MAX_TOKENS
from pipeinfer.job.options.loads import PARALLEL, Loads
from pipeinfer.job.options.sections import Ablations, Experiments, Numerics, Output, Records
from pipeinfer.job.options.text_sections import Traffic
from pipeinfer.job.options.values import PROBABILITY, File, Listed, Number, Text
from pipeinfer.observe.results import LOADS, RESULTS
from pipeinfer.observe.summary import print_summary
from pipeinfer.observe.traffic import show_loads
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies.registry import POLICIES, USUAL
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.compare import side_by_side
from pipeinfer.virtual.outcome import write_trace
from pipeinfer.virtual.profile import load_profile, shipped_profiles
from pipeinfer.virtual.recorded import read_choices
from pipeinfer.virtual.study import Question, ask
from pipeinfer.virtual.traffic import Load

HELP = {
    "prepare_ahead": "Ablation: a run's input is prepared when the one before it is evaluated.",
    "post_ahead": "Ablation: stages meet to hand a run over.",
    "cancel": "Ablation: stages are not told of runs that cannot count any more.",
    "partitions": "Ablation: one sequence, so no branches.",
    "wire_type": "What activations travel as: f32, or bf16, half the bytes.",
    "requests": "Requests of a load, of -p and -n tokens each; without --concurrency and --rate they come at once. "
    f"[default: twice the largest --concurrency, with --rate {2 * PARALLEL} at least]",
    "parallel": "Requests of a load at a time at most. [default: the largest --concurrency, with --rate "
    f"{PARALLEL} at least; at once: all, {MAX_SEQUENCES} at most]",
    "json": "Print one JSON object for every generation instead.",
    "results": "Append a row for every generation, or every load, to this CSV file.",
    "trace": "Write the timeline of the last generation, as Chrome trace events.",
}


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The cluster, its models and what they do there."""

    profile: str | None = setting(
        None, "--profile", type=Text(), help="A TOML file, or the name of a shipped profile: --list names them."
    )
    listing: bool = setting(False, "--list", help="List the shipped profiles with their model pairs.")
    pair: str | None = setting(None, "--pair", type=Text(), help="Models of the profile. [default: its first pair]")
    nodes: int = setting(0, "--nodes", help="Nodes of the profile to use. [default: all]")
    gbit: float | None = setting(
        None, "--gbit", type=Number(0, MAX_GBIT, above=True),
        help="Bandwidth of the links, in place of the profile's.",
    )  # fmt: skip
    policies: tuple[str, ...] | None = setting(
        None, "--policy", type=Listed(click.Choice(list(POLICIES))),
        help=f"One or more. [default: all, side by side; of loads {','.join(USUAL)}]",
    )  # fmt: skip
    predict: int = setting(512, "--predict", "-n", least=1, most=MAX_TOKENS, help="Tokens to generate.")
    prompt_tokens: int = setting(128, "--prompt-tokens", "-p", least=1, most=MAX_TOKENS, help="Tokens of the prompt.")
    seed: int = setting(0, "--seed", "-s", help="Of synthetic texts and guesses.")
    repetitions: int = setting(1, "--repetitions", "-r", least=1, help="With the next seeds.")
    acceptances: tuple[float, ...] = setting(
        (), "--acceptance", type=PROBABILITY, repeated=True,
        help="How often the draft's best guess is right; of several drafts, once for each. [default: the pair's]",
    )  # fmt: skip
    ranks: tuple[tuple[float, ...], ...] = setting(
        (), "--ranks", type=Listed(PROBABILITY), repeated=True,
        help="How often its first, second, … guess is right, as in 0.7,0.1,0.05; likewise.",
    )  # fmt: skip
    ageing: tuple[float, ...] = setting(
        (), "--ageing", type=Listed(PROBABILITY),
        help="Of a draft that reads the target's features, as EAGLE's: what its acceptance is multiplied by for each "
        "token that it guesses after without knowing the target's verdict; of several numbers the first for the first "
        "such token, the last for all further ones. [default: a draft that does not]",
    )  # fmt: skip
    choices: Path | None = setting(
        None, "--choices", type=File(),
        help="Texts recorded by experiments/record.py, a generation each, in place of synthetic ones of -p tokens and "
        "--repetitions; of a load the first requests', and again.",
    )  # fmt: skip
    samplers: int = setting(
        0, "--sampler-threads", most=1024,
        help="Threads beside the last stage that choose tokens, of a profile that says what that takes.",
    )  # fmt: skip
    output: str = setting(
        "md", "--output", "-o", type=click.Choice(["md", "csv", "json", "jsonl"]),
        help="What to print, as for `bench`.",
    )  # fmt: skip


@command(
    "simulate", SimulateOptions, Loads, Traffic, Policy, Ablations, Experiments, Records, Output, Numerics, helps=HELP,
    without=("pace", "verbose", "numerics", "gpu_aware", "cache_type_k", "cache_type_v", "cache_type_k_draft",
             "cache_type_v_draft"),
)  # fmt: skip
def simulate_command(**given: Any) -> int:
    """Predict speed and latency on a cluster described by a profile: the real engine and policies, modelled time.

    The summary goes to standard output. The same options always give the same figures. Without --policy all policies
    are compared on the same texts, guesses and costs. There `of the limit` is beside a pipeline that emits a token
    whenever its slowest stage has evaluated a single row; where rows are cheap, runs from which several tokens come can
    pass it. For real ranks there is `bench`.
    """
    asked, loads, records = take(SimulateOptions, given), take(Loads, given), take(Records, given)
    if asked.listing:
        for name in shipped_profiles():
            file = load_profile(name)
            print(f"{name}: 2 to {file.n_nodes_max} nodes; pairs {', '.join(file.pairs)}")
        return 0
    if asked.profile is None:
        raise UserError(f"give --profile: a TOML file, or one of {', '.join(shipped_profiles())}")
    outputs = {"--results": records.results, "--trace": records.trace}
    check_separate(outputs, {"--profile": [Path(asked.profile)], "--choices": filter(None, [asked.choices])})
    has_loads = bool(loads.requests or loads.concurrencies or loads.rates)
    if records.results:
        (LOADS if has_loads else RESULTS).check(records.results)
    if records.trace:
        check_writable(records.trace, "--trace")
    if bool(asked.acceptances) + bool(asked.ranks) + bool(asked.choices) > 1:
        raise UserError("give one of --acceptance, --ranks and --choices")
    if asked.choices and asked.ageing:
        raise UserError("--ageing is of synthetic drafts; leave it out, or --choices")
    texts = read_choices(asked.choices) if asked.choices else []
    chosen = take_policies(asked.policies or (USUAL if has_loads else POLICIES), given)
    file = load_profile(asked.profile)

    def lay_out(has_draft: bool) -> Profile:
        profile = file.lay_out(asked.nodes, asked.pair or "", has_draft)
        host = replace(profile.host, samplers=asked.samplers, ahead=given["prepare_ahead"], posted=given["post_ahead"])
        link = replace(profile.link, bytes_per_s=asked.gbit * 1e9 / 8) if asked.gbit else profile.link
        return replace(profile, host=host, link=link, wire_type=given["wire_type"])

    question = Question(
        lay_out, asked.predict, asked.prompt_tokens, asked.ranks or [ranks_for(share) for share in asked.acceptances],
        given["cancel"], given["partitions"], asked.ageing, texts, asked.choices.stem if asked.choices else "",
        lay_out(False),
    )  # fmt: skip
    seeds = range(len(texts)) if texts else range(asked.seed, asked.seed + asked.repetitions)
    if has_loads:
        if records.trace or not question.cancel or not question.partitions:
            raise UserError("--trace, --no-cancel and --no-partitions are of single requests; leave them out, or "
                            "--requests, --concurrency and --rate")  # fmt: skip
        each_load = list(_loads(loads, asked, given["max_delay_s"]))
        figures = (
            question.carry(policy, replace(load, seed=seed), records.results)
            for seed in range(asked.seed, asked.seed + asked.repetitions)
            for load in each_load for policy in chosen
        )  # fmt: skip
        show_loads(figures, asked.output, given["json"])
        return 0
    if loads.parallel or given["max_delay_s"] < math.inf:
        raise UserError("--parallel and --max-delay are of loads; give --concurrency, --rate or --requests too")
    rows, generations = [], []
    for last, result, row in ask(question, chosen, seeds, records.results, given["json"]):
        rows.append(row)
        generations.append((last, result))
    if records.trace:
        write_trace(records.trace, last)
    if asked.output == "md" and not given["json"] and (texts or not asked.policies):
        print("\n".join(side_by_side(generations)))
    elif not given["json"]:
        print_summary(rows, asked.output)
    return 0


def _loads(given: Loads, asked: SimulateOptions, max_delay_s: float) -> Iterator[Load]:
    """One for each concurrency and rate, or one whose requests come at once. Raises UserError."""
    loads = given.checked()
    n_requests = loads.requests or 2 * max(loads.most_clients, PARALLEL if loads.rates else 0)
    like = Load(n_requests, asked.prompt_tokens, asked.predict, loads.parallel or min(n_requests, MAX_SEQUENCES),
                max_delay_s=max_delay_s)  # fmt: skip
    yield from (replace(like, concurrency=count) for count in loads.concurrencies)
    yield from (replace(like, rate=rate) for rate in loads.rates)
    if not loads.concurrencies and not loads.rates:
        yield like
