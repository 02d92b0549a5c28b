"""Options and plans of tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.job.options.options import JobModels, RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning import deploy as planning
from pipeinfer.job.planning.fit import PlanInputs
from pipeinfer.models.drafts.head_files import read_drafts
from pipeinfer.models.gguf.model_info import ModelInfo


def options_of(model: Path = Path("m.gguf"), drafts: tuple[Path, ...] = (), **values: Any) -> RunOptions:
    """`values`: of fields of the sections, by their names."""
    return RunOptions(models=JobModels(target=model, drafts=drafts)).changed(**values)


def lay_out(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, drafts: Sequence[ModelInfo], n_ctx: int, n_prompt: int
) -> JobPlan:
    """Whether it fits or not. Raises UserError, as planning does."""
    return planning.lay_out(PlanInputs(options, hosts, info, drafts, n_ctx, n_prompt))


def deploy(options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_ctx: int, n_prompt: int) -> JobPlan:
    """The plan of a job. Raises UserError, as planning does."""
    drafts = read_drafts(options.drafts_in_use, info)
    return planning.deploy(options, hosts, info, drafts, n_ctx, n_prompt)


def timed_ranks(options: RunOptions, hosts: Sequence[Host]) -> list[int]:
    """The ranks whose layers are timed before there is a plan."""
    schedule = planning.schedule_of(options, hosts)
    return schedule.ranks if schedule else []
