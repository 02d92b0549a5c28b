"""results.csv: one row a generation, with the columns of `columns`. Knows files, no ranks."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import math
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.observe.columns import ASKED, COLUMNS, FIGURES, NAMES, Column
from pipeinfer.outputs import check_writable, write_error

ORIGINAL_POLICIES = ("iterative", "speculative", "pipeinfer")
"""Of a headerless file's rows, in threes; the original calls the first one sequential."""

HEADER = ",".join(NAMES)
MAX_CELL = 1 << 16
Record = dict[str, Any]
"""A row of results.csv: the name of a column -> its cell."""


def result_row(result: dict[str, Any], asked: Record) -> Record:
    """The columns of one generation: what was asked for, and what its result object (what `--json` prints) measured."""
    ranks, hops = result["ranks"], result["wire"]["hops"]
    known = result["timings"] | result["speculation"] | {"version": result["version"]}
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


def key_of(row: Record) -> tuple[Any, ...]:
    """What was asked, of a row as it is read: two measurements with one key are the same one."""
    # NaN, an empty cell, does not equal itself
    return tuple(None if row[name] != row[name] else row[name] for name in ASKED)


def check_results(path: Path) -> None:
    """Raises UserError when a row could not be appended: the file cannot be written or has other columns; and when a
    row of it has: what would be measured could not be read back. The cells are not looked at.

    Leaves nothing behind.
    """
    if not path.exists():
        check_writable(path, "--results")
        return
    with _locked(path) as file:
        if _check_appendable(path, file):
            for number, cells in _lines(path):
                _check_count(path, number, cells, len(COLUMNS))


def append_result(path: Path, row: Record) -> None:
    """Append a row, after a header in an empty file; safe when two jobs write at once. Raises as `check_results`, and
    when there is no room for the row: then the file is as it was before.

    A job that is killed here leaves a row cut off at worst, never two mixed.
    """
    with _locked(path) as file:
        size = _check_appendable(path, file)
        _write_whole(file, size, _encode(row, with_header=not size))


def as_read(row: Record) -> Record:
    """A row as `read_results` would give it after it was appended."""
    return _row(Path("row"), 1, [str(_cell(row.get(name, ""))) for name in NAMES])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    """The file, unbuffered and locked until it is closed. Raises UserError for any OSError."""
    try:
        with path.open("a+b", buffering=0) as file:
            # over NFS too, Linux makes this a lock on the server; it ends with the process that holds it
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
    except OSError as error:
        raise write_error(path, "--results", error) from None


def _check_appendable(path: Path, file: FileIO) -> int:
    """The size of a file to which a row can be appended. Raises UserError when it is none."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return size
    file.seek(0)
    header = file.read(len(HEADER) + MAX_CELL).partition(b"\n")[0].decode("utf-8", "replace").strip()
    if header != HEADER:
        raise UserError(f"--results {path} has other columns; name a new file, nothing was written")
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        n_lines = file.readall().count(b"\n") + 1
        raise UserError(f"--results {path}, line {n_lines} is cut off; delete that line, nothing was written")
    return size


def _write_whole(file: FileIO, size: int, data: bytes) -> None:
    """All of the data behind the first `size` bytes, or none: on a full disk the file gets its size back."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        # a device has no size
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def _encode(row: Record, with_header: bool) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if with_header:
        writer.writerow(NAMES)
    writer.writerow([_cell(row.get(name, "")) for name in NAMES])
    return text.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)[:MAX_CELL]
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    if isinstance(value, list | tuple):
        return ",".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in value)
    return value


# -- reading


def read_results(path: Path) -> list[Record]:
    """All rows, each cell of its column's kind, lists as tuples; a number is NaN where its cell is empty.

    Also the original's four columns without a header: such rows have no more than the four figures and a policy. Raises
    UserError, naming the line, for whatever is no such row.
    """
    lines = list(_lines(path))
    if not lines:
        raise UserError(f"{path} is empty; measure first, for instance with `pipeinfer bench --results {path}`")
    (_, first), rest = lines[0], lines[1:]
    if tuple(first) == NAMES:
        return [_row(path, number, cells) for number, cells in rest]
    if len(first) == len(FIGURES) and all(_is_number(cell) for cell in first):
        return _original_rows(path, lines)
    raise UserError(f"{path}, line 1: neither the header of a results.csv nor four numbers; name another file")


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, cells) of every row that is not blank."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(data.split(b"\n"), start=1):
        # a row is a line: no cell that this program writes has a line break
        try:
            cells = next(csv.reader([line.decode().rstrip("\r")], strict=True), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, line {number}: {error}; delete that line") from None
        if cells:
            yield number, cells


def _row(path: Path, number: int, cells: list[str]) -> Record:
    _check_count(path, number, cells, len(COLUMNS))
    row = {column.name: _value(path, number, column, cell) for column, cell in zip(COLUMNS, cells, strict=True)}
    if not row["policy"] or not row["model"] or not row["ranks"] >= 1:
        raise UserError(f"{path}, line {number} lacks its policy, model or ranks; delete that line")
    return row


def _check_count(path: Path, number: int, cells: Sequence[str], n_columns: int) -> None:
    if len(cells) != n_columns:
        raise UserError(f"{path}, line {number} has {len(cells)} of {n_columns} columns; delete that line")


def _original_rows(path: Path, lines: Sequence[tuple[int, list[str]]]) -> list[Record]:
    rows = []
    for index, (number, cells) in enumerate(lines):
        _check_count(path, number, cells, len(FIGURES))
        pairs = zip(COLUMNS[: len(FIGURES)], cells, strict=True)
        figures = {column.name: _value(path, number, column, cell) for column, cell in pairs}
        rows.append(figures | {"policy": ORIGINAL_POLICIES[index % 3]})
    if len(rows) % 3:
        policies = ", ".join(ORIGINAL_POLICIES)
        raise UserError(
            f"{path}, line {lines[-1][0]}: rows without a header come in threes ({policies}), not {len(rows)}"
        )
    return rows


def _value(path: Path, number: int, column: Column, cell: str) -> Any:
    """A cell as its column has it: a text, a number (NaN if empty), or a tuple of numbers."""
    try:
        if column.kind == "text":
            return cell
        if column.kind in ("integers", "numbers"):
            return tuple(_number(column, part) for part in cell.split(",") if part)
        return _number(column, cell) if cell else math.nan
    except ValueError:
        shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
        wanted = "an integer" if column.kind.startswith("integer") else "a number"
        raise UserError(
            f"{path}, line {number}: {column.name} is {shown!r}, {wanted} from 0 on is wanted; delete that line"
        ) from None


def _number(column: Column, text: str) -> float:
    """Raises ValueError unless it is one that the column can have."""
    # int() and float() take 1_000 too
    value = math.nan if "_" in text else (int(text) if column.kind.startswith("integer") else float(text))
    # what is asked may be negative: penalties, and a top-k that is switched off
    if not (-math.inf if column.asked else 0) <= value < math.inf:
        raise ValueError
    return value


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(_number(COLUMNS[0], cell))
    except ValueError:
        return False
