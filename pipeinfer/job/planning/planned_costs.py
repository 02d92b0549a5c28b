"""A plan on known machines -> costs of its stages, drafts and links. Times nothing."""

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.assignment import StagePlan
from pipeinfer.cluster.hosts.cores import Host, sharers
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.timing.costs import HeadCost, LinkCost, ModelCost, Profile
from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.virtual.nodes import Node
from pipeinfer.virtual.profile import Machine, Model

HEAD = HeadCost(run_s=200e-6, verdict_s=200e-6, draft_s=80e-6)
"""Our engine's own work on rank 0; an estimate, as in the shipped profiles."""


def model_of(info: ModelInfo, cache: CacheTypes = F16_CACHE) -> Model:
    """What a row reads and computes, of experts those that one row uses."""
    used = _share_of_experts(info)
    end = info.n_layer
    if info.head and info.head.own:
        (end,) = (number + 1 for number in info.head.target_layers)  # its layer has its number in the target
    parts = [tensor for tensor in info.tensors if (layer := layer_of(tensor.name)) is not None and layer < end]
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


def machines_of(plan: JobPlan, info: ModelInfo, nodes: Sequence[Node]) -> list[Machine]:
    """Of each rank its share of its host, whose ranks all compute, as fast as a row was in the layers of `info` where
    these were timed there. Raises UserError when some speed is not known."""
    found, model = [], model_of(info)
    for rank, node in enumerate(nodes):
        if node.machine is None:
            raise UserError(
                f"the speed of {node.host.name} is not known; give gb_per_s and gflop_per_s in the hosts file"
            )
        own = _slowed(node.machine, sharers(plan.hosts, plan.assignment.computing, rank))
        speed = node.host.speed
        if speed:
            factor = speed.layer_s(info.layer_bytes) / own.slice_of(model, 1, True).layer.at(1)
            own = _slowed(replace(own, layer_s=own.layer_s * factor), factor)
        found.append(own)
    return found


def with_described_speeds(nodes: Sequence[Node], info: ModelInfo) -> list[Host]:
    """The hosts with speeds of layers from their description. All ranks of a host are taken to compute."""
    model, hosts = model_of(info), [node.host for node in nodes]
    mean_bytes = sum(info.layer_bytes) / info.n_layer  # all experts': the planner knows no others

    def speed(rank: int, node: Node) -> LayerSpeed | None:
        if node.machine is None:
            return None
        share = sharers(hosts, frozenset(range(len(nodes))), rank)
        cost = _slowed(node.machine, share).slice_of(model, 1, True)
        return LayerSpeed(cost.layer.at(1) / mean_bytes, cost.output.at(1), node.source)

    return [replace(node.host, speed=speed(rank, node)) for rank, node in enumerate(nodes)]


def _slowed(machine: Machine, factor: float) -> Machine:
    """What one of so many ranks there has of it."""
    return replace(machine, bytes_per_s=machine.bytes_per_s / factor, flop_per_s=machine.flop_per_s / factor)


def planned_profile(
    plan: JobPlan, info: ModelInfo, drafts: Sequence[ModelInfo], nodes: Sequence[Node], link: LinkCost,
    cache: CacheTypes = F16_CACHE, draft_cache: CacheTypes = F16_CACHE,
) -> Profile:  # fmt: skip
    """What it costs; `info`, `drafts`: of its models; `cache`: of the target.

    Raises UserError for what virtual time does not know: a rank that has target and draft, a draft that is cut, a host
    whose speed nobody knows.
    """
    assignment, machines = plan.assignment, machines_of(plan, info, nodes)
    if assignment.n_ranks == 1 and assignment.drafts:
        raise UserError("a lone rank computes target and draft in turns, which is not simulated")
    if max(assignment.draft_split, default=1) > 1:
        raise UserError("a draft on several ranks is not simulated")
    target = model_of(info, cache)

    def cost(part: StagePlan, model: Model) -> ModelCost:
        return machines[part.rank].slice_of(model, part.last - part.first, part.last == model.layers)

    return Profile(
        name="the plan",
        n_embd=target.n_embd,
        stages=tuple(cost(stage, target) for stage in assignment.stages),
        drafts=tuple(
            cost(own, model_of(draft, draft_cache)) for draft, (own,) in zip(drafts, assignment.drafts, strict=True)
        ),
        link=link,
        head=HEAD,
        head_is_first=assignment.stages[0].rank == 0,
        sleeps=True,
        blocks=plan.numerics.blocks,
        parked=plan.numerics.parked,
    )
