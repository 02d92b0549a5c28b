"""results.csv: one row a generation, PipeInfer's four figures first, then named columns. Knows files, no ranks."""

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
from pipeinfer.outputs import check_writable, write_error

FIGURES = ("prompt_per_second", "predicted_per_second", "itl_mean_s", "ttft_s")
"""The original's columns: tokens a second of prompt and of text, mean inter-token latency, time to first token."""

NUMBERS = (
    *FIGURES,
    "model_bytes", "model_draft_bytes", "ranks", "prompt_n", "predicted_n", "seed", "temp", "repetition",
    "acceptance_rate", "accepted_length", "draft_n", "tpot_s", "itl_p50_s", "itl_p95_s", "itl_p99_s", "total_s",
    "runs", "runs_cancelled", "messages", "message_bytes", "cancel_messages",
)  # fmt: skip
LISTS = (
    "layers", "threads", "rss_bytes", "peak_rss_bytes", "busy_s", "cancelled_s", "waiting_s", "idle_s",
    "itl_percentiles_s",
)  # fmt: skip
"""Numbers with commas between them, one a rank; `itl_percentiles_s`: every percentile of the latencies, 0 to 100."""

COLUMNS = (
    *FIGURES,
    "policy", "variant", "settings", "model", "model_bytes", "quantisation", "model_draft", "model_draft_bytes",
    "quantisation_draft", "ranks", "layers", "threads", "prompt", "prompt_n", "predicted_n", "seed", "temp",
    "numerics", "pace", "repetition", "acceptance_rate", "accepted_length", "draft_n", "tpot_s", "itl_p50_s",
    "itl_p95_s", "itl_p99_s", "itl_percentiles_s", "total_s", "runs", "runs_cancelled", "messages", "message_bytes",
    "cancel_messages", "rss_bytes", "peak_rss_bytes", "busy_s", "cancelled_s", "waiting_s", "idle_s", "version",
    "date", "hosts",
)  # fmt: skip

ORIGINAL_POLICIES = ("iterative", "speculative", "pipeinfer")
"""Of a headerless file's rows, in threes; the original calls the first one sequential."""

HEADER = ",".join(COLUMNS)
MAX_CELL = 1 << 16
Row = dict[str, Any]


def result_row(result: dict[str, Any], prompt: str = "", repetition: int = 0) -> Row:
    """The columns of one generation's result object (what `--json` prints). `prompt` is a name for its prompt."""
    ranks, model, draft = result["ranks"], result["model"], result["model_draft"] or {}
    hops = result["wire"]["hops"]
    known = result["timings"] | result["speculation"] | result
    per_rank = {name: _joined(rank.get(name, "") for rank in ranks) for name in LISTS if name in ranks[0]}
    return {name: known[name] for name in COLUMNS if name in known} | per_rank | {
        "model": model["name"],
        "model_bytes": model["bytes"],
        "quantisation": model["quantisation"],
        "model_draft": draft.get("name", ""),
        "model_draft_bytes": draft.get("bytes", ""),
        "quantisation_draft": draft.get("quantisation", ""),
        "ranks": len(ranks),
        "layers": _joined(rank["layers"][1] - rank["layers"][0] for rank in ranks if rank["layers"]),
        "prompt": prompt,
        "repetition": repetition,
        "itl_percentiles_s": _joined(known["itl_percentiles_s"]),
        "messages": sum(hop["messages"] for hop in hops),
        "message_bytes": sum(hop["bytes"] for hop in hops),
        "cancel_messages": result["wire"]["cancel_messages"],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": ",".join(rank["host"] for rank in ranks),
    }  # fmt: skip


def check_results(path: Path) -> None:
    """Raises UserError when a row could not be appended: the file cannot be written or has other columns.

    Leaves nothing behind.
    """
    if not path.exists():
        check_writable(path, "--results")
        return
    with _locked(path) as file:
        _check_appendable(path, file)


def append_result(path: Path, row: Row) -> None:
    """Append a row, after a header in an empty file; safe when two jobs write at once. Raises as `check_results`, and
    when there is no room for the row: then the file is as it was before.

    A job that is killed here leaves a row cut off at worst, never two mixed.
    """
    with _locked(path) as file:
        size = _check_appendable(path, file)
        _write_whole(file, size, _encode(row, with_header=not size))


def as_read(row: Row) -> Row:
    """A row as `read_results` would give it after it was appended."""
    return _row(Path("row"), 1, [str(_cell(row.get(name, ""))) for name in COLUMNS])


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


def _encode(row: Row, with_header: bool) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if with_header:
        writer.writerow(COLUMNS)
    writer.writerow([_cell(row.get(name, "")) for name in COLUMNS])
    return text.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)[:MAX_CELL]
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return value


def _joined(values: Iterator[Any] | Sequence[Any]) -> str:
    return ",".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)


# -- reading


def read_results(path: Path) -> list[Row]:
    """All rows, numbers as float (NaN where a cell is empty), lists as tuples of float.

    Also the original's four columns without a header: such rows have no more than the four figures and a policy. Raises
    UserError, naming the line, for whatever is no such row.
    """
    lines = list(_lines(path))
    if not lines:
        raise UserError(f"{path} is empty; measure first, for instance with `pipeinfer bench --results {path}`")
    (_, first), rest = lines[0], lines[1:]
    if tuple(first) == COLUMNS:
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


def _row(path: Path, number: int, cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise UserError(f"{path}, line {number} has {len(cells)} of {len(COLUMNS)} columns; delete that line")
    row: Row = dict(zip(COLUMNS, cells, strict=True))
    for name in NUMBERS:
        row[name] = _number(path, number, name, row[name]) if row[name] else math.nan
    for name in LISTS:
        row[name] = tuple(_number(path, number, name, part) for part in row[name].split(",") if part)
    if not row["policy"] or not row["model"] or not row["ranks"] >= 1:
        raise UserError(f"{path}, line {number} lacks its policy, model or ranks; delete that line")
    return row


def _original_rows(path: Path, lines: Sequence[tuple[int, list[str]]]) -> list[Row]:
    rows = []
    for index, (number, cells) in enumerate(lines):
        if len(cells) != len(FIGURES):
            raise UserError(f"{path}, line {number} has {len(cells)} of {len(FIGURES)} columns; delete that line")
        figures = (_number(path, number, name, cell) for name, cell in zip(FIGURES, cells, strict=True))
        rows.append(dict(zip(FIGURES, figures, strict=True)) | {"policy": ORIGINAL_POLICIES[index % 3]})
    if len(rows) % 3:
        policies = ", ".join(ORIGINAL_POLICIES)
        raise UserError(
            f"{path}, line {lines[-1][0]}: rows without a header come in threes ({policies}), not {len(rows)}"
        )
    return rows


def _number(path: Path, number: int, name: str, cell: str) -> float:
    if not _is_number(cell) or not 0 <= float(cell) < math.inf:
        shown = cell if len(cell) <= 40 else f"{cell[:40]}…"
        raise UserError(f"{path}, line {number}: {name} is {shown!r}, a number from 0 on is wanted; delete that line")
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
