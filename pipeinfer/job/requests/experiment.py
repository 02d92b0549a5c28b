"""The columns of results.csv that are known before a text is generated. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeinfer.core.policy import Policy
from pipeinfer.core.scheduling.batch_planner import ONE_CHUNK
from pipeinfer.core.settings import Setting, settings_of
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import Delay
from pipeinfer.job.placement.devices import device_text
from pipeinfer.observe.columns import SAMPLING
from pipeinfer.observe.experiment import HASH_DIGITS, digest, model_columns, settings_text, variant_text
from pipeinfer.observe.table import Record

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cluster.assignment import Assignment
    from pipeinfer.job.placement.job_plan import JobPlan, ModelFile
    from pipeinfer.job.requests.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """What results.csv has of a job's options. `options`: those without a column of their own, where they are not as by
    default, such as `ctx-size 512`; `lookup`: as asked."""

    policy: Policy
    variant: str
    couple: bool
    lookup: bool | None
    options: str
    numerics: str
    pace: str

    @classmethod
    def of(cls, options: RunOptions) -> ExperimentSettings:
        found = ((setting, getattr(options, name), default) for name, default, setting in settings_of(RunOptions))
        shown = [_shown(setting, value) for setting, value, default in found if setting.column and value != default]
        shown += ["slice-cache"] if options.slice_cache else []
        return cls(
            options.policy, variant_text(options.policy, options.cancel, options.partitions), options.couple,
            options.lookup, ", ".join(shown), options.numerics, options.pace or "",
        )  # fmt: skip

    def text(self, assignment: Assignment) -> str:
        """Of the policy, and of how guesses are made where it is not as by default."""
        split = assignment.draft_split
        cut = [f"draft-split {','.join(map(str, split))}"] if max(split, default=1) > 1 else []
        moved = [f"draft-rank {stages[0].rank}" for number, stages in assignment.remote_drafts.items() if not number]
        lookup = [] if self.lookup is None else ["lookup" if self.lookup else "no-lookup"]
        return settings_text(self.policy, self.couple, cut + moved + lookup)


def experiment_columns(
    plan: JobPlan, request: GenerationRequest, settings: ExperimentSettings, prompt: str = "", prompt_hash: str = "",
    repetition: int = 0,
) -> Record:  # fmt: skip
    """Every column that is known before the text is. `prompt`: its name; `prompt_hash`: unless it is that of the
    request's."""
    return {
        "policy": settings.policy.name,
        "variant": settings.variant,
        "settings": settings.text(plan.assignment),
        "options": settings.options,
        **model_columns(describe_model(plan.model), describe_drafts(plan.drafts) if plan.drafts else None),
        "ranks": plan.assignment.n_ranks,
        "layers": [stage.last - stage.first for stage in plan.assignment.stages],
        "threads": list(plan.threads),
        "prompt": prompt,
        "prompt_hash": prompt_hash or digest(request.prompt),
        "prompt_n": len(request.prompt),
        "predicted_n": request.n_predict,
        **{name: getattr(request.sampling, name) for name in SAMPLING},
        "grammar": digest(request.sampling.grammar) if request.sampling.grammar else "",
        "numerics": settings.numerics,
        "numerics_name": plan.numerics.name,
        "plan_hash": plan.hash,
        "pace": settings.pace,
        "pace_hash": digest(plan.pace) if plan.pace else "",
        "repetition": repetition,
    }


def _shown(setting: Setting, value: object) -> str:
    if isinstance(value, bool):
        return setting.given_as(value).removeprefix("--")
    name = setting.flag.removeprefix("--")
    return f"{name} {'chunk' if isinstance(setting.type, Delay) and value == ONE_CHUNK else _listed(value)}"


def _listed(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(device_text(each) if isinstance(each, tuple) else str(each) for each in value)


# -- models


def describe_model(model: ModelFile) -> dict[str, Any]:
    return {
        "name": model.path.name,
        "bytes": model.n_bytes,
        "hash": model.fingerprint[:HASH_DIGITS],
        "n_params": model.n_params,
        "n_layer": model.n_layer,
        "quantisation": model.quantisation,
    }


def describe_drafts(drafts: Sequence[ModelFile]) -> dict[str, Any]:
    """One draft, or several as one: names and the like joined, sizes added up, layers of the largest."""
    found = [describe_model(draft) for draft in drafts]
    joined = {key: "+".join(model[key] for model in found) for key in ("name", "hash", "quantisation")}
    return {**found[-1], **joined, **_summed(found, ("bytes", "n_params"))}


def _summed(models: Sequence[dict[str, Any]], keys: Iterable[str]) -> dict[str, int]:
    return {key: sum(model[key] for model in models) for key in keys}
