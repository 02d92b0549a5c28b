"""Results as JSON text. Knows no fields: only that a figure which does not exist is NaN here and null there."""

import json
import math
from typing import Any


def json_text(result: Any) -> str:
    """One line. NaN, which JSON does not know, becomes null at any depth; raises ValueError for an infinite number."""
    return json.dumps(without_nan(result), allow_nan=False)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value
