"""results.csv: one row a generation, with the columns of `columns`. Knows no ranks; how it lies in a file: `table`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pipeinfer import __version__
from pipeinfer.core.requests import Request
from pipeinfer.errors import UserError
from pipeinfer.observe.columns import COLUMNS, FIGURES, NAMES
from pipeinfer.observe.metrics import RequestMetrics, speculation, timings
from pipeinfer.observe.table import Line, Record, Table, check_count, lines_of, number_of, value_of

ORIGINAL_POLICIES = ("iterative", "speculative", "pipeinfer")
"""Of a headerless file's rows, in threes; the original calls the first one sequential."""

RESULTS = Table(COLUMNS)
key_of, check_results, append_result, as_read = RESULTS.key_of, RESULTS.check, RESULTS.append, RESULTS.as_read


def result_object(
    request: Request, metrics: RequestMetrics, asked: Record, shown: Sequence[str], text: str = "", **others: Any
) -> dict[str, Any]:
    """What one generation gave, as `--json` prints it. `shown`: the columns of `asked` that it has; `others`: what only
    a real or only a simulated one knows, the ranks among it."""
    return {
        "text": text,
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        **{name: asked[name] for name in shown},
        "version": __version__,
        "timings": timings(metrics),
        "speculation": speculation(metrics),
        **others,
    }


def result_row(result: dict[str, Any], asked: Record) -> Record:
    """The columns of one generation: what was asked for, and what its result object (what `--json` prints) measured."""
    ranks, hops = result["ranks"], result["wire"]["hops"]
    known = result["timings"] | result["speculation"] | {"version": result["version"]}
    known["prompt_n"] = known["prompt_n"] + known["cache_n"]
    lists = [column.name for column in COLUMNS if column.name in ranks[0] and not column.asked]
    return asked | {name: known[name] for name in NAMES if name in known} | {
        name: [rank.get(name, "") for rank in ranks] for name in lists
    } | {
        "messages": sum(hop["messages"] for hop in hops),
        "message_bytes": sum(hop["bytes"] for hop in hops),
        "cancel_messages": result["wire"]["cancel_messages"],
        "roles": ";".join(rank["role"] for rank in ranks),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": ",".join(rank["host"] for rank in ranks),
    }  # fmt: skip


def read_results(path: Path) -> list[Record]:
    """All rows, as `Table.rows` has them.

    Also the original's four columns without a header: such rows have no more than the four figures and a policy. Raises
    UserError, naming the line, for whatever is no such row.
    """
    lines = list(lines_of(path))
    if not lines:
        raise UserError(f"{path} is empty; measure first, for instance with `pipeinfer bench --results {path}`")
    if RESULTS.has_header(lines):
        return RESULTS.rows(path, lines)
    _, first = lines[0]
    if len(first) == len(FIGURES) and all(_is_number(cell) for cell in first):
        return _original_rows(path, lines)
    raise UserError(f"{path}, line 1: neither the header of a results.csv nor four numbers; name another file")


def _original_rows(path: Path, lines: Sequence[Line]) -> list[Record]:
    rows = []
    for index, (number, cells) in enumerate(lines):
        check_count(path, number, cells, len(FIGURES))
        pairs = zip(COLUMNS[: len(FIGURES)], cells, strict=True)
        figures = {column.name: value_of(path, number, column, cell) for column, cell in pairs}
        rows.append(figures | {"policy": ORIGINAL_POLICIES[index % 3]})
    if len(rows) % 3:
        policies = ", ".join(ORIGINAL_POLICIES)
        raise UserError(
            f"{path}, line {lines[-1][0]}: rows without a header come in threes ({policies}), not {len(rows)}"
        )
    return rows


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(number_of(COLUMNS[0], cell))
    except ValueError:
        return False
