"""`pipeinfer plan`: for hosts that somebody describes, here and now; for those of its own ranks, on all of them."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.hosts.cores import this_host
from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.timing.costs import LinkCost
from pipeinfer.cluster.timing.link_times import bandwidth_gbit
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.plan_report import plan_report
from pipeinfer.job.options.limits import MAX_GBIT, MAX_TOKENS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import PROBABILITY, File, Number, Text, Whole
from pipeinfer.job.placement.gpus import can_offload, gpu_names
from pipeinfer.job.placement.model_files import fetch_models, open_models
from pipeinfer.job.planning.planner import ETHERNET, N_PROMPT, open_planner
from pipeinfer.job.profiling.host_speeds import known_speeds, own_speed, with_speeds
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.observe.texts.plan_text import plan_lines
from pipeinfer.virtual.hosts_file import read_hosts
from pipeinfer.virtual.nodes import Node, first_ranks, profiled_nodes
from pipeinfer.virtual.profile import load_profile

if TYPE_CHECKING:
    from pipeinfer.job.launch.start import Crew


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is asked besides the options of `run`: the hosts (a hosts file or a profile, and how many ranks of it;
    neither: the ranks that are there), their links, the prompt (None: one that fits) and how often drafts are right."""

    heading = "Hosts"
    hosts: Path | None = setting(
        None, "--hosts", type=File(),
        help="Plan for these hosts: an MPI hosts file, where a line may also say what a host has, see above; as in "
        "node1 slots=1 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325.",
    )  # fmt: skip
    profile: str | None = setting(
        None, "--profile", type=Text(),
        help="Plan for a profile's machines (see `simulate --list`), a rank on each.",
    )  # fmt: skip
    n_ranks: int = setting(0, "--ranks", "-np", help="Ranks of --hosts or --profile. [default: all]")
    gbit: float | None = setting(
        None, "--gbit", type=Number(0, MAX_GBIT, above=True), help="Bandwidth of the links. [default: 10, or known]"
    )
    n_prompt: int | None = setting(
        None, "--prompt-tokens", "-p", type=Whole(1, MAX_TOKENS),
        help="Of the longest prompt. [default: 128, or half of the context where that is less]",
    )  # fmt: skip
    acceptances: tuple[float, ...] = setting(
        (), "--acceptance", type=PROBABILITY, repeated=True,
        help="How often the draft's best guess is right; of several drafts, once for each, the smallest first. "
        "[default: 0.7; `models check` measures it]",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Settings:
    """What every rank must have been started with."""

    options: RunOptions
    question: PlanQuestion


def plan(options: RunOptions, question: PlanQuestion) -> int:
    """Returns the exit code. Raises UserError, also for what does not fit, with the plan printed."""
    asked = _Settings(options, question)
    if question.profile or question.hosts:
        nodes, link = _described(question)
        return _tell(asked, _as_here(nodes, options.repack and options.numerics == "exact"), link)
    if not is_launched():
        from pipeinfer.job.profiling.hosts import describe_own  # what it loads with takes a while

        asked = replace(asked, options=fetch_models(options))
        alone = [describe_own(asked.options, [this_host(socket.gethostname())], 0)]
        return _tell(asked, with_speeds([own_speed(alone, 0)], alone, [gpu_names()]), ETHERNET)
    from pipeinfer.job.launch.start import start_job  # initialises MPI

    return start_job(lambda crew: _plan_ranks(crew, asked), asked, options, options.verbose)


def _described(question: PlanQuestion) -> tuple[list[Node], LinkCost]:
    if question.profile:
        file = load_profile(question.profile)
        return first_ranks(profiled_nodes(file), question.n_ranks, f"profile {file.name}"), file.link()
    assert question.hosts
    return first_ranks(read_hosts(question.hosts), question.n_ranks, f"--hosts {question.hosts}"), ETHERNET


def _as_here(nodes: Sequence[Node], may_repack: bool) -> list[Node]:
    """Nodes that somebody describes, whose processors and builds are taken to be this host's. `may_repack`: weights,
    with exact numerics."""
    from pipeinfer.models.llama.repacking import grouped_types, repacked_types  # what it loads with takes a while

    here: dict[str, Any] = {"offloads": can_offload()}
    if may_repack:
        here |= {"repacked": repacked_types(), "grouped": grouped_types()}
    return [replace(node, host=replace(node.host, **here)) for node in nodes]


def _plan_ranks(crew: "Crew", asked: _Settings) -> int:
    """On every rank. Returns the exit code."""
    from pipeinfer.job.profiling.hosts import find_hosts  # what it loads with takes a while

    link = crew.link
    speeds = known_speeds(link, crew.hosts)
    gpus = link.all_gather(gpu_names())
    cost = replace(ETHERNET, bytes_per_s=1e9 / 8 * bandwidth_gbit(link)) if link.size > 1 else ETHERNET
    options, hosts = find_hosts(crew, asked.options)
    return link.agree(lambda: _tell(replace(asked, options=options), with_speeds(speeds, hosts, gpus), cost))


def _tell(asked: _Settings, nodes: Sequence[Node], link: LinkCost) -> int:
    """Print the plan; returns the exit code. Raises UserError where it does not fit."""
    question = asked.question
    if question.gbit is not None:
        link = replace(link, bytes_per_s=1e9 / 8 * question.gbit)
    options = fetch_models(asked.options)
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    tokenizer.close()
    is_described = bool(question.profile or question.hosts)
    n_prompt = question.n_prompt or min(N_PROMPT, max(1, (options.ctx_size or info.n_ctx_train) // 2))
    planner = open_planner(options, info, nodes, link, n_prompt, question.acceptances, is_described)
    found = plan_report(planner)
    print(json_text(found) if options.json else "\n".join(plan_lines(found)), flush=True)
    if not found["fits"]:
        raise UserError(found["shortage"])
    return 0
