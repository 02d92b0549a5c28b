"""A simulated generation as the same result object, table and trace that a real one gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pipeinfer import __version__
from pipeinfer.cli.tracks import gaps, head_spans, messages
from pipeinfer.cluster.simulation import Simulated
from pipeinfer.ledger import head_time, stage_time
from pipeinfer.metrics import speculation, timings
from pipeinfer.trace import Span, write_chrome_trace


def make_result(
    simulated: Simulated, policy: str, settings: str, variant: str, names: Mapping[str, Any]
) -> dict[str, Any]:
    """`names` says what was simulated: model, model_draft, seed."""
    request, profile = simulated.request, simulated.profile
    models = {
        role: {"name": names[role], "bytes": 0, "quantisation": "simulated"} if names[role] else None
        for role in ("model", "model_draft")
    }
    return {
        "text": "",
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        "policy": policy,
        "seed": names["seed"],
        "temp": 0.0,
        "numerics": "virtual",
        "settings": settings,
        "variant": variant,
        "version": __version__,
        "profile": profile.name,
        **models,
        "timings": timings(simulated.metrics),
        "speculation": speculation(simulated.metrics),
        "wire": _wire(simulated),
        "ranks": _ranks(simulated),
    }


def _first_rank(simulated: Simulated) -> int:
    """The rank of the first stage."""
    return 0 if simulated.profile.head_is_first else 1


def _wire(simulated: Simulated) -> dict[str, Any]:
    pipeline, first = simulated.pipeline, _first_rank(simulated)
    hops = [pipeline.first_hop] * first + [stage.out for stage in pipeline.stages[:-1]]
    return {
        "hops": [
            {"from": index, "to": index + 1, "messages": hop.n_messages, "bytes": hop.n_bytes}
            for index, hop in enumerate(hops)
        ],
        "cancel_messages": pipeline.n_cancel_messages,
    }


def _ranks(simulated: Simulated) -> list[dict[str, Any]]:
    pipeline, metrics, first = simulated.pipeline, simulated.metrics, _first_rank(simulated)
    window = (metrics.submitted_s, metrics.finished_s or metrics.submitted_s)
    head: dict[str, Any] = {"rank": 0, "role": "draft" if simulated.profile.draft else "head", "layers": None}
    rows: list[dict[str, Any]] = [] if first == 0 else [head | asdict(head_time(pipeline.ledger, window))]
    bounds = [0, *accumulate(cost.layers for cost in simulated.profile.stages)]
    for rank, (stage, (start, end)) in enumerate(zip(pipeline.stages, pairwise(bounds), strict=True), start=first):
        use = stage_time(stage.ledger.moved(0.0), pipeline.ledger.submitted_s, window)
        saved = {"runs_skipped": stage.n_skipped, "runs_stopped": stage.n_stopped}
        rows.append({"rank": rank, "role": stage.cost.name, "layers": [start, end]} | saved | asdict(use))
    return [{"host": f"node{row['rank']}", "threads": 1} | row for row in rows]


def write_trace(path: Path, simulated: Simulated) -> None:
    """One track a rank. Raises OSError when the file cannot be written."""
    pipeline, first = simulated.pipeline, _first_rank(simulated)
    tracks: list[tuple[str, list[Span]]] = []
    if first:
        spans = simulated.tracer.spans + head_spans(pipeline.ledger)
        tracks.append((f"rank 0: {'draft' if simulated.profile.draft else 'head'}", spans))
    stages = [(rank, stage.ledger.moved(0.0)) for rank, stage in enumerate(pipeline.stages, start=first)]
    for (rank, runs), stage in zip(stages, pipeline.stages, strict=True):
        work = [
            Span("cancelled" if cancelled else "evaluate", start_s, end_s - start_s, {"run": run_id})
            for run_id, _, start_s, end_s, cancelled in runs
        ]
        tracks.append((f"rank {rank}: {stage.cost.name}", work + list(gaps(runs, pipeline.ledger))))
    ordered = [(label, sorted(spans, key=lambda span: span.start_s)) for label, spans in tracks]
    write_chrome_trace(path, ordered, list(messages(stages, pipeline.ledger)) if first else [])
