"""A table of the original PipeInfer: no header, four columns, rows in threes. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.observe.columns import COLUMNS, NAMES, Record
from pipeinfer.observe.table import Line, check_count, value_of

FIGURES = COLUMNS[:4]
"""Tokens a second of prompt and of text, mean inter-token latency, time to first token."""

POLICIES = ("iterative", "speculative", "pipeinfer")
"""Of its rows, in turns; the original calls the first one sequential."""


def is_original(lines: Sequence[Line]) -> bool:
    return len(lines[0][1]) == len(FIGURES) and lines[0][1][0] not in NAMES


def original_rows(path: Path, lines: Sequence[Line]) -> list[Record]:
    """Rows with the four figures and a policy. Raises UserError, with the line, for whatever is no such row."""
    rows: list[Record] = []
    for index, (number, cells) in enumerate(lines):
        check_count(path, number, cells, len(FIGURES))
        pairs = zip(FIGURES, cells, strict=True)
        figures = {column.name: value_of(path, number, column, cell) for column, cell in pairs}
        rows.append(figures | {"policy": POLICIES[index % 3]})
    if len(rows) % 3:
        raise UserError(
            f"{path}, line {lines[-1][0]}: rows without a header come in threes ({', '.join(POLICIES)}), "
            f"not {len(rows)}"
        )
    return rows
