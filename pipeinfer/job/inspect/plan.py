"""`pipeinfer plan`: for hosts that somebody describes, here and now; for those of its own ranks, on all of them.
What it tells is plain data: who gets what, how fast each policy would be, what would help."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.hosts.cores import this_host
from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.timing.costs import LinkCost
from pipeinfer.cluster.timing.link_times import bandwidth_gbit
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_GBIT, MAX_TOKENS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import PROBABILITY, File, Number, Text, Whole
from pipeinfer.job.placement.gpus import gpu_names
from pipeinfer.job.placement.model_files import draft_translation, fetch_models, open_models, translation_note
from pipeinfer.job.planning.plan_table import plan_rows
from pipeinfer.job.planning.planner import ETHERNET, N_PROMPT, Planner, Prediction, open_planner
from pipeinfer.job.planning.suggestions import shortage_text, suggestions
from pipeinfer.job.profiling.host_speeds import known_speeds, own_speed, with_speeds
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.observe.texts.plan_text import plan_lines
from pipeinfer.policies.registry import POLICIES, make_policy
from pipeinfer.virtual.hosts_file import read_hosts
from pipeinfer.virtual.nodes import Node, first_ranks, profiled_nodes
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.study import DEFAULT_ACCEPTANCE

if TYPE_CHECKING:
    from pipeinfer.job.launch.start import Crew


def plan_report(planner: Planner) -> dict[str, Any]:
    """`shortage`: what is missing, with the nearest ways out; empty if it fits. Raises UserError for no possible
    plan."""
    options, deployment = planner.options, planner.deployment
    predicted, unknown = _predictions(planner)
    helping = suggestions(planner, predicted)
    plain = next((each.tokens_per_s for each in predicted if each.policy == "iterative"), None)
    return {
        "model": str(options.model),
        "drafts": [str(draft.path) for draft in planner.drafts_in_use],
        "policy": options.policy.name,
        "n_ctx": planner.n_ctx,
        "prompt_n": planner.n_prompt,
        "numerics": options.numerics,
        "wire_type": str(options.wire_type),
        "link": {"bytes_per_s": planner.link.bytes_per_s, "latency_s": planner.link.latency_s},
        "acceptance": list(planner.acceptances) or [DEFAULT_ACCEPTANCE] * len(planner.drafts),
        "fits": not planner.shortage,
        "shortage": shortage_text(planner, helping),
        "layer_split": [stage.last - stage.first for stage in deployment.plan.stages],
        "ranks": plan_rows(deployment, planner.nodes),
        "predictions": [
            asdict(each)
            | {
                "planned": each.policy == options.policy.name,
                "over_iterative": each.tokens_per_s / plain if plain else None,
            }
            for each in predicted
        ],
        "not_predicted": unknown,
        "ways": [way.as_data() for way in helping],
        "warnings": [*_translations(planner), *deployment.warnings],
        "notes": list(_notes(planner)),
    }


def _translations(planner: Planner) -> Iterator[str]:
    """Of each draft that has other tokens than the target."""
    for draft in planner.drafts_in_use:
        if note := translation_note(draft.path, draft_translation(planner.info.path, draft.path)):
            yield note


def _predictions(planner: Planner) -> tuple[list[Prediction], dict[str, str]]:
    """Of each policy that the models allow; of each that cannot be predicted, why."""
    chosen = planner.options.policy
    guessing = planner.drafts or planner.options.lookup
    names = [name for name, kind in POLICIES.items() if guessing or not kind.drafts]
    found, unknown = [], {}
    for policy in [chosen if name == chosen.name else make_policy(name, {}) for name in names]:
        try:
            found.append(planner.predict(policy))
        except UserError as error:
            unknown[policy.name] = str(error)
    return found, unknown


def _notes(planner: Planner) -> Iterator[str]:
    """What the figures leave out."""
    are_timed = all(host.speed for host in planner.deployment.hosts)
    if not planner.is_described:
        yield "predictions are estimates by how fast each host reads and multiplies; `measure` times the models there"
    if any(backend.is_torch for backend in planner.options.backend) and not are_timed:
        yield "predictions take ranks of torch to be as fast as libllama"
    if any(planner.options.n_gpu_layers):
        untimed = "" if are_timed else ", and predictions know the speed of CPUs only"
        yield f"what a GPU's driver takes there is not counted, nor what torch does{untimed}"
    if any("_exps" in tensor.name for tensor in planner.info.tensors):
        yield "predictions read the experts of one row: guesses, of which each has experts of its own, are dearer"
    if planner.may_split_otherwise:
        yield "layers go by size; `run` times them on ranks that are not alike, and may split them otherwise"


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is asked besides the options of `run`: the hosts (a hosts file or a profile, and how many ranks of it;
    neither: the ranks that are there), their links, the prompt (None: one that fits) and how often drafts are right."""

    heading = "Hosts"
    hosts: Path | None = setting(
        None, "--hosts", type=File(),
        help="Plan for these hosts: an MPI hosts file, where a line may also say what a host has, see above; as in "
        "node1 slots=1 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325.")  # fmt: skip
    profile: str | None = setting(
        None, "--profile", type=Text(),
        help="Plan for a profile's machines (see `simulate --list`), a rank on each.")  # fmt: skip
    n_ranks: int = setting(0, "--ranks", "-np", help="Ranks of --hosts or --profile. [default: all]")
    gbit: float | None = setting(
        None, "--gbit", type=Number(0, MAX_GBIT, above=True), help="Bandwidth of the links. [default: 10, or known]"
    )
    n_prompt: int | None = setting(
        None, "--prompt-tokens", "-p", type=Whole(1, MAX_TOKENS),
        help="Of the longest prompt. [default: 128, or half of the context where that is less]")  # fmt: skip
    acceptances: tuple[float, ...] = setting(
        (), "--acceptance", type=PROBABILITY, repeated=True,
        help="How often the draft's best guess is right; of several drafts, once for each, the smallest first. "
        "[default: 0.7; `models check` measures it]")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Settings:
    """What every rank must have been started with."""

    options: RunOptions
    question: PlanQuestion


def plan(options: RunOptions, question: PlanQuestion) -> int:
    """Returns the exit code. Raises UserError, also for what does not fit, with the plan printed."""
    if question.profile or question.hosts:
        return tell(options, question, *_described(question))
    if not is_launched():
        from pipeinfer.job.profiling.hosts import describe_own  # what it loads with takes a while

        options = fetch_models(options)
        alone = [describe_own(options, [this_host(socket.gethostname())], 0)]
        return tell(options, question, with_speeds([own_speed(alone, 0)], alone, [gpu_names()]), ETHERNET)
    from pipeinfer.job.launch.start import start_job  # initialises MPI

    return start_job(lambda crew: _plan_ranks(crew, options, question), _Settings(options, question), options)


def _described(question: PlanQuestion) -> tuple[list[Node], LinkCost]:
    if question.profile:
        file = load_profile(question.profile)
        return first_ranks(profiled_nodes(file), question.n_ranks, f"profile {file.name}"), file.link()
    assert question.hosts
    return first_ranks(read_hosts(question.hosts), question.n_ranks, f"--hosts {question.hosts}"), ETHERNET


def _plan_ranks(crew: "Crew", options: RunOptions, question: PlanQuestion) -> int:
    """On every rank. Returns the exit code."""
    from pipeinfer.job.profiling.hosts import find_hosts  # what it loads with takes a while

    link = crew.link
    speeds = known_speeds(link, crew.hosts)
    gpus = link.all_gather(gpu_names())
    cost = replace(ETHERNET, bytes_per_s=1e9 / 8 * bandwidth_gbit(link)) if link.size > 1 else ETHERNET
    options, hosts = find_hosts(crew, options)
    return link.agree(lambda: tell(options, question, with_speeds(speeds, hosts, gpus), cost))


def tell(options: RunOptions, question: PlanQuestion, nodes: Sequence[Node], link: LinkCost) -> int:
    """Print the plan; returns the exit code. Raises UserError where it does not fit."""
    if question.gbit is not None:
        link = replace(link, bytes_per_s=1e9 / 8 * question.gbit)
    options = fetch_models(options)
    info, tokenizer = open_models(options)
    tokenizer.close()
    is_described = bool(question.profile or question.hosts)
    n_prompt = question.n_prompt or min(N_PROMPT, max(1, (options.ctx_size or info.n_ctx_train) // 2))
    planner = open_planner(options, info, nodes, link, n_prompt, question.acceptances, is_described)
    found = plan_report(planner)
    print(json_text(found) if options.json else "\n".join(plan_lines(found)), flush=True)
    if not found["fits"]:
        raise UserError(found["shortage"])
    return 0
