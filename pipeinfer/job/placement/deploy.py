"""The plan that a job runs: numerics are chosen, and a plan that does not fit is refused. Loads nothing."""

from collections.abc import Sequence
from dataclasses import replace

from pipeinfer.cluster.assignment import Assignment
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.sections import Placement
from pipeinfer.job.placement.job_plan import JobPlan, check_memory
from pipeinfer.job.placement.lay_out import PlanInputs, lay_out
from pipeinfer.job.placement.model_files import draft_translation, read_drafts
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
    """A plan takes more memory than there is; the message has the numbers."""

    def __init__(self, message: str, plan: JobPlan) -> None:
        super().__init__(message)
        self.plan = plan


def deploy(options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_ctx: int, n_prompt: int) -> JobPlan:
    """The plan for contexts of `n_ctx` tokens. Raises UserError for a wrong option, DoesNotFit for too little
    memory."""
    inputs = PlanInputs(options, hosts, info, read_drafts(options.drafts_in_use, info), n_ctx, n_prompt)
    if planned := options.planned:
        planned.check({"model": info.fingerprint, "drafts": [draft.fingerprint for draft in inputs.drafts]})
    plan, kept, goes_on = choose_numerics(inputs), options.kept_numerics, options.allow_other_numerics
    if (wanted := options.wanted_numerics) and plan.numerics.name != wanted:
        same = _with_numerics(inputs, wanted)
        plan = same if same and (not goes_on or same.fits) else plan
    if planned:
        planned.check(plan.decisions)
    try:
        check_memory(plan, _way_out(plan.assignment, options))
    except UserError as error:
        began = f"; what is to go on was begun with numerics {kept}, --allow-other-numerics goes on with others" if (
            kept and not goes_on) else ""  # fmt: skip
        raise DoesNotFit(f"{error}{began}", plan) from None
    if kept and plan.numerics.name != kept:
        if not goes_on:
            raise UserError(other_numerics_text(kept, plan.numerics.name))
        plan = replace(plan, notes=(*plan.notes, OTHER_NUMERICS.format(kept, plan.numerics.name)))
    translations = [None if draft.head else draft_translation(info.path, draft.path) for draft in plan.drafts]
    return replace(plan, translations=tuple(translations), begun=kept)


def choose_numerics(inputs: PlanInputs) -> JobPlan:
    """With weights repacked where that is faster and fits, else as in the file, which needs less memory."""
    plan = lay_out(inputs)
    if not plan.numerics.repacked or plan.fits:
        return plan
    mapped = lay_out(_without_repacking(inputs))
    return replace(mapped, notes=(*mapped.notes, NOT_REPACKED.format(plan.numerics.name, mapped.numerics.name)))


def _with_numerics(inputs: PlanInputs, name: str) -> JobPlan | None:
    """With the numerics of this name, whether it fits or not; None where there is none."""
    both = [lay_out(each) for each in (inputs, _without_repacking(inputs))]
    return next((each for each in both if each.numerics.name == name), None)


def _without_repacking(inputs: PlanInputs) -> PlanInputs:
    return replace(inputs, hosts=[replace(host, repacked=(), grouped=()) for host in inputs.hosts])


def _way_out(assignment: Assignment, asked: Placement) -> str:
    """Where memory is short. `asked`: what the user decided."""
    is_cut = len(assignment.stages) > 1
    first = "no split was found that fits; " if is_cut else ""
    if asked.plan or asked.layer_split is not None:
        first = f"leave {'--plan' if asked.plan else '--layer-split'} out, "
    return f"{first}use a smaller context (-c), more ranks on further hosts, or a smaller quantisation"
