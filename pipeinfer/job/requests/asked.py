"""What was asked of a generation, as the columns of results.csv that are known before it runs. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pipeinfer.core.scheduling.batch_planner import ONE_CHUNK
from pipeinfer.core.settings import Setting, settings_of
from pipeinfer.job.options.options import RunOptions, device_text
from pipeinfer.job.options.values import Delay
from pipeinfer.observe.columns import SAMPLING
from pipeinfer.observe.experiment import HASH_DIGITS, digest, model_columns, settings_text, variant_text
from pipeinfer.observe.table import Record

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cluster.plan import Plan
    from pipeinfer.job.placement.deployment import Deployment, ModelFile
    from pipeinfer.job.requests.request import GenerationRequest


def asked_of(
    deployment: Deployment, request: GenerationRequest, options: RunOptions, prompt: str = "", prompt_hash: str = "",
    repetition: int = 0,
) -> Record:  # fmt: skip
    """Every column that says what was asked. `prompt`: its name; `prompt_hash`: unless it is that of the request's."""
    return {
        "policy": options.policy.name,
        "variant": variant_text(options.policy, options.cancel, options.partitions),
        "settings": settings_text(options.policy, options.couple, _drafting(options, deployment.plan)),
        "options": options_text(options),
        **model_columns(
            describe_model(deployment.model), describe_drafts(deployment.drafts) if deployment.drafts else None
        ),
        "ranks": deployment.plan.n_ranks,
        "layers": [stage.last - stage.first for stage in deployment.plan.stages],
        "threads": list(deployment.threads),
        "prompt": prompt,
        "prompt_hash": prompt_hash or digest(request.prompt),
        "prompt_n": len(request.prompt),
        "predicted_n": request.n_predict,
        **{name: getattr(request.sampling, name) for name in SAMPLING},
        "grammar": digest(request.sampling.grammar) if request.sampling.grammar else "",
        "numerics": options.numerics,
        "pace": options.pace or "",
        "pace_hash": digest(deployment.pace) if deployment.pace else "",
        "repetition": repetition,
    }


def _drafting(options: RunOptions, plan: Plan) -> list[str]:
    """How guesses are made, where it is not as by default."""
    cut = [f"draft-split {','.join(map(str, plan.draft_split))}"] if max(plan.draft_split, default=1) > 1 else []
    moved = [f"draft-rank {stages[0].rank}" for number, stages in plan.asked.items() if not number]
    lookup = [] if options.lookup is None else ["lookup" if options.lookup else "no-lookup"]
    return cut + moved + lookup


def options_text(options: RunOptions) -> str:
    """The job's options that have no column of their own, where they are not as by default: `ctx-size 512`."""
    found = ((setting, getattr(options, name), default) for name, default, setting in settings_of(RunOptions))
    shown = [_shown(setting, value) for setting, value, default in found if setting.column and value != default]
    return ", ".join([*shown, *(["slice-cache"] if options.slice_cache else [])])


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
