"""Tables of measurements in CSV files, results.csv and load.csv: rows are appended whole and read back."""

import contextlib
import csv
import errno
import fcntl
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.observe.columns import COLUMNS, LOAD_COLUMNS, Column, Record
from pipeinfer.outputs import check_writable, write_error
from pipeinfer.text import shortened

NO_LOCKS = errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK  # of file systems that are mounted without them
MAX_CELL = 1 << 16
Line = tuple[int, list[str]]  # the number of a row's line, from 1 on, and its cells


@dataclass(frozen=True)
class Table:
    """A kind of table. `columns` include `policy`, `model` and `ranks`."""

    columns: tuple[Column, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @cached_property
    def key(self) -> tuple[str, ...]:
        """Columns in which different measurements differ."""
        return tuple(column.name for column in self.columns if column.is_key)

    def key_of(self, row: Record) -> tuple[Any, ...]:
        """The key of a row as `read` gives it: rows of one key are the same measurement."""
        # NaN, an empty cell, does not equal itself
        return tuple(None if row[name] != row[name] else row[name] for name in self.key)

    def check(self, path: Path) -> None:
        """Raises UserError if no row can be appended: the file cannot be written, or it or one of its rows has other
        columns. Cells are not checked, and no file is left behind."""
        if os.path.exists(path):
            with _locked(path) as file:
                if self._check_appendable(path, file):
                    for number, cells in lines_of(path):
                        check_count(path, number, cells, len(self.columns))
        else:
            check_writable(path, "--results")

    def append(self, path: Path, row: Record) -> None:
        """Append a row, after a header if the file is empty; two jobs may write at once. Raises as `check`, and if the
        disk is full: the file is then as it was before. A job that is killed here at worst leaves a row cut off."""
        with _locked(path) as file:
            size = self._check_appendable(path, file)
            _write_whole(file, size, self._encode(row, with_header=not size))

    def as_read(self, row: Record) -> Record:
        """The row as `read` would return it."""
        return self._row(Path("row"), 1, [str(_cell(row.get(name, ""))) for name in self.names])

    def has_header(self, lines: Sequence[Line]) -> bool:
        return bool(lines) and tuple(lines[0][1]) == self.names

    def read(self, path: Path) -> list[Record]:
        """All rows, each cell of its column's kind, NaN for an empty number. Raises UserError with a bad row's line."""
        lines = list(lines_of(path))
        if not lines:
            raise UserError(f"{path} is empty; measure first, for instance with `pipeinfer bench --results {path}`")
        if not self.has_header(lines):
            raise UserError(f"{path}, line 1: not the header of this table; name another file")
        return [self._row(path, number, cells) for number, cells in lines[1:]]

    def _row(self, path: Path, number: int, cells: list[str]) -> Record:
        check_count(path, number, cells, len(self.columns))
        pairs = zip(self.columns, cells, strict=True)
        row = {column.name: value_of(path, number, column, cell) for column, cell in pairs}
        if not row["policy"] or not row["model"] or not row["ranks"] >= 1:
            raise UserError(f"{path}, line {number} lacks its policy, model or ranks; delete that line")
        return row

    def _check_appendable(self, path: Path, file: FileIO) -> int:
        """The size of the file. Raises UserError if no row can be appended to it."""
        size = file.seek(0, os.SEEK_END)
        if not size:
            return size
        file.seek(0)
        expected = ",".join(self.names)
        header = file.read(len(expected) + MAX_CELL).partition(b"\n")[0].decode("utf-8", "replace").strip()
        if header != expected:
            raise UserError(f"--results {path} has other columns; name a new file, nothing was written")
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            n_lines = file.readall().count(b"\n") + 1
            raise UserError(f"--results {path}, line {n_lines} is cut off; delete that line, nothing was written")
        return size

    def _encode(self, row: Record, with_header: bool) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if with_header:
            writer.writerow(self.names)
        writer.writerow([_cell(row.get(name, "")) for name in self.names])
        return text.getvalue().encode()


RESULTS, LOADS = Table(COLUMNS), Table(LOAD_COLUMNS)
"""results.csv, a row for each generation; load.csv, a row for each load."""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[FileIO]:
    """The file, unbuffered and locked until it is closed. Raises UserError for any OSError."""
    try:
        with path.open("a+b", buffering=0) as file:
            # over NFS too, Linux makes this a lock on the server; it ends with the process that holds it
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield file
    except OSError as error:
        raise write_error(path, "--results", error) from None


def _write_whole(file: FileIO, size: int, data: bytes) -> None:
    """Write all of the data after the first `size` bytes, or nothing: on a full disk the file gets its size back."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        # a device has no size
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def _cell(value: object) -> object:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)[:MAX_CELL]
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return list_text(value) if isinstance(value, list | tuple) else value


def list_text(values: Sequence[object]) -> str:
    """Joined with commas, whole numbers with all their digits."""
    return ",".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in values)


# -- reading


def lines_of(path: Path) -> Iterator[Line]:
    """Every row that is not blank. Raises UserError for a file that cannot be read, or is no table."""
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


def check_count(path: Path, number: int, cells: Sequence[str], n_columns: int) -> None:
    if len(cells) != n_columns:
        raise UserError(f"{path}, line {number} has {len(cells)} of {n_columns} columns; delete that line")


def value_of(path: Path, number: int, column: Column, cell: str) -> Any:
    """The value of a cell: a text, a number (NaN if empty), or a tuple of numbers."""
    try:
        if column.kind == "text":
            return cell
        if column.kind in ("integers", "numbers"):
            return tuple(number_of(column, part) for part in cell.split(",") if part)
        return number_of(column, cell) if cell else math.nan
    except ValueError:
        kind = "an integer" if column.kind.startswith("integer") else "a number"
        wrong = f"{path}, line {number}: {column.name} is {shortened(cell, 40)!r}"
        raise UserError(f"{wrong}, {kind} from 0 on is wanted; delete that line") from None


def number_of(column: Column, text: str) -> float:
    """Raises ValueError unless it is one that the column can have."""
    # int() and float() take 1_000 too
    value = math.nan if "_" in text else (int(text) if column.kind.startswith("integer") else float(text))
    # settings may be negative: penalties, and a top-k that is switched off
    if not (-math.inf if column.is_key else 0) <= value < math.inf:
        raise ValueError
    return value
