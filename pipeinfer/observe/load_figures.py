"""The figures of loads from the rows of load.csv: throughput and latencies over how many ask, their distributions, how
busy the stages were. Draws; measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from pipeinfer.observe.charts import STYLE, cdf, head, legend, note, panels
from pipeinfer.observe.facets import SHOWN, Bar, Series, by_ranks, count_text, grouped, pooled_text, series_of
from pipeinfer.observe.load_columns import LOADS
from pipeinfer.observe.loads import busiest
from pipeinfer.observe.looks import Look, looks
from pipeinfer.observe.table import Record

POINTS = {"concurrency": "clients at a time", "rate": "requests a second"}
FACETS = tuple(name for name in LOADS.asked if name not in (*SHOWN, *POINTS))
MS = 1e3

Values = Callable[[Bar], list[float]]


class Kind(NamedTuple):
    """One of the lines of a policy: how it is drawn, and its markers filled."""

    label: str
    dashes: str
    fill: Literal["full", "left", "none"]


SHARES = {"50": Kind("median", "-", "full"), "90": Kind("90th percentile", "--", "left"),
          "99": Kind("99th percentile", ":", "none")}  # fmt: skip
MEAN, BUSIEST = Kind("mean over the stages", "-", "full"), Kind("busiest stage", "--", "none")
WHOLE = Kind("", "-", "full")


def curves(rows: Sequence[Record]) -> Figure | None:
    """Throughput and latencies over concurrency or rate."""
    settings = list(_settings(rows))
    if not settings:
        return None
    figure, axes = panels(4 * len(settings), columns=2, width=4.6)
    shown = _looks(settings)
    drawn = list[Bar]()
    for at, (title, point, found) in enumerate(settings):
        series = series_of(found)
        first, *others = axes[4 * at : 4 * at + 4]
        drawn += _lines(first, point, series, shown, partial(_scaled, "predicted_per_second", 1.0), WHOLE)
        _label(first, title, point, found, "throughput (tokens/s)")
        for panel, (name, meaning) in zip(others, (("ttft", "time to first token"), ("tpot", "time per output token"),
                                                 ("itl", "inter-token latency")), strict=True):  # fmt: skip
            for share, kind in SHARES.items():
                _lines(panel, point, series, shown, partial(_scaled, f"{name}_p{share}_s", MS), kind)
            _label(panel, title, point, found, f"{meaning} (ms)")
    _tell_kinds(axes[1], SHARES.values())
    legend(figure)
    note(figure, f"{_note_on(drawn)}{_asked_text(rows)}")
    return figure


def cdfs(rows: Sequence[Record]) -> Figure | None:
    """Distributions of TTFT, over requests, and of ITL, over all gaps; a line of panels a load."""
    settings = list(_settings(rows))
    shown = _looks(settings)
    loads = [
        (f"{title}, {_point_text(point, value)}", members)
        for title, point, found in settings
        for value, members in sorted(grouped(found, _reader(point)).items())
    ]
    if not loads:
        return None
    figure, axes = panels(2 * len(loads), columns=2, width=4.6)
    drawn = list[Bar]()
    for at, (title, members) in enumerate(loads):
        series = series_of(members)
        drawn += series.values()
        for panel, name, words, of in (
            (axes[2 * at], "ttft_percentiles_s", "time to first token (ms)", "requests"),
            (axes[2 * at + 1], "itl_percentiles_s", "inter-token latency (ms)", "tokens"),
        ):
            for label, rows_of_it in series.items():
                cdf(panel, sorted(MS * each for row in rows_of_it for each in row[name]), label, shown[label])
            head(panel, title)
            panel.grid(True, axis="both")
            panel.set_ylim(0, 1.02)
            panel.set_xlim(left=0)
            panel.set_xlabel(words)
            panel.set_ylabel(f"share of {of}")
    legend(figure)
    alone = all(len(bar) == 1 for bar in drawn)
    note(figure, f"Each curve {'is one load' if alone else f'pools {_counts(drawn)}'}, drawn through 101 percentiles."
                 f"{_asked_text(rows)}")  # fmt: skip
    return figure


def utilisation(rows: Sequence[Record]) -> Figure | None:
    """How busy the stages were over concurrency or rate."""
    settings = list(_settings([row for row in rows if row["busy"]]))
    if not settings:
        return None
    figure, axes = panels(len(settings), width=4.6)
    shown = _looks(settings)
    drawn = list[Bar]()
    for panel, (title, point, found) in zip(axes, settings, strict=True):
        series = series_of(found)
        drawn += _lines(panel, point, series, shown, _mean_busy, MEAN)
        _lines(panel, point, series, shown, _busiest, BUSIEST)
        _label(panel, title, point, found, "share of the time spent on runs (%)")
        panel.set_ylim(0, 102)
    _tell_kinds(axes[0], (MEAN, BUSIEST))
    legend(figure)
    note(figure, f"{_note_on(drawn)} From the first token to the last; cancelled runs count.{_asked_text(rows)}")
    return figure


FIGURES = {"load_curves": curves, "load_cdfs": cdfs, "load_utilisation": utilisation}


def draw_loads(rows: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure; each is closed when the next is asked for."""
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(rows)
            if figure is not None:
                yield name, figure
                plt.close(figure)


def _settings(rows: Sequence[Record]) -> Iterator[tuple[str, str, list[Record]]]:
    """(title, by what its requests come, rows) of each panel."""
    for point in POINTS:
        found = [row for row in rows if (row["concurrency"] > 0) == (point == "concurrency")]
        for title, members in by_ranks(found, FACETS).items():
            yield title, point, members


def _point_text(point: str, value: float) -> str:
    return f"{value:g} {'client' if value == 1 else 'clients'}" if point == "concurrency" else f"{value:g} requests/s"


def _looks(settings: Iterable[tuple[str, str, Sequence[Record]]]) -> dict[str, Look]:
    return looks(series_of(found) for _, _, found in settings)


def _scaled(name: str, scale: float, rows: Bar) -> list[float]:
    return [scale * float(row[name]) for row in rows]


def _mean_busy(rows: Bar) -> list[float]:
    return [100 * statistics.fmean(row["busy"]) for row in rows]


def _busiest(rows: Bar) -> list[float]:
    return [100 * share for share in busiest([row["busy"] for row in rows])]


def _lines(panel: Axes, point: str, series: Series, shown: dict[str, Look], values_of: Values, kind: Kind) -> list[Bar]:
    """A line a label through the means of its loads, with their deviations. Returns what each mean pools."""
    pooled, by_point = list[Bar](), _reader(point)
    for label, rows_of_it in series.items():
        look, members = shown[label], sorted(grouped(rows_of_it, by_point).items())
        values = [[each for each in values_of(rows) if not math.isnan(each)] for _, rows in members]
        at = [(x, found) for (x, _), found in zip(members, values, strict=True) if found]
        means = [statistics.fmean(found) for _, found in at]
        spread = [statistics.stdev(found) if len(found) > 1 else 0.0 for _, found in at]
        places = [x for x, _ in at]
        panel.plot(
            places, means, color=look.colour, linestyle=kind.dashes, marker=look.marker, ms=4.5, lw=1.4,
            fillstyle=kind.fill, markerfacecoloralt="white", label=label if kind.dashes == "-" else None,
        )  # fmt: skip
        if any(spread):
            below = [min(*pair) for pair in zip(spread, means, strict=True)]
            panel.errorbar(places, means, [below, spread], color=look.colour, linestyle="", capsize=2, lw=0.9)
        pooled += [rows for _, rows in members]
    return pooled


def _reader(point: str) -> Callable[[Record], float]:
    return lambda row: float(row[point])


def _label(panel: Axes, title: str, point: str, rows: Sequence[Record], label: str) -> None:
    """Ticks are where something was measured."""
    measured = sorted(set(map(_reader(point), rows)))
    panel.set_xscale("log", base=2)
    panel.set_xticks(measured, [f"{x:g}" for x in measured])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(True, axis="both")
    panel.set_ylim(0, 1.04 * panel.get_ylim()[1])
    panel.set_xlabel(POINTS[point])
    panel.set_ylabel(label)
    head(panel, title)


def _tell_kinds(panel: Axes, kinds: Iterable[Kind]) -> None:
    """What the kinds of lines are, for the legend."""
    for label, dashes, fill in kinds:
        panel.plot([], [], color="#444444", linestyle=dashes, marker="o", ms=4.5, lw=1.4, fillstyle=fill,
                   markerfacecoloralt="white", label=label)  # fmt: skip


def _counts(bars: Sequence[Bar]) -> str:
    over = pooled_text(bars)
    return f"{count_text(bars)} loads" + (f" ({over})" if over else "")


def _note_on(bars: Sequence[Bar]) -> str:
    if all(len(bar) == 1 for bar in bars):
        return "Each point is one load."
    return f"Points: means over {_counts(bars)}; whiskers: one sample standard deviation of these."


def _asked_text(rows: Sequence[Record]) -> str:
    """How much a load asks for; what differs stands in titles."""
    words = {"n_requests": ("request", "requests"), "predict": ("token", "tokens")}
    counts = {name: sorted({row[name] for row in rows}) for name in words}
    n_requests, n_tokens = (
        f"{min(found)}{f' to {max(found)}' if len(found) > 1 else ''} {words[name][found != [1]]}"
        for name, found in counts.items()
    )
    return f" A load: {n_requests}, {n_tokens} each."
