"""A deployment on known machines -> costs of its stages, drafts and links. Times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.hosts.cores import Host, sharers
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.plan import StagePlan
from pipeinfer.cluster.timing.costs import HeadCost, LinkCost, ModelCost, Profile
from pipeinfer.cluster.timing.slice_times import RankTimes, SliceTimes, slowdowns_beside
from pipeinfer.errors import UserError
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.virtual.nodes import Node
from pipeinfer.virtual.profile import Machine, Model

HEAD = HeadCost(run_s=200e-6, verdict_s=200e-6, draft_s=80e-6)
"""Our engine's own work on rank 0; an estimate, as in the shipped profiles."""


def model_of(info: ModelInfo, cache: CacheTypes = F16_CACHE) -> Model:
    """What a row reads and computes, of experts those that one row uses."""
    used = _share_of_experts(info)
    parts = [tensor for tensor in info.tensors if (layer := layer_of(tensor.name)) is not None and layer < info.n_layer]
    shares = [used if "_exps" in tensor.name else 1.0 for tensor in parts]
    head = info.tensor("output.weight") or info.tensor("token_embd.weight")
    assert head is not None, "read_model_info wants a token table"
    return Model(
        name=info.name,
        layers=info.n_layer,
        n_embd=info.n_embd,
        layer_bytes=sum(part.n_bytes * share for part, share in zip(parts, shares, strict=True)) / info.n_layer,
        layer_params=sum(part.n_elements * share for part, share in zip(parts, shares, strict=True)) / info.n_layer,
        output_bytes=info.output_bytes,
        output_params=head.n_elements,
        kv_bytes=sum(cache.cell_bytes(info.kv_shapes)) / info.n_layer,
    )


def _share_of_experts(info: ModelInfo) -> float:
    used, all_ = (info.metadata.get(f"{info.architecture}.expert_{name}") for name in ("used_count", "count"))
    if used is None or all_ is None or not isinstance(used.value, int) or not isinstance(all_.value, int):
        return 1.0
    return min(1.0, used.value / all_.value) if all_.value > 0 else 1.0


def machines_of(deployment: Deployment, nodes: Sequence[Node]) -> list[Machine]:
    """Of each rank its share of its host, whose ranks all compute. Raises UserError when some speed is not known."""
    found = []
    for rank, node in enumerate(nodes):
        if node.machine is None:
            raise UserError(
                f"nobody knows how fast {node.host.name} is; give gb_per_s and gflop_per_s in the hosts file"
            )
        found.append(_shared(node.machine, sharers(deployment.hosts, deployment.plan.computing, rank)))
    return found


def with_described_speeds(nodes: Sequence[Node], info: ModelInfo) -> list[Host]:
    """The hosts with speeds of layers from their description. All ranks of a host are taken to compute."""
    model, hosts = model_of(info), [node.host for node in nodes]
    mean_bytes = sum(info.layer_bytes) / info.n_layer  # all experts': the planner knows no others

    def speed(rank: int, node: Node) -> LayerSpeed | None:
        if node.machine is None:
            return None
        share = sharers(hosts, frozenset(range(len(nodes))), rank)
        cost = _shared(node.machine, share).slice_of(model, 1, True)
        return LayerSpeed(cost.layer.at(1) / mean_bytes, cost.output.at(1), node.source)

    return [replace(node.host, speed=speed(rank, node)) for rank, node in enumerate(nodes)]


def _shared(machine: Machine, n_ranks: int) -> Machine:
    """What each of so many ranks there has of it."""
    return replace(machine, bytes_per_s=machine.bytes_per_s / n_ranks, flop_per_s=machine.flop_per_s / n_ranks)


def planned_profile(
    deployment: Deployment, info: ModelInfo, drafts: Sequence[ModelInfo], nodes: Sequence[Node], link: LinkCost,
    cache: CacheTypes = F16_CACHE, draft_cache: CacheTypes = F16_CACHE,
) -> Profile:  # fmt: skip
    """What it costs; `info`, `drafts`: of its models; `cache`: of the target.

    Raises UserError for what virtual time does not know: a rank that has target and draft, a draft that is cut, a host
    whose speed nobody knows.
    """
    plan, machines = deployment.plan, machines_of(deployment, nodes)
    if plan.n_ranks == 1 and plan.drafts:
        raise UserError("a lone rank computes target and draft in turns, which is not simulated")
    if max(plan.draft_split, default=1) > 1:
        raise UserError("a draft on several ranks is not simulated")
    target, times = model_of(info, cache), [node.times for node in nodes]

    def cost(part: StagePlan, model: ModelInfo, own: SliceTimes | None) -> ModelCost:
        read = target if model is info else model_of(model, draft_cache)
        estimate = machines[part.rank].slice_of(read, part.last - part.first, part.last == model.n_layer)
        estimate = replace(estimate, host=nodes[part.rank].host.name)
        return own.slice_of(estimate, sum(model.layer_bytes) / model.n_layer, model.output_bytes) if own else estimate

    return Profile(
        name="the plan",
        n_embd=target.n_embd,
        stages=tuple(cost(stage, info, own.target if (own := times[stage.rank]) else None) for stage in plan.stages),
        drafts=tuple(
            cost(own, draft, draft_times(times, number, own.rank))
            for number, (draft, (own,)) in enumerate(zip(drafts, plan.drafts, strict=True))
        ),
        link=link,
        head=HEAD,
        head_is_first=plan.stages[0].rank == 0,
        sleeps=True,
        slowdowns=_slowdowns(deployment, nodes),
        blocks=deployment.blocks,
        parked=deployment.parked,
    )


def draft_times(times: Sequence[RankTimes | None], number: int, rank: int) -> SliceTimes | None:
    """Of a draft on its rank; where another rank timed it, which had it then, by how the two compare at the target."""
    own, other = times[rank], next((each for each in times if each and each.draft_number == number), None)
    if not own or not other or not other.draft:
        return None
    return other.draft.times(own.target.s_per_byte[0] / other.target.s_per_byte[0])


def _slowdowns(deployment: Deployment, nodes: Sequence[Node]) -> dict[str, tuple[float, ...]]:
    """Of each host on which several ranks compute, where its ranks were timed."""
    found: dict[str, tuple[float, ...]] = {}
    for name in {node.host.name for node in nodes}:
        ranks = [rank for rank in sorted(deployment.plan.computing) if nodes[rank].host.name == name]
        timed = [times for rank in ranks if (times := nodes[rank].times)]
        if len(ranks) > 1 and len(timed) == len(ranks):
            threads = [deployment.threads[rank] for rank in ranks]
            found[name] = slowdowns_beside(timed, threads, nodes[ranks[0]].host.n_cores)
    return found
