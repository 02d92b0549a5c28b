"""What `plan` tells: who gets what, how fast each policy would be, what would help; as plain data. Prints nothing."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.placement.model_files import draft_translation, translation_note
from pipeinfer.job.planning.plan_table import plan_rows
from pipeinfer.job.planning.planner import Planner, Prediction
from pipeinfer.job.planning.suggestions import shortage_text, suggestions
from pipeinfer.policies.registry import POLICIES, make_policy
from pipeinfer.virtual.study import DEFAULT_ACCEPTANCE


def plan_report(planner: Planner) -> dict[str, Any]:
    """`shortage`: what is missing, with the nearest ways out; empty if it fits. Raises UserError for no possible
    plan."""
    options, plan = planner.options, planner.plan
    predicted, unknown = _predictions(planner)
    helping = suggestions(planner, predicted)
    plain = next((each.tokens_per_s for each in predicted if each.policy == "iterative"), None)
    return {
        "model": str(options.model),
        "drafts": [str(draft.path) for draft in planner.drafts_in_use],
        "policy": options.policy.name,
        "n_ctx": planner.n_ctx,
        "prompt_n": planner.n_prompt,
        "numerics": options.numerics,
        "numerics_name": plan.numerics.name,
        "wire_type": str(options.wire_type),
        "link": {"bytes_per_s": planner.link.bytes_per_s, "latency_s": planner.link.latency_s},
        "acceptance": list(planner.acceptances) or [DEFAULT_ACCEPTANCE] * len(planner.drafts),
        "fits": not planner.shortage,
        "shortage": shortage_text(planner, helping),
        "layer_split": [stage.last - stage.first for stage in plan.assignment.stages],
        "ranks": plan_rows(plan, planner.nodes),
        "plan": plan.decisions,
        "plan_hash": plan.hash,
        "predictions": [
            asdict(each)
            | {
                "planned": each.policy == options.policy.name,
                "over_iterative": each.tokens_per_s / plain if plain else None,
            }
            for each in predicted
        ],
        "not_predicted": unknown,
        "ways": [way.as_data() for way in helping],
        "warnings": [*_translations(planner), *plan.warnings],
        "notes": list(_notes(planner)),
    }


def _translations(planner: Planner) -> Iterator[str]:
    """Of each draft that has other tokens than the target."""
    for draft in planner.drafts_in_use:
        if not draft.head and (note := translation_note(draft.path, draft_translation(planner.info.path, draft.path))):
            yield note


def _predictions(planner: Planner) -> tuple[list[Prediction], dict[str, str]]:
    """Of each policy that the models allow; of each that cannot be predicted, why."""
    chosen = planner.options.policy
    guessing = planner.drafts or planner.options.lookup
    names = [name for name, kind in POLICIES.items() if guessing or not kind.drafts]
    found, unknown = [], {}
    for policy in [chosen if name == chosen.name else make_policy(name, {}) for name in names]:
        try:
            found.append(planner.predict(policy))
        except UserError as error:
            unknown[policy.name] = str(error)
    return found, unknown


def _notes(planner: Planner) -> Iterator[str]:
    """What the figures leave out."""
    are_timed = all(host.speed for host in planner.plan.hosts)
    if not planner.is_described:
        yield "predictions are estimates by how fast each host reads and multiplies; `measure` times the models there"
    if planner.is_described and planner.plan.numerics.repacked:
        yield "the hosts' processors are taken to repack weights as this host's does"
    if any(backend.is_torch for backend in planner.options.backend) and not are_timed:
        yield "predictions take ranks of torch to be as fast as libllama"
    if any(planner.options.n_gpu_layers):
        untimed = "" if are_timed else ", and predictions know the speed of CPUs only"
        yield f"what a GPU's driver takes there is not counted, nor what torch does{untimed}"
    if any("_exps" in tensor.name for tensor in planner.info.tensors):
        yield "predictions read the experts of one row: guesses, of which each has experts of its own, are dearer"
    if planner.may_split_otherwise:
        yield "layers go by size; `run` times them on ranks that are not alike, and may split them otherwise"
