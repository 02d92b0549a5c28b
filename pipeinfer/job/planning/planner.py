"""The plan that `run` would make on these nodes, and its predicted speed. Loads no weights, prints nothing."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeinfer.cluster.hosts.free_memory import spare_memory
from pipeinfer.cluster.hosts.gpu_memory import spare_on_gpus
from pipeinfer.cluster.timing.costs import LinkCost, Profile
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deploy import choose_numerics
from pipeinfer.job.placement.devices import plan_devices
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.lay_out import PlanInputs
from pipeinfer.job.placement.model_files import read_drafts
from pipeinfer.job.planning.planned_costs import planned_profile, with_described_speeds
from pipeinfer.job.profiling.schedule import all_threads, kinds_of, ranks_to_time
from pipeinfer.job.requests.request import fit_context
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.observe.texts.plan_text import UNFIT
from pipeinfer.policies import Iterative
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.compare import limit_of
from pipeinfer.virtual.nodes import Node
from pipeinfer.virtual.study import Question

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
        return fit_context(self.options.ctx_size, self.options.predict, self.info, self.n_prompt)[0]

    @cached_property
    def plan(self) -> JobPlan:
        """Raises UserError when splits or threads do not fit; whether the memory does, `shortage` says."""
        timed = [node.host for node in self.nodes]
        hosts = with_described_speeds(self.nodes, self.info) if self.is_described else timed
        inputs = PlanInputs(self.options, hosts, self.info, self.drafts_in_use, self.n_ctx, self.n_prompt)
        return choose_numerics(inputs)

    @property
    def may_split_otherwise(self) -> bool:
        """Whether `run` would time ranks, because they differ and their speeds are unknown."""
        hosts, devices = self.plan.hosts, plan_devices(self.options, self.plan.hosts)
        kinds = kinds_of(hosts, all_threads(self.options.threads, hosts), devices)
        ranks = ranks_to_time(self.options, hosts)
        return len({kinds[rank] for rank in ranks}) > 1 and any(hosts[rank].speed is None for rank in ranks)

    @property
    def shortage(self) -> int:
        """Bytes that are missing where most are; 0: it fits."""
        spare = spare_memory(*self.plan.free_memory, self.plan.memory)
        on_gpus = spare_on_gpus(self.plan.hosts, self.plan.on_gpus)
        return max(0, max((-each for each in (*spare, *on_gpus) if each is not None), default=0))

    def lay_out(self, has_draft: bool) -> Profile:
        """The costs of the plan; without a draft its rank has layers too, as in `run`."""
        asked = self if has_draft or not self.drafts_in_use else self.changed(policy=Iterative())
        caches = self.options.cache, self.options.draft_cache
        costs = planned_profile(asked.plan, self.info, asked.drafts_in_use, self.nodes, self.link, *caches)
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
        """Tokens a second; None: unknown."""
        try:
            return self.predict(self.options.policy).tokens_per_s
        except UserError:
            return None


def open_planner(
    options: RunOptions, info: ModelInfo, nodes: Sequence[Node], link: LinkCost, n_prompt: int,
    acceptances: Sequence[float], is_described: bool = False,
) -> Planner:  # fmt: skip
    """Raises UserError when a draft is no model, or `acceptances` are not one for each draft."""
    drafts = read_drafts(options.drafts, info)
    if acceptances and len(acceptances) != len(options.drafts):
        raise UserError(
            f"--acceptance is given {len(acceptances)} times for {len(options.drafts)} drafts; give it once for each, "
            "the smallest first, or leave it out"
        )
    return Planner(options, info, drafts, nodes, link, n_prompt, acceptances, is_described)
