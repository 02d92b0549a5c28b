"""The integers between two bounds, as a grammar's rule. Knows no schema."""

from __future__ import annotations

import math
from typing import Any

MAX_DIGITS = 16
"""Of an integer whose schema gives no bound on this side: as many as the rule of plain integers writes."""


def bounds(schema: dict[str, Any]) -> tuple[int, int] | None:
    """The least and the greatest integer, both included; None where the schema gives no bound.

    Raises ValueError when no integer lies between.
    """
    least = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    least += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    most = [math.floor(schema["maximum"])] if "maximum" in schema else []
    most += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    if not least and not most:
        return None
    widest = 10 ** max(MAX_DIGITS, *(len(str(abs(each))) for each in (*least, *most))) - 1
    low, high = max(least, default=-widest), min(most, default=widest)
    if low > high:
        raise ValueError(f"no integer is at least {low} and at most {high}")
    return low, high


def rule(low: int, high: int) -> str:
    parts = [f'"-" ({_between(max(1, -high), -low)})'] if low < 0 else []
    parts += [_between(max(0, low), high)] if high >= 0 else []
    return " | ".join(parts)


def _between(low: int, high: int) -> str:
    """Those of as many digits together, the shorter first."""
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts.append(_digits(str(low), str(last)))
        low = last + 1
    return " | ".join(parts)


def _digits(low: str, high: str) -> str:
    """From `low` to `high`, which have as many digits: what both begin with, then the first digit they differ in."""
    n = len(low)
    if low == high:
        return f'"{low}"'
    if low[0] == high[0]:
        return f'"{low[0]}" ({_digits(low[1:], high[1:])})'
    if n == 1:
        return f"[{low}-{high}]"
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:] != "0" * (n - 1):
        parts.append(f'"{first}" ({_digits(low[1:], "9" * (n - 1))})')
        first += 1
    ends = high[1:] != "9" * (n - 1)
    if first <= last - ends:
        parts.append(f"[{first}-{last - ends}] [0-9]{{{n - 1}}}")
    if ends:
        parts.append(f'"{last}" ({_digits("0" * (n - 1), high[1:])})')
    return " | ".join(parts)
