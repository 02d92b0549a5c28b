"""What was asked of a generation, as the columns of results.csv that are known before it runs. Measures nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from pipeinfer.cli.options import RunOptions
from pipeinfer.policies.factory import PolicyOptions
from pipeinfer.results import Row
from pipeinfer.sampling import SamplingParams

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cli.setup import Job, ModelFile

HASH_DIGITS = 16
SAMPLING = tuple(field.name for field in fields(SamplingParams))


def asked_of(job: Job, options: RunOptions, prompt: str = "", prompt_hash: str = "", repetition: int = 0) -> Row:
    """Every column that says what was asked. `prompt`: its name; `prompt_hash`: unless it is that of the job's."""
    return {
        "policy": options.policy,
        "variant": variant_text(options.speculation, options.cancel, options.partitions),
        "settings": settings_text(options.policy, options.speculation, options.couple),
        "options": options_text(options),
        **model_columns(describe_model(job.model), describe_drafts(job.drafts) if job.drafts else None),
        "ranks": job.plan.n_ranks,
        "layers": [stage.last - stage.first for stage in job.plan.stages],
        "threads": list(job.threads),
        "prompt": prompt,
        "prompt_hash": prompt_hash or digest(job.prompt),
        "prompt_n": len(job.prompt),
        "predicted_n": job.n_predict,
        **{name: getattr(job.sampling, name) for name in SAMPLING},
        "numerics": options.numerics,
        "pace": options.pace or "",
        "pace_hash": digest(job.pace) if job.pace else "",
        "repetition": repetition,
    }


def digest(value: object) -> str:
    """Digits that two different values do not share, of what `repr` shows in full."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:HASH_DIGITS]


def settings_text(policy: str, speculation: PolicyOptions, couple: bool = True) -> str:
    """What steers the policy, for the tables: `draft 4, width 3`, and what else is not as by default."""
    if policy == "iterative":
        return ""
    names = ("n_draft", "width") if policy == "speculative" else ("width", "microbatch", "inflight")
    given, default = asdict(speculation), asdict(PolicyOptions())
    changed = [name for name in given if given[name] != default[name] and not isinstance(given[name], bool)]
    shown = [f"{name.removeprefix('n_')} {given[name]:g}" for name in dict.fromkeys([*names, *changed])]
    return ", ".join(shown + ([] if couple else ["no-couple-draft"]))


def variant_text(speculation: PolicyOptions, cancel: bool, partitions: bool) -> str:
    """What an ablation study switched off, by the flags that did it; empty for the whole policy."""
    ablations = (
        ("no-cancel", cancel),
        ("no-continuous", speculation.continuous),
        ("no-async", speculation.asynchronous),
        ("no-partitions", partitions),
    )
    return ", ".join(flag for flag, on in ablations if not on)


def options_text(options: RunOptions) -> str:
    """The job's options that have no column of their own, where they are not as by default: `ctx-size 512`."""
    from pipeinfer.cli.run import run  # which has the defaults

    default = {parameter.name: parameter.default for parameter in run.params}
    names = ("ctx_size", "batch_size", "n_gpu_layers", "sequences")
    changed = [(name, getattr(options, name)) for name in names if getattr(options, name) != default[name]]
    shown = [f"{name.replace('_', '-')} {value}" for name, value in changed]
    return ", ".join(shown + (["slice-cache"] if options.slice_cache else []))


# -- models


def model_columns(model: dict[str, Any], draft: dict[str, Any] | None) -> Row:
    """The columns about a target and its drafts."""
    columns = {"": "name", "_bytes": "bytes", "_hash": "hash"}
    found = {f"model{suffix}": model[name] for suffix, name in columns.items()}
    found |= {f"model_draft{suffix}": draft[name] if draft else "" for suffix, name in columns.items()}
    quantisation_draft = draft["quantisation"] if draft else ""
    return found | {"quantisation": model["quantisation"], "quantisation_draft": quantisation_draft}


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
