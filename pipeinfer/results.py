"""results.csv: one row a run, PipeInfer's four figures first, then named columns. Knows files, no ranks."""

from __future__ import annotations

import csv
import fcntl
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError

COLUMNS = (
    "prompt_per_second",
    "predicted_per_second",
    "itl_mean_s",
    "ttft_s",
    "policy",
    "model",
    "model_draft",
    "ranks",
    "layers",
    "threads",
    "prompt_n",
    "predicted_n",
    "seed",
    "numerics",
    "acceptance_rate",
    "accepted_length",
    "tpot_s",
    "itl_p50_s",
    "itl_p95_s",
    "itl_p99_s",
    "runs",
    "runs_cancelled",
    "peak_rss_bytes",
    "date",
    "hosts",
)


def result_row(result: dict[str, Any], model: Path, model_draft: Path | None) -> dict[str, Any]:
    """The columns of one run's result object (what `--json` prints)."""
    ranks = result["ranks"]
    known = result["timings"] | result["speculation"] | result
    return {name: known[name] for name in COLUMNS if name in known} | {
        "model": model.name,
        "model_draft": model_draft.name if model_draft else "",
        "ranks": len(ranks),
        "layers": ",".join(str(r["layers"][1] - r["layers"][0]) for r in ranks if r["layers"]),
        "threads": ",".join(str(r["threads"]) for r in ranks),
        "peak_rss_bytes": ",".join(str(r.get("peak_rss_bytes", "")) for r in ranks),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": ",".join(r["host"] for r in ranks),
    }


def check_results(path: Path) -> None:
    """Raises UserError when a row could not be appended: the file cannot be written or has other columns."""
    _append(path, None)


def append_result(path: Path, result: dict[str, Any], model: Path, model_draft: Path | None) -> None:
    """Append a row, after a header in an empty file; safe when two jobs write at once. Raises as `check_results`."""
    _append(path, result_row(result, model, model_draft))


def _append(path: Path, row: dict[str, Any] | None) -> None:
    try:
        with path.open("a+", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            header = next(csv.reader(file), None)
            if header is not None and tuple(header) != COLUMNS:
                raise UserError(f"--results {path} has other columns; name a new file, nothing was written")
            file.seek(0, os.SEEK_END)
            writer = csv.DictWriter(file, COLUMNS)
            if row is not None and header is None:
                writer.writeheader()
            if row is not None:
                writer.writerow(row)
    except OSError as error:
        raise UserError(f"--results {path}: {error.strerror}") from None
