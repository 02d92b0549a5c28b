"""The result object of one generation: what --json prints, results.csv keeps and the statistics show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__
from pipeinfer.cli.options import RunOptions
from pipeinfer.ledger import TimeUse, Window, head_time, stage_time
from pipeinfer.metrics import speculation, timings
from pipeinfer.models.model_info import read_model_info
from pipeinfer.policies.factory import PolicyOptions

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cli.session import Generation
    from pipeinfer.cli.setup import Job

OWN_FIGURES = ("spans", "n_messages", "n_bytes", "runs")  # of a rank's figures, those that go elsewhere than its row


def make_result(text: str, generation: Generation, job: Job, options: RunOptions) -> dict[str, Any]:
    request = generation.request
    return {
        "text": text,
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        "policy": options.policy,
        "seed": job.sampling.seed,
        "temp": job.sampling.temp,
        "numerics": options.numerics,
        "pace": options.pace or "",
        "settings": settings_text(options),
        "variant": variant_text(options),
        "version": __version__,
        "model": describe_model(options.model),
        "model_draft": describe_drafts([draft.path for draft in job.drafts]) if job.drafts else None,
        "timings": timings(generation.metrics),
        "speculation": speculation(generation.metrics),
        "stage_row_s": [generation.row_s[stage.rank] for stage in job.plan.stages],
        "wire": _wire(generation, job),
        "ranks": [_rank(rank, generation, job) for rank in range(job.plan.n_ranks)],
    }


def settings_text(options: RunOptions) -> str:
    """What steers the policy, for the tables: `draft 4, width 3`, and what else is not as by default."""
    names = ("n_draft", "width") if options.policy == "speculative" else ("width", "microbatch", "inflight")
    if options.policy == "iterative":
        return ""
    given, default = asdict(options.speculation), asdict(PolicyOptions())
    changed = [name for name in given if given[name] != default[name] and not isinstance(given[name], bool)]
    shown = [f"{name.removeprefix('n_')} {given[name]:g}" for name in dict.fromkeys([*names, *changed])]
    return ", ".join(shown + ([] if options.couple else ["no-couple-draft"]))


def variant_text(options: RunOptions) -> str:
    """What an ablation study switched off, by the flags that did it; empty for the whole policy."""
    ablations = (
        ("no-cancel", options.cancel),
        ("no-continuous", options.speculation.continuous),
        ("no-async", options.speculation.asynchronous),
        ("no-partitions", options.partitions),
    )
    return ", ".join(flag for flag, on in ablations if not on)


@cache
def describe_model(path: Path) -> dict[str, Any]:
    """Raises UserError when the model cannot be read."""
    info = read_model_info(path)
    return {
        "name": path.name,
        "bytes": info.n_bytes,
        "n_params": info.n_params,
        "n_layer": info.n_layer,
        "quantisation": info.quantisation,
    }


def describe_drafts(paths: Sequence[Path]) -> dict[str, Any]:
    """One draft, or several as one: names and quantisations joined, sizes added up, layers of the largest."""
    found = [describe_model(path) for path in paths]
    joined = {key: "+".join(model[key] for model in found) for key in ("name", "quantisation")}
    return {**found[-1], **joined, **{key: sum(model[key] for model in found) for key in ("bytes", "n_params")}}


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
        "kv_bytes": stage.kv_bytes if stage else 0,
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
