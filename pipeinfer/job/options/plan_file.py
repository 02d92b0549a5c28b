"""A plan that `pipeinfer plan --json` wrote: as options of a job, and as what the job's own plan must come to."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import AUTO_LAYERS, NO_DEVICE

N_SHOWN = 4
"""Differences in a message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """`decisions`: as `JobPlan` has them."""

    path: Path
    decisions: Mapping[str, Any]

    @property
    def layer_split(self) -> list[int]:
        """The layers of each stage."""
        return [last - first for _, first, last in self.decisions["stages"]]

    @property
    def numerics_name(self) -> str:
        return str(self.decisions["numerics"]["name"])

    def options(self) -> dict[str, Any]:
        """The options that a plan decides, by their names in RunOptions."""
        decisions, ranks = self.decisions, self.decisions["ranks"]
        numerics, capacity = decisions["numerics"], decisions["capacity"]
        targets, draft_stages = [rank["target"] for rank in ranks], decisions["draft_stages"]
        devices = [each["devices"] for each in targets]
        widths, threads = tuple(map(len, draft_stages[1:])), tuple(rank["threads"] or 0 for rank in ranks)
        draft_rank = draft_stages[0][0][0] if len(draft_stages) == 1 else 0
        return {
            "layer_split": ",".join(map(str, self.layer_split)),
            "draft_split": widths if max(widths, default=1) > 1 else (),
            "draft_rank": draft_rank or None,
            "threads": threads if any(threads) else (),
            "samplers": ranks[decisions["stages"][-1][0]]["samplers"] if capacity["n_requests"] > 1 else None,
            "backend": _short([Backend.parse(target["backend"]) for target in targets]),
            "n_gpu_layers": _short([target["n_gpu_layers"] for target in targets]),
            "device": _short([NO_DEVICE if names == [] else tuple(names or ()) for names in devices]),
            "n_gpu_layers_draft": _draft_layers(ranks[draft_rank]),
            "numerics": "exact" if numerics["exact"] else "fast",
            "repack": numerics["repack"],
            "wire_type": WireType(numerics["wire_type"]),
            "cache_type_k": numerics["cache"][0],
            "cache_type_v": numerics["cache"][1],
            "cache_type_k_draft": numerics["draft_cache"][0],
            "cache_type_v_draft": numerics["draft_cache"][1],
            "ctx_size": capacity["n_ctx"],
            "batch_size": capacity["n_batch"],
        }

    def check(self, decisions: Mapping[str, Any]) -> None:
        """Raises UserError, with what differs, for decisions, all or some, of another plan."""
        found = [each for name in decisions for each in _differences(self.decisions[name], decisions[name], name)]
        if found:
            more = f", and {len(found) - N_SHOWN} more" if len(found) > N_SHOWN else ""
            raise UserError(f"--plan {self.path} is for other hosts or files: {'; '.join(found[:N_SHOWN])}{more}; plan "
                            "again here, or start as it was planned")  # fmt: skip


def read_plan(path: Path) -> PlanFile:
    """Raises UserError for a file that is no plan."""
    try:
        decisions = json.loads(path.read_text())["plan"]
        plan = PlanFile(path, decisions)
        plan.options()
        if not all(type(count) is int for count in plan.layer_split):
            raise ValueError
        return plan
    except OSError as error:
        raise UserError(f"--plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise UserError(f"--plan {path} is no plan; write one with: pipeinfer plan … --json > plan.json") from None


def _short(values: Sequence[T]) -> tuple[T, ...]:
    """One value where all are the same."""
    return tuple(values[:1]) if len(set(values)) == 1 else tuple(values)


def _draft_layers(rank: Mapping[str, Any]) -> int:
    """-ngld, by the rank of the draft."""
    target, draft = rank["target"], rank["draft"]
    return AUTO_LAYERS if draft in (None, target) else int(draft["n_gpu_layers"])


def _differences(planned: Any, own: Any, where: str) -> Iterator[str]:
    """A text each. What the plan leaves open is no difference, nor are hosts' domains."""
    if isinstance(planned, Mapping) and isinstance(own, Mapping):
        for name in planned:
            yield from _differences(planned[name], own.get(name), f"{where} {name}")
    elif isinstance(planned, list) and isinstance(own, list) and len(planned) == len(own):
        for number, (theirs, ours) in enumerate(zip(planned, own, strict=True)):
            yield from _differences(theirs, ours, f"{where.removesuffix('s')} {number}")
    elif planned is not None and _plain(planned, where) != _plain(own, where):
        yield f"{where} is {_text(planned)} in the plan, {_text(own)} here"


def _plain(value: Any, where: str) -> Any:
    return str(value).partition(".")[0] if where.endswith("host") else value


def _text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
