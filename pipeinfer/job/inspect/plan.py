"""`pipeinfer plan`: for described hosts, without MPI; else for the hosts of its ranks, on all of them."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.hosts.host import Host, this_host
from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.hosts.roster import bandwidth_gbit
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.doctor.checks import models
from pipeinfer.job.doctor.findings import Cluster, Finding, HostReport, Severity, problems
from pipeinfer.job.doctor.host_list import HostList
from pipeinfer.job.inspect.host_facts import model_facts
from pipeinfer.job.options.limits import MAX_GBIT, MAX_TOKENS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import PROBABILITY, File, Number, TextType, Whole
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.placement.job_plan import SHARED_CORES
from pipeinfer.job.placement.numerics import may_repack
from pipeinfer.job.planning.plan_table import plan_cells, plan_rows
from pipeinfer.job.planning.planner import ETHERNET, N_PROMPT, UNFIT, Planner, Prediction
from pipeinfer.job.planning.prepare import find_hosts, with_files, with_trained_context, without_gpus
from pipeinfer.job.planning.suggestions import shortage_text, suggestions, with_best_hosts
from pipeinfer.job.profiling.describe import describe_host, gpu_names
from pipeinfer.job.profiling.speeds import host_speeds, rank_speed, with_speeds
from pipeinfer.models.drafts.head_files import read_drafts
from pipeinfer.models.drafts.translation import draft_translation, translation_note
from pipeinfer.models.llama.ggml import has_gpu
from pipeinfer.policies import POLICIES, make_policy
from pipeinfer.text import json_text, markdown_table, number, printed, size_text
from pipeinfer.virtual.costs import LinkCost
from pipeinfer.virtual.nodes import Node, first_ranks, profiled_nodes, read_hosts
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.study import DEFAULT_ACCEPTANCE

if TYPE_CHECKING:
    from pipeinfer.job.launch import Crew

WORDS = ("host", "GPU", "backend", "device", "speed from", "a layer", "role", "layers")  # columns of text, aligned left


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Hosts, links and text, beside the options of `run`. Neither `hosts` nor `profile`: the hosts of the ranks.

    hosts: Plan for these hosts: an MPI hosts file, where a line may also say what a host has, see above; as in node1
        slots=1 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325.
    profile: Plan for a profile's machines (see `simulate --list`), a rank on each.
    n_ranks: Ranks of --hosts or --profile. [default: all that can be used]
    gbit: Bandwidth of the links. [default: 10, or known]
    n_prompt: Of the longest prompt. [default: 128, or half of the context where that is less]
    acceptances: How often the draft's best guess is right; of several drafts, once for each, the smallest first.
        [default: 0.7; `models check` measures it]
    """

    heading = "Hosts"
    hosts: Path | None = setting(None, "--hosts", type=File())
    profile: str | None = setting(None, "--profile", type=TextType())
    n_ranks: int | None = setting(None, "--ranks", "-np", type=Whole(1))
    gbit: float | None = setting(None, "--gbit", type=Number(0, MAX_GBIT, above=True))
    n_prompt: int | None = setting(None, "--prompt-tokens", "-p", type=Whole(1, MAX_TOKENS))
    acceptances: tuple[float, ...] = setting((), "--acceptance", type=PROBABILITY, repeated=True)


def plan_report(
    options: RunOptions, nodes: Sequence[Node], link: LinkCost, question: PlanQuestion | None = None
) -> dict[str, Any]:
    """Plain data; without a question, as from `doctor`, the nodes are described hosts. `shortage`: what is missing,
    with the nearest ways out; empty if it fits. Raises UserError if no plan is possible."""
    has_description = question is not None and bool(question.profile or question.hosts)
    is_described = question is None or has_description
    question = question or PlanQuestion()
    info, _, tokenizer = open_models(options)
    tokenizer.close()
    ignored = ""
    if not has_description:  # the hosts themselves say what they have
        options, ignored = without_gpus(options, lambda: [node.host.offloads for node in nodes])
    options = with_trained_context(options, info)
    drafts = read_drafts(options.models.drafts, info)  # also those that another policy needs
    n_prompt = question.n_prompt or min(N_PROMPT, max(1, (options.context.ctx_size or info.n_ctx_train) // 2))
    if question.gbit is not None:
        link = replace(link, bytes_per_s=1e9 / 8 * question.gbit)
    planner = Planner(options, info, drafts, nodes, link, n_prompt, question.acceptances, is_described)
    chooses_hosts = bool(question.hosts) and not question.n_ranks and not options.placement.layer_split
    planner, unused = with_best_hosts(planner) if chooses_hosts else (planner, [])
    plan, policy = planner.plan, options.speculation.policy.name
    predicted, not_predicted = _predict(planner)
    ways, paths = suggestions(planner, predicted), [draft.path for draft in planner.drafts_in_use if not draft.head]
    translations = [translation_note(path, draft_translation(info.path, path)) for path in paths]
    plain = next((each.tokens_per_s for each in predicted if each.policy == "iterative"), None)
    return {
        "model": str(options.models.target),
        "drafts": [str(draft.path) for draft in planner.drafts_in_use],
        "policy": policy,
        "n_ctx": plan.capacity.n_ctx,
        "prompt_n": planner.n_prompt,
        "numerics": options.numerics.numerics,
        "numerics_name": plan.numerics.name,
        "wire_type": str(options.numerics.wire_type),
        "link": {"bytes_per_s": planner.link.bytes_per_s, "latency_s": planner.link.latency_s},
        "acceptance": list(planner.acceptances) or [DEFAULT_ACCEPTANCE] * len(planner.drafts),
        "fits": not planner.plan.shortage,
        "shortage": shortage_text(planner, ways),
        "layer_split": [stage.last - stage.first for stage in plan.assignment.stages],
        "ranks": plan_rows(plan, planner.nodes),
        "plan": plan.decisions,
        "plan_hash": plan.hash,
        "predictions": [
            asdict(each) | {"planned": each.policy == policy, "over_iterative": plain and each.tokens_per_s / plain}
            for each in predicted
        ],
        "not_predicted": not_predicted,
        "ways": [way.as_data() for way in ways],
        "warnings": [*filter(None, [ignored, *translations]), *plan.warnings, *unused],
        "notes": [*_notes(planner), *_prompt_note(planner, bool(question.n_prompt))],
    }


def _predict(planner: Planner) -> tuple[list[Prediction], dict[str, str]]:
    """Predictions for the policies that the models allow, and the reason for each policy that has none."""
    chosen = planner.options.speculation.policy
    has_guesses = planner.drafts or planner.options.speculation.lookup
    names = [name for name, kind in POLICIES.items() if has_guesses or not kind.drafts or name == chosen.name]
    predictions, not_predicted = [], {}
    for policy in [chosen if name == chosen.name else make_policy(name, {}) for name in names]:
        try:
            predictions.append(planner.predict(policy))
        except UserError as error:
            not_predicted[policy.name] = str(error)
    return predictions, not_predicted


def _notes(planner: Planner) -> Iterator[str]:
    """What the predictions leave out."""
    are_timed = all(host.speed for host in planner.plan.hosts)
    if not planner.is_described:
        yield "predictions are estimates by how fast each host reads and multiplies; `measure` times the models there"
    if planner.plan.crowding > 1:
        yield SHARED_CORES
    if planner.is_described and planner.plan.numerics.repacked:
        yield "the hosts' processors are taken to repack weights as this host's does"
    if any(backend.is_torch for backend in planner.options.placement.backend) and not are_timed:
        yield "predictions take ranks of torch to be as fast as libllama"
    if any(planner.options.placement.n_gpu_layers):
        untimed = "" if are_timed else ", and predictions know the speed of CPUs only"
        yield f"what a GPU's driver takes there is not counted, nor what torch does{untimed}"
    if any("_exps" in tensor.name for tensor in planner.info.tensors):
        yield "predictions read the experts of one row: guesses, of which each has experts of its own, are dearer"
    if planner.may_split_otherwise:
        yield "layers go by size; `run` times them on ranks that are not alike, and may split them otherwise"


NOTED = 1.05  # times as much memory as planned that longer prompts must take to be worth a note


def _prompt_note(planner: Planner, is_asked: bool) -> Iterator[str]:
    """What `chat` takes, which plans for prompts as long as the context, unless the user gave a prompt's length."""
    n_ctx = planner.plan.capacity.n_ctx
    if is_asked or planner.plan.shortage or n_ctx <= planner.n_prompt + 1:
        return
    longest = replace(planner.changed(ctx_size=n_ctx, predict=1, fit=False), n_prompt=n_ctx - 1)
    planned, needed = (sum(memory.total for memory in each.plan.memory) for each in (planner, longest))
    if needed > NOTED * planned:
        yield (
            f"memory is for a prompt of {planner.n_prompt} tokens (-p); with prompts as long as the context, as in "
            f"chat, all ranks take {size_text(needed)} in place of {size_text(planned)}"
        )


# -- text


def plan_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `plan_report`."""
    drafts = f", drafts {', '.join(report['drafts'])}" if report["drafts"] else ""
    wire = "" if report["wire_type"] == "f32" else f", activations travel as {report['wire_type']}"
    how = f"policy {report['policy']}, context {report['n_ctx']}, numerics {report['numerics_name']}{wire}"
    yield f"{report['model']}{drafts}: {how}"
    yield ""
    columns, cells = plan_cells(report["ranks"])
    yield from markdown_table(columns, cells, [column for column in columns if column not in WORDS])
    yield ""
    if report["predictions"]:
        yield from _prediction_lines(report)
        yield ""
    reasons = report["not_predicted"]
    for reason in dict.fromkeys(reason for reason in reasons.values() if reason != UNFIT):  # the error says that anyway
        yield f"not predicted: {', '.join(policy for policy in reasons if reasons[policy] == reason)}: {reason}"
    yield from (f"helps: {_way(way)}" for way in report["ways"])
    yield from (f"note: {note}" for note in (*report["warnings"], *report["notes"]))


def _prediction_lines(report: Mapping[str, Any]) -> Iterator[str]:
    link = report["link"]
    assumed = ", ".join(number(share) for share in report["acceptance"])
    links = f"{8e-9 * link['bytes_per_s']:.3g} Gbit/s and {1e6 * link['latency_s']:.3g} us"
    acceptance = f", acceptance {assumed}" if assumed else ""
    yield f"Predicted for a prompt of {report['prompt_n']} tokens, links of {links}{acceptance}:"
    yield ""
    is_lookup = not report["drafts"] and report["policy"] != "iterative"
    planned = f" (planned{'; what it looks up is not counted' * is_lookup})"
    rows = [
        [
            f"{row['policy']}{planned if row['planned'] else ''}",
            number(row["tokens_per_s"]),
            "-" if row["over_iterative"] is None else number(row["over_iterative"]),
            number(row["limit_per_s"]),
            *(number(1e3 * row[name], 1) for name in ("ttft_s", "itl_p50_s")),
        ]
        for row in report["predictions"]
    ]
    columns = ["policy", "tokens/s", "over iterative", "limit", "TTFT ms", "ITL ms p50"]
    yield from markdown_table(columns, rows, columns[1:])


def _way(way: Mapping[str, Any]) -> str:
    if not way["fits"]:
        return f"{way['what']}: then {size_text(way['short_bytes'])} are missing"
    speed = way["tokens_per_s"]
    return f"{way['what']}: it fits" if speed is None else f"{way['what']}: {number(speed)} tokens/s"


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings that all ranks must share."""

    options: RunOptions
    question: PlanQuestion


def plan(options: RunOptions, question: PlanQuestion) -> int:
    """Returns the exit code. Raises UserError, also if the plan, which is printed, does not fit."""
    settings = _Settings(options, question)
    if question.profile or question.hosts:
        nodes, link = _described(question)
        nodes = _like_this_host(nodes, may_repack(options.numerics))
        return _report(replace(settings, options=with_files(options, len(nodes))), nodes, link)
    if not is_launched():
        options = with_files(options, 1)
        hosts = [describe_host(options, [this_host(socket.gethostname())], 0)]
        nodes = with_speeds([rank_speed(hosts, 0)], hosts, [gpu_names()])
        return _report(replace(settings, options=options), nodes, ETHERNET)
    from pipeinfer.job.launch import start_job  # initialises MPI

    return start_job(lambda crew: _plan_ranks(crew, settings), settings, options.placement, options.output.verbose)


def _described(question: PlanQuestion) -> tuple[list[Node], LinkCost]:
    if question.profile:
        file = load_profile(question.profile)
        return first_ranks(profiled_nodes(file), question.n_ranks, f"profile {file.name}"), file.link()
    assert question.hosts
    return first_ranks(read_hosts(question.hosts), question.n_ranks, f"--hosts {question.hosts}"), ETHERNET


def _like_this_host(nodes: Sequence[Node], repacks: bool) -> list[Node]:
    """Described nodes, with the processors and builds of this host. `repacks`: see `may_repack`."""
    from pipeinfer.models.llama.repacking import grouped_types, repacked_types  # imports take long

    here: dict[str, Any] = {"offloads": has_gpu()}
    if repacks:
        here |= {"repacked": repacked_types(), "grouped": grouped_types()}
    return [replace(node, host=replace(node.host, **here)) for node in nodes]


def _plan_ranks(crew: "Crew", settings: _Settings) -> int:
    link = crew.link
    speeds = host_speeds(link, crew.hosts)
    gpus = link.all_gather(gpu_names())
    cost = replace(ETHERNET, bytes_per_s=1e9 / 8 * bandwidth_gbit(link)) if link.size > 1 else ETHERNET
    options = link.agree(lambda: with_files(settings.options, link.size))
    settings, hosts = replace(settings, options=options), find_hosts(crew, options)
    files, nodes = link.all_gather(model_facts(options.models)), with_speeds(speeds, hosts, gpus)
    return link.agree(lambda: _report(settings, nodes, cost, _compare(options, hosts, files)))


def _compare(options: RunOptions, hosts: Sequence[Host], files: Sequence[dict[str, Any]]) -> list[Finding]:
    """Hosts that lack a model's file, or have another one. `files`: the facts of each rank."""
    reports = dict[str, HostReport]()
    for rank, (host, facts) in enumerate(zip(hosts, files, strict=True)):
        reports.setdefault(host.name, HostReport(host.name, rank == 0, facts={"version": "", "models": facts}))
    cluster = Cluster(HostList(list(map(Node, hosts)), "mpich"), options, reports)
    return [finding for report in reports.values() for finding in problems((models,), report, cluster)]


def _report(settings: _Settings, nodes: Sequence[Node], link: LinkCost, findings: Sequence[Finding] = ()) -> int:
    """Print the plan; returns 0. Raises UserError if it does not fit, or hosts have other models."""
    report = plan_report(settings.options, nodes, link, settings.question)
    lines = [f"{each.host}: {each.text} -> {each.fix}" for each in findings]
    report["warnings"] += lines
    print(json_text(report) if settings.options.output.json else printed(plan_lines(report)), flush=True)
    if not report["fits"]:
        raise UserError(report["shortage"])
    for finding, line in zip(findings, lines, strict=True):
        if finding.level is Severity.ERROR:
            raise UserError(line)
    return 0
