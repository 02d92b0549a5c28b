"""The result object of one generation: what --json prints, results.csv keeps and the statistics show."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__
from pipeinfer.cli.asked import SAMPLING, asked_of, describe_drafts, describe_model
from pipeinfer.cli.options import RunOptions
from pipeinfer.ledger import TimeUse, Window, head_time, stage_time
from pipeinfer.metrics import speculation, timings

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cli.session import Generation
    from pipeinfer.cli.setup import Job

SHOWN = ("policy", "variant", "settings", "options", *SAMPLING, "numerics", "pace")  # of what was asked
OWN_FIGURES = ("spans", "n_messages", "n_bytes", "runs")  # of a rank's figures, those that go elsewhere than its row


def make_result(text: str, generation: Generation, job: Job, options: RunOptions) -> dict[str, Any]:
    request, asked = generation.request, asked_of(job, options)
    return {
        "text": text,
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        **{name: asked[name] for name in SHOWN},
        "version": __version__,
        "model": describe_model(job.model),
        "model_draft": describe_drafts(job.drafts) if job.drafts else None,
        "timings": timings(generation.metrics),
        "speculation": speculation(generation.metrics),
        "stage_row_s": [generation.row_s[stage.rank] for stage in job.plan.stages],
        "wire": _wire(generation, job),
        "ranks": [_rank(rank, generation, job) for rank in range(job.plan.n_ranks)],
    }


def _wire(generation: Generation, job: Job) -> dict[str, Any]:
    ranks = [0, *(stage.rank for stage in job.plan.stages if stage.rank != 0)]
    figures = generation.figures
    hops = [
        {"from": rank, "to": following, "messages": figures[rank]["n_messages"], "bytes": figures[rank]["n_bytes"]}
        for rank, following in pairwise(ranks)
    ]
    return {"hops": hops, "cancel_messages": generation.n_cancel_messages}


def _rank(rank: int, generation: Generation, job: Job) -> dict[str, Any]:
    index = job.plan.stage_of(rank)
    stage = None if index is None else job.plan.stages[index]
    figures = generation.figures.get(rank, {})
    return {
        "rank": rank,
        "host": job.hosts[rank].name,
        "role": job.plan.describe(rank),
        "layers": [stage.first, stage.last] if stage else None,
        "weight_bytes": stage.weight_bytes if stage else 0,
        "kv_bytes": job.memory[rank].kv,
        "memory_bytes": job.memory[rank].total,
        "threads": job.threads[rank],
        **{name: value for name, value in figures.items() if name not in OWN_FIGURES},
        **asdict(time_use(rank, generation)),
    }


def time_use(rank: int, generation: Generation) -> TimeUse:
    """How a rank spent the time from the request's submission to its last token."""
    metrics, ledger = generation.metrics, generation.ledger
    window: Window = (metrics.submitted_s, metrics.finished_s or metrics.submitted_s)
    if rank == 0:
        return head_time(ledger, window)
    ledger = generation.refiners.get(rank, ledger)
    return stage_time(generation.figures[rank]["runs"], ledger.submitted_s, window)
