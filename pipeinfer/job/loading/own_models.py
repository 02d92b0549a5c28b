"""What a rank computes with: its part of the target and its drafts, loaded, and what rank 0 has to know of a stage."""

from __future__ import annotations

from typing import Any

from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.job.launch.context import Context
from pipeinfer.job.loading.arrivals import fetch_layers
from pipeinfer.job.loading.load import load_drafts, load_stage, time_after, time_loaded, time_prompt
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.placement.deployment import Deployment


def load_own(context: Context, deployment: Deployment) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's stage of the target, if it has one, and its drafts by number. Collective. Raises UserError."""
    fetch_layers(context, deployment)
    return load_stage(context, deployment), load_drafts(context, deployment)


def stage_report(context: Context, deployment: Deployment, stage: LoadedModel) -> dict[str, Any]:
    """As plain data, in seconds: `cost_s` of runs by their rows, `context_s` of a row for each token before it,
    `chunk_s` of a chunk of a prompt with its rows; `gpu` as in `gpu_of`."""
    cost_s = time_loaded(context, deployment, stage)
    return {
        "cost_s": cost_s,
        "context_s": time_after(context, deployment, stage, cost_s),
        "chunk_s": time_prompt(context, deployment, stage),
        "gpu": gpu_of(context.options, deployment.hosts, context.rank),
    }
