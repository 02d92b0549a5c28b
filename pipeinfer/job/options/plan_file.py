"""A plan that `pipeinfer plan --json` wrote: as options of a job, and compared with the plan of that job."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeinfer.cluster.assignment import parse_split
from pipeinfer.cluster.wire import WireType
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import AUTO_LAYERS, NO_DEVICE
from pipeinfer.job.options.values import Backend, Parsed
from pipeinfer.job.process.streams import read_limited
from pipeinfer.models.llama.tensor_places import TensorPlace
from pipeinfer.text import shortened

N_SHOWN = 4  # differences in a message
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan that was read from `path`. `decisions`: those of a `JobPlan`."""

    path: Path
    decisions: Mapping[str, Any]

    @property
    def layer_split(self) -> list[int]:
        """The layers of each stage."""
        return [last - first for _, first, last in self.decisions["stages"]]

    @property
    def numerics_name(self) -> str:
        return str(self.decisions["numerics"]["name"])

    def decided(self) -> dict[str, Any]:
        """The settings that the plan decides, by their names; results show them as if they were given."""
        decisions, ranks = self.decisions, self.decisions["ranks"]
        numerics, capacity = decisions["numerics"], decisions["capacity"]
        targets, draft_stages = [rank["target"] for rank in ranks], decisions["draft_stages"]
        devices = [each["devices"] for each in targets]
        moved = next(filter(None, (target.get("override_tensor") for target in targets)), ())
        widths, threads = tuple(map(len, draft_stages[1:])), tuple(rank["threads"] or 0 for rank in ranks)
        draft_rank = draft_stages[0][0][0] if len(draft_stages) == 1 else 0
        draft = ranks[draft_rank]["draft"]
        return {
            "layer_split": ",".join(map(str, self.layer_split)),
            "draft_split": widths if max(widths, default=1) > 1 else (),
            "draft_rank": draft_rank or None,
            "threads": threads if any(threads) else (),
            "samplers": ranks[decisions["stages"][-1][0]]["samplers"] if capacity["n_requests"] > 1 else None,
            "backend": _short([Backend.parse(target["backend"]) for target in targets]),
            "n_gpu_layers": _short([target["n_gpu_layers"] for target in targets]),
            "n_cpu_moe": _short([target.get("n_cpu_moe", 0) for target in targets]),
            "cpu_moe": False,
            "override_tensor": tuple(map(TensorPlace.parse, moved)),
            "device": _short([NO_DEVICE if names == [] else tuple(names or ()) for names in devices]),
            "n_gpu_layers_draft": AUTO_LAYERS if draft in (None, targets[draft_rank]) else int(draft["n_gpu_layers"]),
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
        """Raises UserError, with the differences, if decisions, all or some, differ from the plan's."""
        texts = [each for name in decisions for each in _differences(self.decisions[name], decisions[name], name)]
        if texts:
            more = f", and {len(texts) - N_SHOWN} more" if len(texts) > N_SHOWN else ""
            differences = f"is for other hosts or files: {'; '.join(texts[:N_SHOWN])}{more}"
            raise UserError(f"--plan {self.path} {differences}; plan again here, or start as it was planned")


def read_plan(path: Path) -> PlanFile:
    """Raises UserError for a file that is no plan."""
    try:
        with path.open() as file:
            decisions = json.loads(read_limited(file, f"--plan {path}"))["plan"]
        plan = PlanFile(path, decisions)
        plan.decided()
        ranks, capacity = decisions["ranks"], decisions["capacity"]
        counts = [*plan.layer_split, *(rank["threads"] or 0 for rank in ranks), *capacity.values()]
        is_whole = all(type(count) is int and count >= 0 for count in counts)
        devices = [each for rank in ranks for each in (rank["target"], rank["draft"]) if each]
        has_devices = all(type(each[name]) is int for each in devices for name in ("n_gpu_layers", "turn"))
        if not (is_whole and has_devices and capacity["n_ctx"] and capacity["n_batch"] and decisions["model"]):
            raise ValueError
        return plan
    except OSError as error:
        raise UserError(f"--plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise no_plan(path) from None


def no_plan(path: Path) -> UserError:
    return UserError(f"--plan {path} is no plan; write one with: pipeinfer plan … --json > plan.json")


def _short(values: Sequence[T]) -> tuple[T, ...]:
    """One value if all are the same."""
    return tuple(values[:1]) if len(set(values)) == 1 else tuple(values)


def _differences(planned: Any, actual: Any, where: str) -> Iterator[str]:
    """A text for each difference; values that the plan leaves open and the domains of hosts are none."""
    if isinstance(planned, Mapping) and isinstance(actual, Mapping):
        for name in planned:
            yield from _differences(planned[name], actual.get(name), f"{where} {name}")
    elif isinstance(planned, list) and isinstance(actual, list) and len(planned) == len(actual):
        for number, pair in enumerate(zip(planned, actual, strict=True)):
            yield from _differences(*pair, f"{where.removesuffix('s')} {number}")
    elif planned is not None and _plain(planned, where) != _plain(actual, where):
        yield f"{where} is {_text(planned)} in the plan, {_text(actual)} here"


def _plain(value: Any, where: str) -> Any:
    return str(value).partition(".")[0] if where.endswith("host") else value


def _text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, list | dict) else str(value)
    return shortened(text, 40)


def _split(text: str) -> str:
    if text.endswith(".json"):
        return ",".join(map(str, read_plan(Path(text)).layer_split))
    parse_split(text)
    return text


SPLIT = Parsed("split", _split)  # layers or proportions of stages, for `parse_split`; the text itself
