#!/usr/bin/env python3
"""Draw the figures of an evaluation from results.csv or load.csv: `python plot.py [results.csv] [-o FOLDER]`.

Generation speed, time to first token, inter-token latency, speed per memory, ablations, prompts, distributions of the
latencies and each rank's time, as far as the table has the data; PNG, SVG and PDF. Bars are means, whiskers sample
standard deviations; rows that differ in a column that is asked (docs/reference/results-csv.md) get panels of their
own. A headerless file of the original PipeInfer works too: four columns, rows in threes (sequential, speculative,
pipeinfer). Of a table of loads (docs/how-to/measure.md): throughput and latencies over concurrency or rate, their
distributions, how busy the stages were.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import take_streams
from pipeinfer.observe.load_columns import LOADS
from pipeinfer.observe.results import read_results
from pipeinfer.observe.table import lines_of
from pipeinfer.outputs import whole_file

UNDATED: dict[str, dict[str, str | None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The same table gives the same files."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="?", type=Path, default=Path("results.csv"), help="[default: results.csv]")
    parser.add_argument("-o", "--output", type=Path, help="Folder for the pictures. [default: beside the table]")
    take_streams()  # names that nobody reads are no loss: the files are written all the same
    options = parser.parse_args()
    try:
        write_figures(options.results, options.output or options.results.parent)
    except UserError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}")


def _refuse(why: str) -> NoReturn:
    print(f"plot.py: {why}", file=sys.stderr)
    sys.exit(2)


def write_figures(results: Path, folder: Path) -> None:
    """Raises UserError for a table that cannot be read, OSError for a folder that cannot be written."""
    lines = list(lines_of(results))
    has_loads = LOADS.has_header(lines)
    rows = LOADS.rows(results, lines) if has_loads else read_results(results)
    if not rows:
        raise UserError(f"{results} has a header and no rows; nothing to draw")
    from pipeinfer.observe.figures import draw_all  # matplotlib takes a second: a bad table need not wait for it
    from pipeinfer.observe.load_figures import draw_loads

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in (draw_loads if has_loads else draw_all)(rows):
        for suffix in (".png", ".svg", ".pdf"):
            path = folder / f"{name}{suffix}"
            with whole_file(path, "the figure") as file:
                figure.savefig(file, format=suffix.removeprefix("."), dpi=150, metadata=UNDATED.get(suffix))
            print(path)


if __name__ == "__main__":
    main()
