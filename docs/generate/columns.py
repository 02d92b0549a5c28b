"""The columns of results.csv and load.csv, for their reference pages."""

from __future__ import annotations

from collections.abc import Iterable

from docs.generate.markdown import table
from pipeinfer.observe.columns import COLUMNS, LOAD_COLUMNS, Column


def result_columns() -> str:
    return _table(COLUMNS)


def load_columns() -> str:
    return _table(LOAD_COLUMNS)


def _table(columns: Iterable[Column]) -> str:
    rows = ([f"`{each.name}`", each.kind, "yes" if each.asked else "", each.meaning] for each in columns)
    return table(["column", "kind", "asked", "meaning"], rows)
