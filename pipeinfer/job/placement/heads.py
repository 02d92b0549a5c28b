"""Where a head that reads the target's features (EAGLE-3) can be a draft. Loads nothing."""

from collections.abc import Sequence

from pipeinfer.cluster.plan import Plan
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.models.gguf.model_info import ModelInfo


def head_of(drafts: Sequence[ModelInfo]) -> ModelInfo | None:
    return next((draft for draft in drafts if draft.head), None)


def check_head(options: RunOptions, drafts: Sequence[ModelInfo]) -> None:
    """Raises UserError for several heads, or one elsewhere than on rank 0."""
    head = head_of(drafts)
    if n_others := sum(draft.head is not None for draft in drafts[1:]):
        raise UserError(f"{drafts[0].path} is a head, and so are {n_others} of the other drafts; give one head")
    if head and options.draft_rank:
        raise UserError(
            f"--draft-rank {options.draft_rank}: {head.path} is a head, which drafts on rank 0, where features come; "
            "leave --draft-rank out"
        )


def check_features(options: RunOptions, plan: Plan, drafts: Sequence[ModelInfo]) -> None:
    """Raises UserError where torch computes layers that a head reads."""
    head = head_of(drafts)
    if head is None or head.head is None:
        return
    reading = [stage.rank for stage in plan.stages if any(stage.first <= n < stage.last for n in head.head.layers_read)]
    for rank in reading:
        if backend_of(options, rank).is_torch:
            layers = ", ".join(map(str, head.head.layers_read))
            raise UserError(
                f"--backend {backend_of(options, rank)} gives no features: {head.path} reads the outputs of layers "
                f"{layers}, some of which rank {rank} computes; give --backend llama, another draft, or -md none"
            )
