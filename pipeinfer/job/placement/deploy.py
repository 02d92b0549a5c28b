"""The deployment that runs: the layout of weights is chosen, and what does not fit is refused. Loads nothing."""

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.plan import Plan
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment, check_memory, lay_out, read_drafts
from pipeinfer.job.placement.model_files import draft_translation
from pipeinfer.job.placement.numerics import other_numerics_text
from pipeinfer.models.gguf.model_info import ModelInfo

NOT_REPACKED = (
    "there is no memory to repack the weights, so that numerics are not {} but {}: tokens that are all but tied may "
    "differ from those of ranks where there is; with --no-repack they are the same"
)
OTHER_NUMERICS = (
    "what goes on was begun with numerics {}, and goes on with {}: the text may be another one from here on"
)


class DoesNotFit(UserError):
    """A deployment takes more memory than there is; the message has the numbers."""

    def __init__(self, message: str, deployment: Deployment) -> None:
        super().__init__(message)
        self.deployment = deployment


def deploy(options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_ctx: int, n_prompt: int) -> Deployment:
    """The plan for contexts of `n_ctx` tokens. Raises UserError for a wrong option, DoesNotFit for too little
    memory."""
    drafts = read_drafts(options.drafts_in_use, info)
    deployment = choose_layout(options, hosts, info, drafts, n_ctx, n_prompt)
    kept, goes_on = options.kept_numerics, options.allow_other_numerics
    if kept and deployment.numerics != kept:
        same = _kept_layout(options, hosts, info, drafts, n_ctx, n_prompt)
        deployment = same if same and (not goes_on or same.fits) else deployment
    try:
        check_memory(deployment, _way_out(deployment.plan, options.layer_split is not None))
    except UserError as error:
        began = f"; what is to go on was begun with numerics {kept}, --allow-other-numerics goes on with others" if (
            kept and not goes_on) else ""  # fmt: skip
        raise DoesNotFit(f"{error}{began}", deployment) from None
    if kept and deployment.numerics != kept:
        if not goes_on:
            raise UserError(other_numerics_text(kept, deployment.numerics))
        deployment = replace(deployment, notes=(*deployment.notes, OTHER_NUMERICS.format(kept, deployment.numerics)))
    translations = [None if draft.head else draft_translation(info.path, draft.path) for draft in deployment.drafts]
    return replace(deployment, translations=tuple(translations))


def choose_layout(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> Deployment:
    """With weights repacked where that is worth it and fits, else as they are in the file, which needs less memory: the
    layout is chosen here, and nowhere later."""
    deployment = lay_out(options, hosts, info, drafts, n_ctx, n_prompt)
    if not deployment.repacked or deployment.fits:
        return deployment
    mapped = lay_out(options, _without_repacking(hosts), info, drafts, n_ctx, n_prompt)
    return replace(mapped, notes=(*mapped.notes, NOT_REPACKED.format(deployment.numerics, mapped.numerics)))


def _kept_layout(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> Deployment | None:
    """That with the numerics which a job began with, whether it fits or not; None where there is none."""
    both = [lay_out(options, each, info, drafts, n_ctx, n_prompt) for each in (hosts, _without_repacking(hosts))]
    return next((each for each in both if each.numerics == options.kept_numerics), None)


def _without_repacking(hosts: Sequence[Host]) -> list[Host]:
    return [replace(host, repacked=()) for host in hosts]


def _way_out(plan: Plan, chosen: bool) -> str:
    """Where memory is short. `chosen`: the user has split the layers."""
    first = "leave --layer-split out, " if chosen else "no split was found that fits; " if len(plan.stages) > 1 else ""
    return f"{first}use a smaller context (-c), more ranks on further hosts, or a smaller quantisation"
