"""`pipeinfer simulate`: predicts a cluster in virtual time. Needs no MPI and no model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.options.setting_options import command, take, take_policies
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import Setting, setting, settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_GBIT, MAX_SEQUENCES, MAX_TOKENS
from pipeinfer.job.options.sections import Ablations, Experiments, Numerics
from pipeinfer.job.options.text_sections import PARALLEL, Loads, OutputOptions, Records, Traffic
from pipeinfer.job.options.values import PROBABILITY, File, Listed, Number, TextType
from pipeinfer.job.session.result import options_text
from pipeinfer.observe.summary import print_simulated_loads, print_summary
from pipeinfer.observe.table import LOADS, RESULTS
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies import POLICIES, USUAL
from pipeinfer.text import printed
from pipeinfer.virtual.choices import RecordedChoices, ranks_for, read_choices
from pipeinfer.virtual.costs import Profile
from pipeinfer.virtual.profile import load_profile, shipped_profiles
from pipeinfer.virtual.simulation import Load
from pipeinfer.virtual.study import Study, side_by_side

POLICY_HELP = f"One or more. [default: all, side by side; of loads {','.join(USUAL)}]"
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
    """The cluster, its models and what they do there.

    profile: A TOML file, or the name of a shipped profile: --list names them.
    listing: List the shipped profiles with their model pairs.
    pair: Models of the profile. [default: its first pair]
    nodes: Nodes of the profile to use. [default: all]
    gbit: Bandwidth of the links, in place of the profile's.
    predict: Tokens to generate.
    prompt_tokens: Tokens of the prompt.
    seed: Of synthetic texts and guesses.
    repetitions: With the next seeds.
    acceptances: How often the draft's best guess is right; of several drafts, once for each. [default: the pair's]
    ranks: How often its first, second, … guess is right, as in 0.7,0.1,0.05; likewise.
    ageing: Of a draft that reads the target's features, as EAGLE's: what its acceptance is multiplied by for each token
        that it guesses after without knowing the target's verdict; of several numbers the first for the first such
        token, the last for all further ones. [default: a draft that does not]
    choices: Texts recorded by experiments/record.py, a generation each, in place of synthetic ones of -p tokens and
        --repetitions; of a load the first requests', and again.
    samplers: Threads beside the last stage that choose tokens, of a profile that says what that takes.
    output: What to print, as for `bench`.
    """

    profile: str | None = setting(None, "--profile", type=TextType())
    listing: bool = setting(False, "--list")
    pair: str | None = setting(None, "--pair", type=TextType())
    nodes: int = setting(0, "--nodes")
    gbit: float | None = setting(None, "--gbit", type=Number(0, MAX_GBIT, above=True), column=True)
    policies: tuple[str, ...] | None = setting(
        None, "--policy", type=Listed(click.Choice(list(POLICIES))), help=POLICY_HELP
    )
    predict: int = setting(512, "--predict", "-n", least=1, most=MAX_TOKENS)
    prompt_tokens: int = setting(128, "--prompt-tokens", "-p", least=1, most=MAX_TOKENS)
    seed: int = setting(0, "--seed", "-s")
    repetitions: int = setting(1, "--repetitions", "-r", least=1)
    acceptances: tuple[float, ...] = setting((), "--acceptance", type=PROBABILITY, repeated=True)
    ranks: tuple[tuple[float, ...], ...] = setting((), "--ranks", type=Listed(PROBABILITY), repeated=True)
    ageing: tuple[float, ...] = setting((), "--ageing", type=Listed(PROBABILITY))
    choices: Path | None = setting(None, "--choices", type=File())
    samplers: int = setting(0, "--sampler-threads", most=1024, column=True)
    output: str = setting("md", "--output", "-o", type=click.Choice(["md", "csv", "json", "jsonl"]))


TYPES_OF_CACHES = tuple(f"cache_type_{part}" for part in ("k", "v", "k_draft", "v_draft"))
NUMERICS = ("numerics", "allow_other_numerics", "repack", "gpu_aware", *TYPES_OF_CACHES)
WITHOUT = ("pace", "resume", "verbose", *NUMERICS)
_OUTPUT = (Records, OutputOptions, Numerics)
_SECTIONS = (SimulateOptions, Loads, Traffic, Policy, Ablations, Experiments, *_OUTPUT)


@command("simulate", *_SECTIONS, helps=HELP, without=WITHOUT)
def simulate_command(**values: Any) -> int:
    """Predict speed and latency on a cluster described by a profile: the real engine and policies, modelled time.

    The summary goes to standard output. The same options always give the same figures. Without --policy all policies
    are compared on the same texts, guesses and costs. There `of the limit` is beside a pipeline that emits a token
    whenever its slowest stage has evaluated a single row; where rows are cheap, runs from which several tokens come can
    pass it. For real ranks there is `bench`.
    """
    options, loads, records = take(SimulateOptions, values), take(Loads, values), take(Records, values)
    if options.listing:
        for name in shipped_profiles():
            file = load_profile(name)
            print(f"{name}: 2 to {file.n_nodes_max} nodes; pairs {', '.join(file.pairs)}")
        return 0
    if options.profile is None:
        raise UserError(f"give --profile: a TOML file, or one of {', '.join(shipped_profiles())}")
    outputs = {"--results": records.results, "--trace": records.trace}
    check_separate(outputs, {"--profile": [Path(options.profile)], "--choices": filter(None, [options.choices])})
    has_loads = bool(loads.requests or loads.concurrencies or loads.rates)
    if records.results:
        (LOADS if has_loads else RESULTS).check(records.results)
    if records.trace:
        check_writable(records.trace, "--trace")
    if bool(options.acceptances) + bool(options.ranks) + bool(options.choices) > 1:
        raise UserError("give one of --acceptance, --ranks and --choices")
    if values["json"] and options.output != "md":
        raise UserError(f"--json and -o {options.output} are two forms of what is printed; give one of them")
    if options.choices and options.ageing:
        raise UserError("--ageing is of synthetic drafts; leave it out, or --choices")
    texts = read_choices(options.choices) if options.choices else []
    policies = take_policies(options.policies or (USUAL if has_loads else POLICIES), values)
    study = _study(options, values, texts)
    seeds = range(len(texts)) if texts else range(options.seed, options.seed + options.repetitions)
    if has_loads:
        if records.trace or not study.cancel or not study.partitions:
            single = "--trace, --no-cancel and --no-partitions are of single requests"
            raise UserError(f"{single}; leave them out, or --requests, --concurrency and --rate")
        each_load = list(_loads(loads, options, values["max_delay_s"]))
        seeds = range(options.seed, options.seed + options.repetitions)
        runs = ((policy, replace(load, seed=seed)) for seed in seeds for load in each_load for policy in policies)
        figures = (study.run_load(*run, records.results) for run in runs)
        print_simulated_loads(figures, options.output, values["json"])
        return 0
    if loads.parallel or values["max_delay_s"] < math.inf:
        raise UserError("--parallel and --max-delay are of loads; give --concurrency, --rate or --requests too")
    generations = list(study.generate_all(policies, seeds, records.results, values["json"]))
    if records.trace:
        generations[-1][1].write_trace(records.trace)
    if values["json"]:
        return 0
    if options.output == "md" and (texts or not options.policies):
        print(printed(side_by_side(generations)))
    else:
        print_summary([RESULTS.as_read(result.columns()) for _, result in generations], options.output)
    return 0


def _study(options: SimulateOptions, values: dict[str, Any], texts: Sequence[RecordedChoices]) -> Study:
    assert options.profile
    file = load_profile(options.profile)

    def lay_out(has_draft: bool) -> Profile:
        profile = file.lay_out(options.nodes, options.pair or "", has_draft)
        ahead, posted = values["prepare_ahead"], values["post_ahead"]
        host = replace(profile.host, samplers=options.samplers, ahead=ahead, posted=posted)
        link = replace(profile.link, bytes_per_s=options.gbit * 1e9 / 8) if options.gbit else profile.link
        return replace(profile, host=host, link=link, wire_type=values["wire_type"])

    by_rank = options.ranks or [ranks_for(share) for share in options.acceptances]
    name, n_tokens = options.choices.stem if options.choices else "", (options.predict, options.prompt_tokens)
    ablations = values["cancel"], values["partitions"]
    recorded, changed = (texts, name), ", ".join(options_text(_settings(options, values)))
    return Study(lay_out, *n_tokens, by_rank, *ablations, options.ageing, *recorded, file.top.values, changed)


def _settings(options: SimulateOptions, values: dict[str, Any]) -> Iterator[tuple[str, Any, Any, Setting]]:
    """(name, value, default, setting) of the settings of cluster and engine."""
    given = asdict(options) | values
    for kind in (SimulateOptions, Traffic, Experiments, Numerics):
        yield from ((name, given[name], *more) for name, *more in settings_of(kind) if name in given)


def _loads(loads: Loads, options: SimulateOptions, max_delay_s: float) -> Iterator[Load]:
    """A load for each concurrency and rate, or one whose requests arrive at once. Raises UserError."""
    loads = loads.checked()
    n_requests = loads.requests or 2 * max(loads.most_clients, PARALLEL if loads.rates else 0)
    parallel = loads.parallel or min(n_requests, MAX_SEQUENCES)
    like = Load(n_requests, options.prompt_tokens, options.predict, parallel, max_delay_s=max_delay_s)
    yield from (replace(like, concurrency=count) for count in loads.concurrencies)
    yield from (replace(like, rate=rate) for rate in loads.rates)
    if not loads.concurrencies and not loads.rates:
        yield like
