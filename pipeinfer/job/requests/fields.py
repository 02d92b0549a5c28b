"""Fields of a request in JSON: how each is read and refused. Knows no field's meaning."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pipeinfer.errors import UserError


@dataclass(slots=True)
class PassedOver:
    """What of a request is not served, although the request is: by field or part, the reason. `strict`: nothing is."""

    strict: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: str) -> None:
        """Raises UserError where nothing is passed over."""
        if self.strict:
            refuse(reason)
        self.reasons.setdefault(name, reason)


def flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        refuse(f"{name} is {shown(value)}; give true or false")
    return value


def without_null(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def text_of(name: str, value: Any, kinds: Sequence[Any], between: str = "\n") -> str:
    """A text, or a list of blocks of these kinds with one. `between`: two blocks; llama-server has a new line there."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(each, dict) and each.get("type") in kinds for each in value):
        refuse(f"{name} is {shown(value)}; give a text, or a list of parts of type {' or '.join(kinds)}")
    return between.join(str(each.get("text", "")) for each in value)


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def refuse(what: str) -> NoReturn:
    raise UserError(what)
