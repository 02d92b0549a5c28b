"""What a rank computes with: its part of the target and its drafts, loaded, and what rank 0 has to know of a stage."""

from __future__ import annotations

from typing import Any

from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.job.launch.context import Context
from pipeinfer.job.loading.arrivals import fetch_layers
from pipeinfer.job.loading.load import load_drafts, load_stage
from pipeinfer.job.loading.run_costs import time_stage
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.placement.deployment import Deployment


def load_own(context: Context, deployment: Deployment) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's stage of the target, if it has one, and its drafts by number. Collective. Raises UserError."""
    fetch_layers(context, deployment)
    return load_stage(context, deployment), load_drafts(context, deployment)


def stage_report(context: Context, deployment: Deployment, stage: LoadedModel) -> dict[str, Any]:
    """What its runs cost, as `RunCosts`, and its `gpu`, as in `gpu_of`."""
    costs = time_stage(context, deployment, stage)
    return {"costs": costs, "gpu": gpu_of(context.options, deployment.hosts, context.rank)}
