"""Amounts, numbers, JSON and Markdown tables as text. Knows no field and no column."""

import json
import math
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, groupby
from typing import Any
from unicodedata import category

from pipeinfer.launchers import terminal_width


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


def shortened(text: str, n_most: int = 60) -> str:
    """Its first `n_most` characters, and a mark if there are more."""
    return text if len(text) <= n_most else f"{text[:n_most]}…"


def printable(text: str) -> str:
    """With ? for what a terminal acts on: files from elsewhere may have it."""
    return "".join(sign if sign.isprintable() or category(sign) == "Zs" else "?" for sign in text)


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


def printed(lines: Iterable[str]) -> str:
    """The lines as stdout takes them: a terminal gets tables of its width, also through a launcher; a pipe or a file
    gets them whole."""
    width = terminal_width(1)
    return "\n".join(narrowed(lines, width) if width else lines)


def narrowed(lines: Iterable[str], width: int) -> Iterator[str]:
    """Lines with each Markdown table that is wider as several, one below the other. All begin with the columns that
    tell rows apart; what does not fit beside them stands alone with them, its cells on several lines where they have
    spaces."""
    for is_table, group in groupby(lines, lambda line: line.startswith("|")):
        block = list(group)
        if not is_table or len(block[0]) <= width:
            yield from block
            continue
        columns = list(zip(*(line[1:-1].split("|") for line in block), strict=True))
        first = _names(columns)
        parts = [first]
        for column in columns:
            if column in first:
                continue
            if len(parts[-1]) > len(first) and 1 + sum(1 + len(each[0]) for each in [*parts[-1], column]) > width:
                parts.append(first)
            parts[-1] = [*parts[-1], column]
        for index, part in enumerate(parts):
            yield from [""] * bool(index)
            rows: Iterable[tuple[str, ...]] = zip(*part, strict=True)
            room = width - 1 - sum(1 + len(each[0]) for each in part[:-1])
            rows = _wrapped(rows, room - 3) if 1 + len(part[-1][0]) > room else rows
            yield from (f"|{'|'.join(cells)}|" for cells in rows)


def _wrapped(rows: Iterable[tuple[str, ...]], width: int) -> Iterator[tuple[str, ...]]:
    """A table's rows, the last cell of each on as many lines of `width` as it takes, where the others are empty."""
    head, ruler, *others = rows
    wrap = textwrap.TextWrapper(max(1, width), break_long_words=False, break_on_hyphens=False).wrap
    texts = [wrap(row[-1].strip()) or [""] for row in (head, *others)]
    n_wide = max(len(line) for lines in texts for line in lines)
    is_right = ruler[-1].endswith(":")
    for row, lines in zip((head, *others), texts, strict=True):
        blank = tuple(" " * len(cell) for cell in row[:-1])
        for index, line in enumerate(lines):
            yield (*(blank if index else row[:-1]), f" {line.rjust(n_wide) if is_right else line.ljust(n_wide)} ")
        if row is head:
            yield (*ruler[:-1], ruler[-1][: n_wide + 1] + ":" if is_right else ruler[-1][: n_wide + 2])


def _names(columns: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of a table's columns with their heads the fewest that tell its rows apart: the first, else of those with texts,
    the last before others, as what is compared stands behind what is common; else the first."""
    texts = [column for column in columns if not column[1].endswith(":")]
    candidates = [(columns[0],), *(names for n in (1, 2, 3) for names in combinations(reversed(texts), n))]
    n_rows = len(columns[0]) - 2
    apart = (names for names in candidates if len(set(zip(*(name[2:] for name in names), strict=True))) == n_rows)
    return list(next(apart, candidates[0]))[::-1]
