"""The plan that `run` would make on some nodes, its costs, and its predicted speed. Loads, times and prints nothing."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from pipeinfer.cluster.assignment import StagePlan
from pipeinfer.cluster.hosts.host import Host, LayerSpeed, sharers
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import DevicePlan, plan_devices
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import choose_numerics, schedule_of
from pipeinfer.job.planning.fit import PlanInputs, fit
from pipeinfer.job.requests.request import fit_context, least_context
from pipeinfer.models.gguf.header import value_of
from pipeinfer.models.gguf.layers import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.llama.tensor_places import HOST
from pipeinfer.policies import Auto, Iterative
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile
from pipeinfer.virtual.nodes import Node
from pipeinfer.virtual.profile import Machine, Model
from pipeinfer.virtual.study import Study

N_PROMPT = 128  # tokens of a prompt whose length is unknown
ETHERNET = LinkCost(latency_s=50e-6, bytes_per_s=10e9 / 8)  # of links without a description: 10 Gbit/s
N_SIMULATED = 128  # tokens of a simulated text
HEAD = HeadCost(run_s=200e-6, verdict_s=200e-6, draft_s=80e-6)  # our engine on rank 0, an estimate
EXPERTS = ("used_count", "count")

UNFIT = "its plan does not fit"  # a reason why no speed of a policy is predicted


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a text under a policy. `limit_per_s`: see `Profile`."""

    policy: str
    tokens_per_s: float
    limit_per_s: float
    ttft_s: float
    itl_p50_s: float


@dataclass(frozen=True)
class Planner:
    """`drafts`: the headers of all that are given, the smallest first. `acceptances`: how often each one's best guess
    is right; empty: the default of `simulate`. `is_described`: speeds are from the nodes' description."""

    options: RunOptions
    info: ModelInfo
    drafts: Sequence[ModelInfo]
    nodes: Sequence[Node]
    link: LinkCost
    n_prompt: int
    acceptances: Sequence[float] = ()
    is_described: bool = False

    def __post_init__(self) -> None:
        """Raises UserError when `acceptances` are not one for each draft."""
        if self.acceptances and len(self.acceptances) != len(self.drafts):
            counts = f"{len(self.acceptances)} times for {len(self.drafts)} drafts"
            way_out = "give it once for each, the smallest first, or leave it out"
            raise UserError(f"--acceptance is given {counts}; {way_out}")

    def changed(self, **changes: Any) -> "Planner":
        return replace(self, options=self.options.changed(**changes))

    @property
    def drafts_in_use(self) -> Sequence[ModelInfo]:
        return self.drafts if self.options.speculation.policy.drafts else ()

    @property
    def n_ctx(self) -> int:
        """That is asked for. Raises UserError when the prompt does not fit."""
        context = self.options.context
        return fit_context(context.ctx_size, context.predict, self.info, self.n_prompt)[0]

    @cached_property
    def plan(self) -> JobPlan:
        """The plan, also if memory is too small. Raises UserError for splits and threads that do not fit the ranks."""
        timed = [node.host for node in self.nodes]
        hosts = self._described if self.is_described else timed
        context, n_ctx, n_prompt = self.options.context, self.n_ctx, self.n_prompt
        n_least = least_context(context, n_ctx, n_prompt)
        inputs = PlanInputs(self.options, hosts, self.info, self.drafts_in_use, n_ctx, n_prompt, n_least)
        plan, tried = fit(inputs, choose_numerics)
        return replace(plan, notes=(*plan.notes, tried)) if tried else plan

    @property
    def _described(self) -> list[Host]:
        """The hosts with speeds of their descriptions."""
        hosts, parts = [node.host for node in self.nodes], list[float]()
        if any(node.gpu_machine for node in self.nodes):
            devices = plan_devices(self.options.placement, hosts)
            parts = [part_on_gpus(self.info, each.target, 0, self.info.n_layer) for each in devices]
        return with_described_speeds(self.nodes, self.info, parts)

    @property
    def may_split_otherwise(self) -> bool:
        """Whether `run` would time ranks, because they differ and their speeds are unknown."""
        hosts = self.plan.hosts
        if not (schedule := schedule_of(self.options, hosts)):
            return False
        has_kinds = len({schedule.kinds[rank] for rank in schedule.ranks}) > 1
        return has_kinds and any(hosts[rank].speed is None for rank in schedule.ranks)

    def lay_out(self, has_draft: bool) -> Profile:
        """The costs of the plan; without a draft its rank has layers too, as in `run`."""
        planner = self if has_draft or not self.drafts_in_use else self.changed(policy=Iterative())
        return planned_profile(planner.plan, self.info, planner.drafts_in_use, self.nodes, self.link)

    def predict(self, policy: Policy) -> Prediction:
        """Simulate a text under a copy of the policy; without a draft `auto` finds nothing to look up in it. Raises
        UserError where it cannot be simulated, or its plan does not fit."""
        # a split has a part for each stage, and without drafts there are more
        options, speculation = self.options, self.options.speculation
        alike = not self.drafts or policy.drafts == speculation.policy.drafts
        planner = self.changed(policy=policy, layer_split=options.placement.layer_split if alike else None)
        if planner.plan.shortage:
            raise UserError(UNFIT)
        if policy.drafts and not self.drafts and not isinstance(policy, Auto):
            raise UserError("guesses by --lookup are not simulated")
        by_rank = [ranks_for(share) for share in self.acceptances if policy.drafts]
        study = Study(planner.lay_out, N_SIMULATED, self.n_prompt, by_rank, speculation.cancel, speculation.partitions)
        simulated, result = study.generate(deepcopy(policy) if self.drafts else Iterative())
        timings, limit = result.data["timings"], simulated.profile.limit_per_s(self.n_prompt)
        speed = timings["predicted_per_second"]
        return Prediction(policy.name, speed, limit, timings["ttft_s"], timings["itl_p50_s"])

    @property
    def speed(self) -> float | None:
        """Tokens a second; None: unknown."""
        try:
            return self.predict(self.options.speculation.policy).tokens_per_s
        except UserError:
            return None


# -- costs


def planned_profile(
    plan: JobPlan, info: ModelInfo, drafts: Sequence[ModelInfo], nodes: Sequence[Node], link: LinkCost
) -> Profile:
    """The costs of a plan. `info`, `drafts`: of its models. Raises UserError for what virtual time does not know: a
    rank that has target and draft, a draft that is cut, a host of unknown speed."""
    assignment, machines, numerics = plan.assignment, machines_of(plan, info, nodes), plan.numerics
    if assignment.n_ranks == 1 and assignment.drafts:
        raise UserError("a lone rank computes target and draft in turns, which is not simulated")
    if max(assignment.draft_split, default=1) > 1:
        raise UserError("a draft on several ranks is not simulated")
    target = model_of(info, numerics.cache)

    def cost(part: StagePlan, model: Model) -> ModelCost:
        return machines[part.rank].slice_of(model, part.last - part.first, part.last == model.layers)

    return Profile(
        name="the plan",
        n_embd=target.n_embd,
        stages=tuple(cost(stage, target) for stage in assignment.stages),
        drafts=tuple(
            cost(part, model_of(draft, numerics.draft_cache))
            for draft, (part,) in zip(drafts, assignment.drafts, strict=True)
        ),
        link=link,
        head=HEAD,
        head_is_first=assignment.stages[0].rank == 0,
        sleeps=True,
        blocks=numerics.blocks,
        parked=numerics.parked,
        wire_type=numerics.wire_type,
    )


def model_of(info: ModelInfo, cache: CacheTypes = F16_CACHE) -> Model:
    """What a row reads and computes, of experts those that one row uses."""
    end = info.n_layer
    if info.head and info.head.is_mtp:
        (end,) = (number + 1 for number in info.head.target_layers)  # its layer has its number in the target
    parts = [tensor for tensor in info.tensors if (layer := layer_of(tensor.name)) is not None and layer < end]
    shares = [_share_read(info, tensor.name) for tensor in parts]
    n_bytes = sum(part.n_bytes * share for part, share in zip(parts, shares, strict=True))
    n_params = sum(part.n_elements * share for part, share in zip(parts, shares, strict=True))
    head = info.tensor("output.weight") or info.tensor("token_embd.weight")
    assert head is not None, "read_model_info wants a token table"
    n, kv_bytes = info.n_layer, sum(cache.cell_bytes(info.kv_shapes))
    ends = info.output_bytes, head.n_elements
    return Model(info.name, n, info.n_embd, n_bytes / n, n_params / n, *ends, kv_bytes / n)


def _share_read(info: ModelInfo, name: str) -> float:
    """The part of a tensor that a row reads: of experts those that it uses."""
    if "_exps" not in name:
        return 1.0
    n_used, n_experts = (value_of(info.metadata, f"{info.architecture}.expert_{key}", 0) for key in EXPERTS)
    return min(1.0, n_used / n_experts) if n_used and n_experts > 0 else 1.0


@lru_cache(maxsize=1 << 12)  # a planner asks for every way to move experts
def part_on_gpus(info: ModelInfo, device: DevicePlan, first: int, last: int) -> float:
    """The part of what a row reads in layers [first, last) that is on a rank's GPUs."""
    first_on_gpu = last - device.n_on_gpus(last - first)
    on_gpu = total = 0.0
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is not None and first <= layer < last:
            where = device.places.tensor_device(tensor.name, first)
            n_bytes = tensor.n_bytes * _share_read(info, tensor.name)
            total += n_bytes
            on_gpu += n_bytes * (where != HOST if where else layer >= first_on_gpu)
    return on_gpu / total


def machines_of(plan: JobPlan, info: ModelInfo, nodes: Sequence[Node]) -> list[Machine]:
    """Each rank's share of its host, all of whose ranks compute, as fast as a row was in the layers of `info` where
    these were timed. Raises UserError when some speed is not known."""
    machines, model, stages = [], model_of(info), {stage.rank: stage for stage in plan.assignment.stages}
    for rank, node in enumerate(nodes):
        stage, planned = stages.get(rank), plan.ranks[rank]
        on_gpus = part_on_gpus(info, planned.target, stage.first, stage.last) if stage else planned.draft.uses_gpus
        machine = node.with_layers_on_gpus(float(on_gpus))
        if machine is None:
            way_out = "give gb_per_s and gflop_per_s in the hosts file"
            raise UserError(f"the speed of {node.host.name} is not known; {way_out}")
        share = _slowed(machine, sharers(plan.hosts, plan.assignment.computing, rank))
        if speed := node.host.speed:
            factor = speed.layer_s(info.layer_bytes) / share.slice_of(model, 1, True).layer.at(1)
            share = _slowed(replace(share, layer_s=share.layer_s * factor), factor)
        machines.append(share)
    return machines


def with_described_speeds(nodes: Sequence[Node], info: ModelInfo, parts: Sequence[float] = ()) -> list[Host]:
    """The hosts with speeds of layers from their description. All ranks of a host are taken to compute. `parts`: of
    each rank as in `part_on_gpus`, where speeds of GPUs are known."""
    model, hosts = model_of(info), [node.host for node in nodes]
    mean_bytes = sum(info.layer_bytes) / info.n_layer  # all experts': the planner knows no others

    def speed(rank: int, node: Node) -> LayerSpeed | None:
        machine = node.with_layers_on_gpus(parts[rank]) if parts else node.machine
        if machine is None:
            return None
        share = sharers(hosts, frozenset(range(len(nodes))), rank)
        cost = _slowed(machine, share).slice_of(model, 1, True)
        return LayerSpeed(cost.layer.at(1) / mean_bytes, cost.output.at(1), node.source)

    return [replace(node.host, speed=speed(rank, node)) for rank, node in enumerate(nodes)]


def _slowed(machine: Machine, factor: float) -> Machine:
    """The share of one of `factor` ranks."""
    return replace(machine, bytes_per_s=machine.bytes_per_s / factor, flop_per_s=machine.flop_per_s / factor)
