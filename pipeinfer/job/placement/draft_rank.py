"""Which rank drafts: rank 0, or the one whose loss slows the pipeline least. Loads nothing."""

from collections.abc import Callable, Sequence

from pipeinfer.cluster.assignment import Assignment, Sizes
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import distinct_speeds

CLEAR_GAIN = 1.1
"""How many times faster the slowest stage has to be: rank 0 then has the engine beside its layers."""

DRAFT_SHARE = 0.5
"""A step of the draft there takes at most so much of the slowest stage's time, or no more than on rank 0."""


def choose_draft_rank(
    hosts: Sequence[Host], target: Sizes, draft: Sizes, assign_with: Callable[[int], Assignment]
) -> int:
    """Rank 0 where no gain is clear, or ranks were not timed. `assign_with`: who has which layers if a rank drafts."""
    speeds = distinct_speeds([host.speed for host in hosts])
    if not speeds:
        return 0

    def draft_s(rank: int) -> float:
        return sum(speeds[rank].seconds(draft.layer_bytes, draft.output_bytes))

    def slowest_s(rank: int) -> float:
        times = [speed.seconds(target.layer_bytes, target.output_bytes) for speed in speeds]
        return max(sum(times[stage.rank][stage.first : stage.last]) for stage in assign_with(rank).stages)

    found = {rank: slowest_s(rank) for rank in range(len(hosts))}
    limits = {rank: max(draft_s(0), DRAFT_SHARE * slowest) for rank, slowest in found.items()}
    fitting = [rank for rank in found if draft_s(rank) <= limits[rank]]
    best = min(fitting, key=lambda rank: (found[rank], rank))
    return best if found[best] * CLEAR_GAIN <= found[0] else 0
