"""The plan that `run` would make on these nodes, and its predicted speed. Loads no weights, prints nothing."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeinfer.cluster.hosts.cores import Host, sharers
from pipeinfer.cluster.hosts.free_memory import spare_memory
from pipeinfer.cluster.hosts.gpu_memory import spare_on_gpus
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.plan import StagePlan
from pipeinfer.cluster.timing.costs import HeadCost, LinkCost, ModelCost, Profile
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment, lay_out, read_drafts
from pipeinfer.job.profiling.schedule import kinds_of, ranks_to_time
from pipeinfer.job.requests.request import fit_context
from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.observe.texts.plan_text import UNFIT
from pipeinfer.policies import Iterative
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.compare import limit_of
from pipeinfer.virtual.nodes import Node
from pipeinfer.virtual.profile import Machine, Model
from pipeinfer.virtual.study import Question

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


def machines_of(deployment: Deployment, info: ModelInfo, nodes: Sequence[Node]) -> list[Machine]:
    """Of each rank its share of its host, whose ranks all compute, as fast as a row was in the layers of `info` where
    these were timed there. Raises UserError when some speed is not known."""
    found, model = [], model_of(info)
    for rank, node in enumerate(nodes):
        if node.machine is None:
            raise UserError(
                f"nobody knows how fast {node.host.name} is; give gb_per_s and gflop_per_s in the hosts file"
            )
        own = _slowed(node.machine, sharers(deployment.hosts, deployment.plan.computing, rank))
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
    deployment: Deployment, info: ModelInfo, drafts: Sequence[ModelInfo], nodes: Sequence[Node], link: LinkCost,
    cache: CacheTypes = F16_CACHE, draft_cache: CacheTypes = F16_CACHE,
) -> Profile:  # fmt: skip
    """What it costs; `info`, `drafts`: of its models; `cache`: of the target.

    Raises UserError for what virtual time does not know: a rank that has target and draft, a draft that is cut, a host
    whose speed nobody knows.
    """
    plan, machines = deployment.plan, machines_of(deployment, info, nodes)
    if plan.n_ranks == 1 and plan.drafts:
        raise UserError("a lone rank computes target and draft in turns, which is not simulated")
    if max(plan.draft_split, default=1) > 1:
        raise UserError("a draft on several ranks is not simulated")
    target = model_of(info, cache)

    def cost(part: StagePlan, model: Model) -> ModelCost:
        return machines[part.rank].slice_of(model, part.last - part.first, part.last == model.layers)

    return Profile(
        name="the plan",
        n_embd=target.n_embd,
        stages=tuple(cost(stage, target) for stage in plan.stages),
        drafts=tuple(
            cost(own, model_of(draft, draft_cache)) for draft, (own,) in zip(drafts, plan.drafts, strict=True)
        ),
        link=link,
        head=HEAD,
        head_is_first=plan.stages[0].rank == 0,
        sleeps=True,
        blocks=deployment.blocks,
        parked=deployment.parked,
    )


N_PROMPT = 128  # tokens that a prompt is thought to have
ETHERNET = LinkCost(latency_s=50e-6, bytes_per_s=10e9 / 8)
"""Of hosts whose links nobody describes: 10 Gbit/s."""

N_SIMULATED = 128
"""Tokens of a simulated text."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a text under a policy. `limit_per_s`: see `limit_of`."""

    policy: str
    tokens_per_s: float
    limit_per_s: float
    ttft_s: float
    itl_p50_s: float


@dataclass(frozen=True)
class Planner:
    """`drafts`: the headers of all that are given, the smallest first. `acceptances`: how often each one's best guess
    is right; empty: as `simulate` takes it. `is_described`: nobody was on the nodes, and what is said of
    them is believed."""

    options: RunOptions
    info: ModelInfo
    drafts: Sequence[ModelInfo]
    nodes: Sequence[Node]
    link: LinkCost
    n_prompt: int
    acceptances: Sequence[float] = ()
    is_described: bool = False

    def changed(self, **changes: Any) -> "Planner":
        """With other options."""
        return replace(self, options=replace(self.options, **changes))

    @property
    def drafts_in_use(self) -> Sequence[ModelInfo]:
        return self.drafts if self.options.policy.drafts else ()

    @property
    def n_ctx(self) -> int:
        """Raises UserError when the prompt does not fit."""
        return fit_context(self.options, self.info, self.n_prompt)[0]

    @cached_property
    def deployment(self) -> Deployment:
        """Raises UserError when splits or threads do not fit; whether the memory does, `shortage` says."""
        timed = [node.host for node in self.nodes]
        hosts = with_described_speeds(self.nodes, self.info) if self.is_described else timed
        return lay_out(self.options, hosts, self.info, self.drafts_in_use, self.n_ctx, self.n_prompt)

    @property
    def may_split_otherwise(self) -> bool:
        """Whether `run` would time ranks that do not look alike, and of which nobody says how fast they are."""
        hosts, kinds = self.deployment.hosts, kinds_of(self.options, self.deployment.hosts)
        ranks = ranks_to_time(self.options, hosts)
        return len({kinds[rank] for rank in ranks}) > 1 and any(hosts[rank].speed is None for rank in ranks)

    @property
    def shortage(self) -> int:
        """Bytes that are missing where most are; 0: it fits."""
        spare = spare_memory(*self.deployment.free_memory, self.deployment.memory)
        on_gpus = spare_on_gpus(self.deployment.hosts, self.deployment.on_gpus)
        return max(0, max((-each for each in (*spare, *on_gpus) if each is not None), default=0))

    def lay_out(self, has_draft: bool) -> Profile:
        """The costs of the plan; without a draft its rank has layers too, as in `run`."""
        asked = self if has_draft or not self.drafts_in_use else self.changed(policy=Iterative())
        caches = self.options.cache, self.options.draft_cache
        costs = planned_profile(asked.deployment, self.info, asked.drafts_in_use, self.nodes, self.link, *caches)
        return replace(costs, wire_type=self.options.wire_type)

    def predict(self, policy: Policy) -> Prediction:
        """A text by a fresh policy. Raises UserError where it cannot be simulated, or its plan does not fit."""
        # a split has a part for each stage, and without drafts there are more
        alike = policy.drafts == self.options.policy.drafts
        asked = self.changed(policy=policy, layer_split=self.options.layer_split if alike else None)
        if asked.shortage:
            raise UserError(UNFIT)
        if policy.drafts and not self.drafts:
            raise UserError("guesses by --lookup are not simulated")
        by_rank = [ranks_for(share) for share in self.acceptances if policy.drafts]
        question = Question(
            asked.lay_out, N_SIMULATED, self.n_prompt, by_rank, self.options.cancel, self.options.partitions
        )
        simulated, result, _ = question.answer(deepcopy(policy))
        timings, limit = result["timings"], limit_of(simulated.profile, self.n_prompt)
        speed = timings["predicted_per_second"]
        return Prediction(policy.name, speed, limit, timings["ttft_s"], timings["itl_p50_s"])

    @property
    def speed(self) -> float | None:
        """Tokens a second; None where nobody knows."""
        try:
            return self.predict(self.options.policy).tokens_per_s
        except UserError:
            return None


def open_planner(
    options: RunOptions, info: ModelInfo, nodes: Sequence[Node], link: LinkCost, n_prompt: int,
    acceptances: Sequence[float], is_described: bool = False,
) -> Planner:  # fmt: skip
    """Raises UserError when a draft is no model, or `acceptances` are not one for each draft."""
    drafts = read_drafts(options.drafts)
    if acceptances and len(acceptances) != len(options.drafts):
        raise UserError(
            f"--acceptance is given {len(acceptances)} times for {len(options.drafts)} drafts; give it once for each, "
            "the smallest first, or leave it out"
        )
    return Planner(options, info, drafts, nodes, link, n_prompt, acceptances, is_described)
