"""The result object of one generation, which --json prints, results.csv keeps and the statistics show; its trace."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.job.requests.experiment import describe_drafts, describe_model
from pipeinfer.observe.columns import SAMPLING
from pipeinfer.observe.ledger import TimeUse, Window, head_time, stage_time
from pipeinfer.observe.results import result_object
from pipeinfer.observe.table import Record
from pipeinfer.observe.trace import Span, StageRun, gaps, head_spans, messages, write_chrome_trace

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cluster.assignment import Stages
    from pipeinfer.job.placement.job_plan import JobPlan
    from pipeinfer.job.session.session import Figures, Generation

SHOWN = ("policy", "variant", "settings", "options", *SAMPLING, "numerics", "numerics_name", "plan_hash", "pace")
OWN_FIGURES = ("spans", "n_messages", "n_bytes", "n_out_of_band", "runs")
"""Of a rank's figures, those that go elsewhere than its row."""


def make_result(text: str, generation: Generation, plan: JobPlan, asked: Record) -> dict[str, Any]:
    """`asked`: the columns of `experiment_columns`."""
    return result_object(
        generation.request, generation.metrics, asked, SHOWN, text,
        model=describe_model(plan.model),
        model_draft=describe_drafts(plan.drafts) if plan.drafts else None,
        stage_row_s=[generation.row_s[stage.rank] for stage in plan.assignment.stages],
        wire=_wire(generation, plan),
        ranks=[_rank(rank, generation, plan) for rank in range(plan.assignment.n_ranks)],
    )  # fmt: skip


def _wire(generation: Generation, plan: JobPlan) -> dict[str, Any]:
    ranks = [0, *(stage.rank for stage in plan.assignment.stages if stage.rank != 0)]
    figures = generation.figures
    hops = [
        {
            "from": rank,
            "to": following,
            "messages": figures[rank]["n_messages"],
            "bytes": figures[rank]["n_bytes"],
            "from_device": figures[rank]["n_out_of_band"],
        }
        for rank, following in pairwise(ranks)
    ]
    return {"hops": hops, "cancel_messages": generation.ledger.n_cancel_messages}


def _rank(rank: int, generation: Generation, plan: JobPlan) -> dict[str, Any]:
    index = plan.assignment.stage_of(rank)
    stage = None if index is None else plan.assignment.stages[index]
    memory = plan.memory[rank]
    figures, metrics = generation.figures.get(rank, {}), generation.metrics
    window = metrics.submitted_s, metrics.finished_s or metrics.submitted_s
    return {
        "rank": rank,
        "host": plan.hosts[rank].name,
        "role": plan.assignment.describe(rank),
        "layers": [stage.first, stage.last] if stage else None,
        "weight_bytes": memory.weights + memory.mapped,
        "kv_bytes": memory.kv,
        "memory_bytes": memory.total,
        "threads": plan.threads[rank],
        "backend": str(plan.device(rank).backend),
        "device": plan.device(rank).name or None,
        **{name: value for name, value in figures.items() if name not in OWN_FIGURES},
        **asdict(time_use(rank, generation, window)),
    }


def time_use(rank: int, found: Figures, window: Window) -> TimeUse:
    """How a rank spent some time, of which `found` tells."""
    if rank == 0:
        return head_time(found.ledger, window)
    ledger = found.refiners.get(rank, found.ledger)
    return stage_time(found.figures[rank]["runs"], ledger.submitted_s, window)


def write_trace(path: Path, generation: Generation, plan: JobPlan) -> None:
    """What --trace writes, a track a rank. Raises UserError when the file cannot be written."""
    tracks = []
    for rank, figures in sorted(generation.figures.items()):
        spans = [Span(**span) for span in figures["spans"]]
        if rank == 0:
            spans += head_spans(generation.ledger)
        else:
            unit = "question" if rank in generation.refiners else "run"
            spans += gaps(figures["runs"], generation.refiners.get(rank, generation.ledger), unit)
        tracks.append((f"rank {rank}: {plan.assignment.describe(rank)}", sorted(spans, key=lambda span: span.start_s)))
    arrows = list(messages(_remote_runs(plan.assignment.stages, generation), generation.ledger))
    for stages in plan.assignment.remote_drafts.values():
        ledger = generation.refiners[stages[0].rank]
        arrows += messages(_remote_runs(stages, generation), ledger, "question")
    write_chrome_trace(path, tracks, arrows)


def _remote_runs(stages: Stages, generation: Generation) -> list[tuple[int, list[StageRun]]]:
    """Of each stage that is not the head's, its rank and runs."""
    return [(stage.rank, generation.figures[stage.rank]["runs"]) for stage in stages if stage.rank]
