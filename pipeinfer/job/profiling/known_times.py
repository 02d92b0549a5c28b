"""Times that ranks keep for the next start, and when they time anew. Times nothing."""

import math
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from pipeinfer.disk_cache import user_cache

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

T = TypeVar("T")

SOURCE = "source"
"""A field that is not kept: whether times are from before is known by reading them."""


def known(
    link: "Link", key: str, kind: type[T], find: Callable[[], tuple[T | None, str]], ranks: Collection[int]
) -> tuple[list[tuple[T | None, str]], bool]:
    """Of every rank its value and why it has none, and whether the values were kept. If one of `ranks` has nothing kept
    under its `key`, all ranks time anew and keep the result. Collective.

    `key`: empty on ranks that have nothing to find. `kind`: a dataclass of seconds or speeds. `find`: collective.
    """
    kept = user_cache()
    found = link.all_gather((_read(kind, kept.get(key)) if key else None, ""))
    if all(found[rank][0] for rank in ranks):
        return found, True
    own, error = find()
    if own:
        kept.put(key, {name: getattr(own, name) for name in _names(kind)})
    return link.all_gather((own, error)), False


def _names(kind: Any) -> dict[str, Any]:
    """Fields that are kept -> their defaults."""
    return {field.name: field.default for field in fields(kind) if field.name != SOURCE}


def _read(kind: type[T], value: Any) -> T | None:
    """The value, if JSON has a positive number for each field, or null where that is the default."""
    names = _names(kind)
    if not isinstance(value, dict) or value.keys() != names.keys():
        return None
    given = [number for name, number in value.items() if number is not None or names[name] is not None]
    are_numbers = all(isinstance(number, float) and 0 < number < math.inf for number in given)
    return kind(**value) if are_numbers else None
