"""Which rank drafts: rank 0, the one asked for, or the one whose loss slows the pipeline least. Loads nothing."""

from collections.abc import Callable, Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import distinct_speeds
from pipeinfer.cluster.plan import Plan, Sizes, draft_widths, stage_ranks
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions

CLEAR_GAIN = 1.1
"""How many times faster the slowest stage has to be: rank 0 then has the engine beside its layers."""

DRAFT_SHARE = 0.5
"""A step of the draft there takes at most so much of the slowest stage's time, or no more than on rank 0."""


def may_choose(options: RunOptions) -> bool:
    """Whether it is left to this: with one draft, and where nothing is given for each rank or stage by its role."""
    by_role = bool(options.layer_split or options.pace or options.lookup) or any(
        len(values) > 1 for values in (options.n_gpu_layers, options.device, options.backend)
    )
    by_role = by_role or options.n_gpu_layers_draft != AUTO_LAYERS  # its speed there is nowhere timed
    return options.draft_rank is None and len(options.drafts_in_use) == 1 and not by_role


def target_ranks(options: RunOptions, n_ranks: int, n_drafts: int) -> list[int]:
    """The ranks with layers of the target, where no draft rank is chosen. Raises UserError for too few ranks."""
    widths = draft_widths(n_drafts, options.draft_split if n_drafts else ())
    return stage_ranks(n_ranks, widths, options.fixed_draft_rank if n_drafts else 0)


def check_draft_rank(options: RunOptions, n_ranks: int) -> None:
    """Raises UserError for a rank that there is not, or that cannot be another than 0."""
    rank = options.draft_rank
    if not rank:
        return
    if rank >= n_ranks:
        raise UserError(f"--draft-rank {rank}: the highest rank is {n_ranks - 1}; give one up to that, or start more")
    reasons = {
        f"{len(options.drafts)} drafts": len(options.drafts) > 1, "--lookup": options.lookup,
        "--pace": options.pace is not None,
    }  # fmt: skip
    for reason in (each for each, holds in reasons.items() if holds):
        raise UserError(f"--draft-rank {rank} is for one draft without lookup or pace, and here is {reason}; leave one "
                        "of them out")  # fmt: skip


def choose_draft_rank(
    options: RunOptions, hosts: Sequence[Host], target: Sizes, draft: Sizes, plan_with: Callable[[int], Plan]
) -> int:
    """The rank whose loss slows the pipeline least; rank 0 where that is not clear. `plan_with`: the plan if a rank
    drafts."""
    speeds = distinct_speeds([host.speed for host in hosts])
    if not may_choose(options) or not speeds:
        return options.fixed_draft_rank

    def draft_s(rank: int) -> float:
        return sum(speeds[rank].seconds(draft.layer_bytes, draft.output_bytes))

    def slowest_s(rank: int) -> float:
        times = [speed.seconds(target.layer_bytes, target.output_bytes) for speed in speeds]
        return max(sum(times[stage.rank][stage.first : stage.last]) for stage in plan_with(rank).stages)

    found = {rank: slowest_s(rank) for rank in range(len(hosts))}
    limits = {rank: max(draft_s(0), DRAFT_SHARE * slowest) for rank, slowest in found.items()}
    fitting = [rank for rank in found if draft_s(rank) <= limits[rank]]
    best = min(fitting, key=lambda rank: (found[rank], rank))
    return best if found[best] * CLEAR_GAIN <= found[0] else 0
