"""Amounts, numbers, JSON and Markdown tables as text. Knows no field and no column."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any


def size_text(n_bytes: float) -> str:
    """`3.2 GB`, with at most three digits before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:
            return f"{n_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def count_text(n: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def milliseconds(value_s: float) -> str:
    return "-" if math.isnan(value_s) else f"{1e3 * value_s:.1f} ms"


def or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def without_suffixes(names: str) -> str:
    """Model names without `.gguf`. `names`: one, or several joined with +."""
    return "+".join(name.removesuffix(".gguf") for name in names.split("+"))


def labelled(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """A line for each (label, text); labels are padded to `width`."""
    return (f"{label:<{width}}{text}" for label, text in rows)


def json_text(value: Any) -> str:
    """One line of JSON, with null for NaN. Raises ValueError for an infinite number."""
    return json.dumps(without_nan(value), allow_nan=False)


def without_nan(value: Any) -> Any:
    """The same value with None for NaN at any depth."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right_aligned: Collection[str] = ()
) -> list[str]:
    """The lines of a table. A `|` in a cell, which would end it, becomes a `/`."""
    from tabulate import tabulate  # its import takes long, and most commands print no table

    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    sides = ["right" if column in right_aligned else "left" for column in columns]
    return tabulate(cells, columns, "pipe", disable_numparse=True, colalign=sides if cells else None).splitlines()
