"""Where a head that reads the target's features (EAGLE-3) can be a draft. Loads nothing."""

from collections.abc import Sequence

from pipeinfer.cluster.assignment import Assignment
from pipeinfer.errors import UserError
from pipeinfer.job.placement.devices import RankDevices
from pipeinfer.models.gguf.model_info import ModelInfo


def head_of(drafts: Sequence[ModelInfo]) -> ModelInfo | None:
    return next((draft for draft in drafts if draft.head), None)


def check_head(draft_rank: int | None, drafts: Sequence[ModelInfo]) -> None:
    """`draft_rank`: as asked for. Raises UserError for several heads, or one elsewhere than on rank 0."""
    head = head_of(drafts)
    if n_others := sum(draft.head is not None for draft in drafts[1:]):
        raise UserError(f"{drafts[0].path} is a head, and so are {n_others} of the other drafts; give one head")
    if head and draft_rank:
        raise UserError(
            f"--draft-rank {draft_rank}: {head.path} is a head, which drafts on rank 0, where features come; "
            "leave --draft-rank out"
        )


def check_features(assignment: Assignment, devices: Sequence[RankDevices], drafts: Sequence[ModelInfo]) -> None:
    """Raises UserError where torch computes layers that a head reads."""
    head = head_of(drafts)
    if head is None or head.head is None:
        return
    read = head.head.layers_read
    reading = [stage.rank for stage in assignment.stages if any(stage.first <= layer < stage.last for layer in read)]
    for rank in reading:
        if (backend := devices[rank].target.backend).is_torch:
            layers = ", ".join(map(str, read))
            raise UserError(
                f"--backend {backend} gives no features: {head.path} reads the outputs of layers "
                f"{layers}, some of which rank {rank} computes; give --backend llama, another draft, or -md none"
            )
