"""Fields of a request in JSON: how each is read and refused. Knows no field's meaning."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from pipeinfer.errors import UserError


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


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def refuse(what: str) -> NoReturn:
    raise UserError(what)
