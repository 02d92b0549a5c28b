"""Plans of tests."""

from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement import lay_out as planning
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.gguf.model_info import ModelInfo


def lay_out(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> JobPlan:
    """Whether it fits or not. Raises UserError, as planning does."""
    return planning.lay_out(planning.PlanInputs(options, hosts, info, drafts, n_ctx, n_prompt))
