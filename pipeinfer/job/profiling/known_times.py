"""The form of times that are kept for the next start, and when ranks time anew. Times nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from pipeinfer.cluster.hosts.layer_speed import BEFORE, LayerSpeed
from pipeinfer.cluster.hosts.speed import Speed
from pipeinfer.cluster.timing.slice_times import RankTimes, SliceTimes
from pipeinfer.disk_cache import user_cache

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

T = TypeVar("T")
ONCE = ("run_s", "reshape_s", "rest_s")


def known(
    link: Link, key: str, read: Callable[[Any], T | None], find: Callable[[], tuple[T | None, str]],
    ranks: Collection[int], write: Callable[[Any], object] = asdict,
) -> list[tuple[T | None, str]]:  # fmt: skip
    """Of every rank what is kept under its `key`. If one of `ranks` has nothing kept, all find it anew and keep it.
    Collective.

    `key`: empty on ranks that have nothing to find. `find`: collective; it returns the value, or None and the reason.
    """
    kept = user_cache()
    found = link.all_gather((read(kept.get(key)) if key else None, ""))
    if all(found[rank][0] for rank in ranks):
        return found
    own, error = find()
    if own:
        kept.put(key, write(own))
    return link.all_gather((own, error))


# -- values as JSON gives them; None for anything else


def read_speed(value: Any) -> Speed | None:
    found = _numbers(value, "bytes_per_s", "flop_per_s")
    return Speed(**found) if found else None


def read_layer_speed(value: Any) -> LayerSpeed | None:
    found = _numbers(value, "s_per_byte", "output_s", may_lack="output_s")
    return LayerSpeed(**found, source=BEFORE) if found else None


def read_draft_times(value: Any) -> tuple[float, float] | None:
    found = _numbers(value, "asked_s", "cpu_s")
    return (found["asked_s"], found["cpu_s"]) if found else None


def read_rank_times(value: Any) -> RankTimes | None:
    try:
        draft = value["draft"] and _slice_times(value["draft"])
        found = RankTimes(
            _slice_times(value["target"]), draft, value["draft_number"], value["beside"], value["n_beside"], BEFORE
        )
        usable = isinstance(found.n_beside, int) and found.n_beside > 0 and 0 < found.beside < math.inf
    except (KeyError, TypeError, ValueError):
        return None
    return found if usable else None


def _numbers(value: Any, *names: str, may_lack: str = "") -> dict[str, Any] | None:
    """The value, if it has positive numbers of these names and nothing else."""
    if not isinstance(value, dict) or value.keys() != set(names):
        return None
    given = [number for name, number in value.items() if number is not None or name != may_lack]
    return value if all(isinstance(number, float) and 0 < number < math.inf for number in given) else None


def _slice_times(value: Mapping[str, Any]) -> SliceTimes:
    """Raises TypeError, KeyError or ValueError for anything else."""
    rows, s_per_byte, output_s = (tuple(value[name]) for name in ("rows", "s_per_byte", "output_s"))
    found = SliceTimes(rows, s_per_byte, output_s, value["context_s"], *(value[name] for name in ONCE))
    if not rows or rows[0] != 1 or list(rows) != sorted(set(rows)) or len(s_per_byte) != len(rows):
        raise ValueError(rows)
    if len(output_s) not in (0, len(rows)) or not all(0 < each < math.inf for each in (*s_per_byte, *output_s)):
        raise ValueError(s_per_byte)
    if not all(0 <= each < math.inf for each in (found.context_s or 0.0, *(value[name] for name in ONCE))):
        raise ValueError(value)
    return found
