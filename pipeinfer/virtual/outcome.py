"""A simulated generation as the same result object, table and trace that a real one gives."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.observe.columns import SAMPLING
from pipeinfer.observe.experiment import digest, model_columns, settings_text
from pipeinfer.observe.ledger import head_time, stage_time
from pipeinfer.observe.results import result_object
from pipeinfer.observe.table import Record
from pipeinfer.observe.trace import Message, Span, gaps, head_spans, messages, write_chrome_trace
from pipeinfer.virtual.pipeline import SimPipeline, SimStage
from pipeinfer.virtual.simulation import Simulated

SHOWN = ("policy", "variant", "settings", "seed", "temp", "numerics")  # of what was asked


def make_result(simulated: Simulated, asked: Record) -> dict[str, Any]:
    """`asked`: the columns that say what was."""
    models: dict[str, Any] = {
        role: {"name": asked[role], "bytes": 0, "quantisation": "simulated"} if asked[role] else None
        for role in ("model", "model_draft")
    }
    return result_object(
        simulated.request, simulated.metrics, asked, SHOWN, profile=simulated.profile.name, **models,
        wire=_wire(simulated), ranks=_ranks(simulated),
    )  # fmt: skip


def simulated_columns(
    profile: Profile, target: Profile | None, policy: Policy, choices: str, seed: int, repetition: int
) -> Record:
    """The columns that say what was asked, but for those of prompt and text. `target`: as a Question has it; `choices`:
    what each draft guesses."""
    virtual = {"bytes": 0, "quantisation": "simulated"}
    model = {"name": profile.name, "hash": digest(target or profile)} | virtual
    draft = {"name": "+".join(["draft"] * len(profile.drafts)), "hash": digest(choices)} | virtual
    return model_columns(model, draft if profile.drafts else None) | {
        "policy": policy.name,
        "settings": settings_text(policy),
        "options": "" if profile.wire_type is WireType.F32 else f"wire-type {profile.wire_type}",
        "ranks": profile.n_ranks,
        "layers": [cost.layers for cost in profile.stages],
        "threads": [1] * profile.n_ranks,
        **dict.fromkeys(SAMPLING, ""),
        "seed": seed,
        "temp": 0.0,
        "numerics": "virtual",
        "pace": "",
        "pace_hash": "",
        "choices": choices,
        "repetition": repetition,
    }


def text_columns(request: Request, name: str) -> Record:
    """Those of a prompt and its text; `name`: of a recorded one."""
    prompt = tuple(request.prompt)
    return {
        "prompt": name or f"pp{len(prompt)}",
        "prompt_hash": digest(prompt),
        "prompt_n": len(prompt),
        "predicted_n": request.n_predict,
    }


def _first_rank(simulated: Simulated) -> int:
    """The rank of the first stage."""
    return 0 if simulated.profile.head_is_first else max(1, len(simulated.profile.drafts))


def _wire(simulated: Simulated) -> dict[str, Any]:
    pipeline, first = simulated.pipeline, _first_rank(simulated)
    ranks = [*[0] * (first > 0), *range(first, first + len(pipeline.stages))]
    hops = [pipeline.first_hop] * (first > 0) + [stage.out for stage in pipeline.stages[:-1]]
    return {
        "hops": [
            {"from": source, "to": dest, "messages": hop.n_messages, "bytes": hop.n_bytes, "from_device": 0}
            for hop, (source, dest) in zip(hops, pairwise(ranks), strict=True)
        ],
        "cancel_messages": pipeline.ledger.n_cancel_messages,
    }


def _ranks(simulated: Simulated) -> list[dict[str, Any]]:
    metrics, profile = simulated.metrics, simulated.profile
    window = (metrics.submitted_s, metrics.finished_s or metrics.submitted_s)
    head: dict[str, Any] = {"rank": 0, "role": _head_role(profile), "layers": None}
    rows: list[dict[str, Any]] = []
    if not profile.head_is_first:
        rows.append(head | asdict(head_time(simulated.pipeline.ledger, window)))
    bounds = [0, *accumulate(cost.layers for cost in profile.stages)]
    n_asked = len(simulated.pipeline.neighbours) - 1
    layers: list[list[int] | None] = [*[None] * n_asked, *map(list, pairwise(bounds))]
    for (rank, role, pipeline, stage), part in zip(_workers(simulated), layers, strict=True):
        use = stage_time(stage.ledger.moved(0.0), pipeline.ledger.submitted_s, window)
        saved = {"runs_skipped": stage.n_skipped, "runs_stopped": stage.n_stopped}
        rows.append({"rank": rank, "role": role, "layers": part} | saved | asdict(use))
    return [{"host": f"node{row['rank']}", "threads": 1} | row for row in rows]


def _head_role(profile: Profile) -> str:
    return "draft" if profile.drafts else "head"


def _workers(simulated: Simulated) -> Iterator[tuple[int, str, SimPipeline, SimStage]]:
    """(rank, role, its pipeline, its stage) of the drafts that are asked by messages, then of the stages."""
    main, first = simulated.pipeline, _first_rank(simulated)
    own = 0 if simulated.profile.drafts_elsewhere else 1
    for number, pipeline in enumerate(main.neighbours[1:], start=own):
        yield number if own else len(main.stages) + number, f"draft {number + 1}", pipeline, pipeline.stages[0]
    for rank, stage in enumerate(main.stages, start=first):
        yield rank, stage.cost.name, main, stage


def write_trace(path: Path, simulated: Simulated) -> None:
    """One track a rank. Raises UserError when the file cannot be written."""
    main, first = simulated.pipeline, _first_rank(simulated)
    tracks: list[tuple[str, list[Span]]] = []
    if first:
        tracks.append((f"rank 0: {_head_role(simulated.profile)}", simulated.tracer.spans + head_spans(main.ledger)))
    arrows: list[Message] = []
    for rank, role, pipeline, stage in _workers(simulated):
        runs, unit = stage.ledger.moved(0.0), "run" if pipeline is main else "question"
        work = [
            Span("cancelled" if cancelled else "evaluate", start_s, end_s - start_s, {unit: run_id})
            for run_id, _, start_s, end_s, cancelled in runs
        ]
        tracks.append((f"rank {rank}: {role}", work + list(gaps(runs, pipeline.ledger, unit))))
        if pipeline is not main:
            arrows += messages([(rank, runs)], pipeline.ledger, unit)
    if first:
        stages = [(rank, stage.ledger.moved(0.0)) for rank, stage in enumerate(main.stages, start=first)]
        arrows += messages(stages, main.ledger)
    ordered = [(label, sorted(spans, key=lambda span: span.start_s)) for label, spans in tracks]
    write_chrome_trace(path, ordered, arrows)
