"""The columns of results.csv that describe an experiment before it runs, the result of a real generation, and how the
ranks spend the time of many requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.assignment import Assignment
from pipeinfer.core.batch_planner import ONE_CHUNK
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import Setting
from pipeinfer.job.options.options import RunOptions, Speculation
from pipeinfer.job.options.values import Delay
from pipeinfer.job.placement.devices import device_text
from pipeinfer.job.placement.job_plan import JobPlan, ModelFile
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.gguf.adapter import digest_of
from pipeinfer.observe.columns import HASH_DIGITS, SAMPLING, Record, digest, model_columns, settings_text, variant_text
from pipeinfer.observe.figures import Result, make_result, missed_pace
from pipeinfer.observe.trace import HeadLedger, StageRun, TimeUse, TraceSpan, Track, time_use

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.job.session.ranks import Figures
    from pipeinfer.job.session.session import Generation


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """A job's settings in results.csv. `options`: those that share the column `options`, as in `ctx-size 512`."""

    speculation: Speculation
    options: str
    numerics: str
    pace: str

    @classmethod
    def of(cls, options: RunOptions) -> ExperimentSettings:
        shown = options_text(options.settings())
        shown += ["slice-cache"] if options.models.slice_cache else []
        pace = str(options.experiments.pace or "")
        return cls(options.speculation, ", ".join(shown), options.numerics.numerics, pace)

    @property
    def policy(self) -> Policy:
        return self.speculation.policy

    @property
    def variant(self) -> str:
        return variant_text(self.policy, self.speculation.cancel, self.speculation.partitions)

    def text(self, assignment: Assignment) -> str:
        """The settings of the policy and of drafting that are not defaults."""
        split = assignment.draft_split
        cut = [f"draft-split {','.join(map(str, split))}"] if max(split, default=1) > 1 else []
        moved = [f"draft-rank {stages[0].rank}" for number, stages in assignment.remote_drafts.items() if not number]
        looks_up = self.speculation.lookup
        lookup = [] if looks_up is None else ["lookup" if looks_up else "no-lookup"]
        return settings_text(self.policy, self.speculation.couple, cut + moved + lookup)


def experiment_columns(plan: JobPlan, request: GenerationRequest, settings: ExperimentSettings) -> Record:
    """The columns that are known before the text is generated, of a prompt without a name."""
    adapters = digest_of(plan.adapters)
    return {
        "policy": settings.policy.name,
        "variant": settings.variant,
        "settings": settings.text(plan.assignment),
        "options": ", ".join(filter(None, [settings.options, adapters and f"lora {adapters}"])),
        **model_columns(describe_model(plan.model), describe_drafts(plan.drafts)),
        "ranks": plan.assignment.n_ranks,
        "layers": [stage.last - stage.first for stage in plan.assignment.stages],
        "threads": list(plan.threads),
        "prompt": "",
        "prompt_hash": digest(request.prompt),
        "prompt_n": len(request.prompt),
        "predicted_n": request.n_predict,
        **{name: getattr(request.sampling, name) for name in SAMPLING},
        "grammar": digest(request.sampling.grammar) if request.sampling.grammar else "",
        "numerics": settings.numerics,
        "numerics_name": plan.numerics.name,
        "plan_hash": plan.hash,
        "pace": settings.pace,
        "pace_hash": plan.pace_hash,
        "repetition": 0,
    }


def options_text(settings: Iterable[tuple[str, Any, Any, Setting]]) -> list[str]:
    """Of settings as `RunOptions.settings` yields them, those that the column `options` has."""
    changed = ((setting, value) for _, value, default, setting in settings if value != default)
    return [_shown(setting, value) for setting, value in changed if setting.column]


def _shown(setting: Setting, value: object) -> str:
    if isinstance(value, bool):
        return setting.given_as(value).removeprefix("--")
    if isinstance(value, tuple):
        text = ",".join(device_text(each) if isinstance(each, tuple) else str(each) for each in value)
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        text = "chunk" if isinstance(setting.type, Delay) and value == ONE_CHUNK else text
    return f"{setting.flag.removeprefix('--')} {text}"


def describe_model(model: ModelFile) -> dict[str, Any]:
    return {
        "name": model.path.name,
        "bytes": model.n_bytes,
        "hash": model.fingerprint[:HASH_DIGITS],
        "n_params": model.n_params,
        "n_layer": model.n_layer,
        "quantisation": model.quantisation,
    }


def describe_drafts(drafts: Sequence[ModelFile]) -> dict[str, Any] | None:
    """Several as one: names and the like joined, sizes added up, layers of the largest; None if there are none."""
    if not drafts:
        return None
    models = [describe_model(draft) for draft in drafts]
    joined = {key: "+".join(model[key] for model in models) for key in ("name", "hash", "quantisation")}
    summed = {key: sum(model[key] for model in models) for key in ("bytes", "n_params")}
    return {**models[-1], **joined, **summed}


SHOWN = ("policy", "variant", "settings", "options", *SAMPLING, "numerics", "numerics_name", "plan_hash", "pace")
"""Columns of the experiment in --json."""

OTHER_FIGURES = ("spans", "n_messages", "n_bytes", "n_out_of_band", "runs")  # figures of a rank that are not in its row
NO_TIME = TimeUse(0.0, 0.0, 0.0, 0.0, 0.0)


def generation_result(generation: Generation, plan: JobPlan, experiment: Record, text: str = "") -> Result:
    """`experiment`: the columns of `experiment_columns`."""
    reports, ranks = generation.reports, [0, *(stage.rank for stage in plan.assignment.stages if stage.rank)]
    counts = {"messages": "n_messages", "bytes": "n_bytes", "from_device": "n_out_of_band"}
    hops = [
        {"from": rank, "to": following} | {name: reports[rank][figure] for name, figure in counts.items()}
        for rank, following in pairwise(ranks)
    ]
    more = {
        "text": text,
        "model": describe_model(plan.model),
        "model_draft": describe_drafts(plan.drafts),
        "stage_row_s": [generation.row_s[stage.rank] for stage in plan.assignment.stages],
    }
    wire = {"hops": hops, "cancel_messages": generation.ledger.n_cancel_messages}
    tracks = tracks_of(generation, plan)
    return make_result(generation.request, generation.metrics, experiment, SHOWN, tracks, wire, **more)


def tracks_of(figures: Figures, plan: JobPlan) -> list[Track]:
    """A track for each rank."""
    tracks = []
    for rank, report in sorted(figures.reports.items()):
        unit = "question" if rank in figures.draft_ledgers else "run"
        spans = [TraceSpan(**span) for span in report["spans"]]
        tracks.append(Track(_row(rank, report, plan), *_records(rank, figures), spans, unit))
    return tracks


def _records(rank: int, figures: Figures) -> tuple[HeadLedger, Sequence[StageRun] | None]:
    """The ledger of the rank's pipeline and its runs; those of the head are None."""
    if rank == 0:
        return figures.ledger, None
    return figures.draft_ledgers.get(rank, figures.ledger), figures.reports[rank]["runs"]


def _row(rank: int, report: dict[str, Any], plan: JobPlan) -> dict[str, Any]:
    stage = next((stage for stage in plan.assignment.stages if stage.rank == rank), None)
    memory, device = plan.memory[rank], plan.device(rank)
    return _place(rank, plan) | {
        "layers": [stage.first, stage.last] if stage else None,
        "weight_bytes": memory.weights + memory.mapped,
        "kv_bytes": memory.kv,
        "memory_bytes": memory.total,
        "threads": plan.threads[rank],
        "backend": str(device.backend),
        "device": plan.device_names(rank) or None,
        **{name: value for name, value in report.items() if name not in OTHER_FIGURES},
    }


def _place(rank: int, plan: JobPlan) -> dict[str, Any]:
    return {"rank": rank, "host": plan.hosts[rank].name, "role": plan.assignment.describe(rank)}


class RankUses:
    """How each rank spends its time from `start_s` on, summed over the reports of the ranks."""

    def __init__(self, plan: JobPlan, start_s: float) -> None:
        self.plan, self.start_s, self.noted_s = plan, start_s, start_s
        self.uses = [NO_TIME] * plan.assignment.n_ranks
        self._peaks = [0] * plan.assignment.n_ranks
        self._late_s = dict.fromkeys(range(plan.assignment.n_ranks), 0.0)
        self._sent_s: dict[int, float] = {}  # runs that may have been in flight at the last reports

    def note(self, figures: Figures, now_s: float) -> dict[int, TimeUse]:
        """Add each rank's time since the last call, and return it."""
        sent_s = figures.ledger.submitted_s
        figures = replace(figures, ledger=replace(figures.ledger, submitted_s={**self._sent_s, **sent_s}))
        window = self.noted_s, now_s
        uses = {rank: time_use(*_records(rank, figures), window) for rank in sorted(figures.reports)}
        for rank, use in uses.items():
            self.uses[rank] = TimeUse(*map(sum, zip(astuple(self.uses[rank]), astuple(use), strict=True)))
            self._peaks[rank] = max(self._peaks[rank], figures.reports[rank]["peak_rss_bytes"])
            self._late_s[rank] += figures.reports[rank]["late_s"]
        self._sent_s, self.noted_s = sent_s, now_s
        return uses

    @property
    def missed_pace(self) -> str:
        """A warning for ranks that were late for a clear part of the time with something to do; else empty."""
        return missed_pace(self._late_s, self.noted_s - self.start_s - min(use.idle_s for use in self.uses))

    def ranks(self) -> list[dict[str, Any]]:
        """Each rank's row in --json and in the statistics."""
        rows = enumerate(zip(self.uses, self._late_s.values(), self._peaks, strict=True))
        return [
            _place(rank, self.plan) | asdict(use) | {"late_s": late_s, "peak_rss_bytes": peak}
            for rank, (use, late_s, peak) in rows
        ]
