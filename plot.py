#!/usr/bin/env python3
"""Draw the figures of an evaluation from results.csv, load.csv or a trace: `python plot.py [results.csv] [-o FOLDER]`.

Writes PNG, SVG and PDF files of every figure that the table has the data for. Of results.csv: generation speed, time to
first token, inter-token latency, speed per memory, ablations, prompts, distributions of the latencies and each rank's
time. Of load.csv (docs/how-to/measure.md): throughput and latencies over concurrency or rate, their distributions, how
busy the stages were. Of a trace (`run --trace trace.json`): what each rank did; of several, below each other over the
same time. Rows that differ in what was asked (docs/reference/results-csv.md) are in different panels. A table of the
original PipeInfer works too: no header, four columns, rows in threes (sequential, speculative, pipeinfer).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import take_streams
from pipeinfer.observe.columns import COLUMNS, LOAD_COLUMNS, Record
from pipeinfer.observe.table import LOADS, RESULTS, lines_of
from pipeinfer.outputs import whole_file

UNDATED: dict[str, dict[str, str | None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""The same table gives the same files."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        default=[Path("results.csv")],
        help="A table, or traces. [default: results.csv]",
    )
    parser.add_argument("-o", "--output", type=Path, help="Folder for the pictures. [default: beside the table]")
    parser.add_argument("--from", dest="from_ms", type=float, help="Of a trace: begin here (ms).")
    parser.add_argument("--for", dest="for_ms", type=float, help="Of a trace: draw this long (ms).")
    take_streams()  # the files are written even where nobody reads their names
    options = parser.parse_args()
    try:
        sources, folder = options.results, options.output or options.results[0].parent
        if all(source.suffix == ".json" for source in sources):
            write_timelines(sources, folder, options.from_ms, options.for_ms)
        elif options.from_ms is not None or options.for_ms is not None:
            raise UserError("--from and --for are of traces, which end in .json; leave them out")
        elif len(sources) > 1:
            raise UserError(f"{', '.join(map(str, sources))}: give one table, or traces, which end in .json")
        else:
            write_figures(sources[0], folder)
        return
    except ImportError as error:
        why = f"figures need matplotlib and pandas ({error}): pip install 'pipeinfer[plot]'"
    except UserError as error:
        why = str(error)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    print(f"plot.py: {why}", file=sys.stderr)
    sys.exit(2)


def write_figures(results: Path, folder: Path) -> None:
    """Raises UserError for a table that cannot be read, OSError for a folder that cannot be written, ImportError
    without matplotlib and pandas."""
    from plots.original import is_original, original_rows

    lines = list(lines_of(results))
    has_loads = LOADS.has_header(lines)
    if lines and is_original(lines):
        rows = original_rows(results, lines)
    else:
        rows = (LOADS if has_loads else RESULTS).read(results)
    if not rows:
        raise UserError(f"{results} has a header and no rows; nothing to draw")
    drawn = draw(rows, has_loads)
    for name, figure in drawn:
        write_figure(name, figure, folder)


def write_timelines(traces: Sequence[Path], folder: Path, from_ms: float | None, for_ms: float | None) -> None:
    """The same of traces, in files of their names."""
    from plots.timeline import draw_timelines

    if not (0 <= (from_ms or 0) < math.inf and 0 < (1 if for_ms is None else for_ms) < math.inf):
        raise UserError("--from is 0 or more, and --for above 0, both in milliseconds")
    write_figure("-".join(trace.stem for trace in traces), draw_timelines(traces, from_ms, for_ms), folder)


def write_figure(name: str, figure: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg", "pdf"):
        path = folder / f"{name}.{suffix}"
        with whole_file(path, "the figure") as file:
            figure.savefig(file, format=suffix, dpi=150, metadata=UNDATED.get(suffix))
        print(path)


def draw(rows: Iterable[Record], has_loads: bool) -> Iterator[tuple[str, Any]]:
    """(name, figure) of every figure that the rows have the data for; each is closed when the next is asked for."""
    from matplotlib import pyplot as plt  # takes a second, which a bad table need not wait for

    from plots import loads, results
    from plots.charts import STYLE
    from plots.frames import frame_of

    frame = frame_of(list(rows), LOAD_COLUMNS if has_loads else COLUMNS)
    with plt.rc_context(STYLE):
        for name, figure_of in (loads if has_loads else results).FIGURES.items():
            figure = figure_of(frame)
            if figure is not None:
                yield name, figure
                plt.close(figure)


if __name__ == "__main__":
    main()
