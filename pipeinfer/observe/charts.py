"""Panels, bars with whiskers, distributions, stacks: what figures are made of. Knows rows only through functions."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec

from pipeinfer.observe.facets import Bar, Series, grouped
from pipeinfer.observe.looks import Look
from pipeinfer.observe.table import Record

USES = {"busy_s": ("busy", "#009E73"), "cancelled_s": ("cancelled runs", "#D55E00"),
        "waiting_s": ("waiting for a run", "#56B4E9"), "idle_s": ("idle", "#DDDDDD")}  # fmt: skip
LEGEND_WIDTH = 1.5  # inches an entry takes at least
LINE_HEIGHT = 0.19  # inches
TITLE_LETTERS = 13  # of a title, an inch
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "pipeinfer",
}

Value = Callable[[Record], float]


def text_width(texts: Sequence[str]) -> float:
    """Inches the longest line needs, about."""
    return max((0.08 * len(line) for text in texts for line in text.split("\n")), default=0.0)


def panels(n_panels: int, columns: int = 0, width: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A grid of axes, 10 inches wide at most where the panels allow it."""
    columns = min(n_panels, columns or max(1, int(10.5 // width)))
    n_rows = -(-n_panels // columns)
    figure, grid = plt.subplots(
        n_rows, columns, figsize=(width * columns, 2.9 * n_rows + 0.5), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    for spare in axes[n_panels:]:
        spare.remove()
    return figure, axes[:n_panels]


def head(panel: Axes, title: str) -> None:
    """Its title, in as many lines as its width asks for: a comma ends a line where one can."""
    width = panel.figure.bbox.width / panel.figure.dpi / _cell(panel).get_gridspec().ncols
    n_letters = int(TITLE_LETTERS * (width - 0.4))
    panel.set_title("\n".join(filled(title, n_letters)), fontsize=9)


def filled(text: str, n_letters: int) -> list[str]:
    """Lines of so many letters at most, its parts between commas whole where they are no longer."""
    lines = list[str]()
    for given in text.split("\n"):
        lines.append("")
        for part in given.split(", "):
            if lines[-1] and len(lines[-1]) + len(part) + 3 > n_letters:
                lines[-1] += ","
                lines.append("")
            first, *others = textwrap.wrap(part, n_letters) or [""]
            lines[-1] += f", {first}" if lines[-1] else first
            lines += others
    return lines


def _cell(panel: Axes) -> SubplotSpec:
    cell = panel.get_subplotspec()
    assert cell, "a panel outside the grid"
    return cell


def _make_room(figure: Figure) -> None:
    """The panels keep their height however many lines their titles take."""
    extra = dict[int, int]()
    for panel in figure.axes:
        row = _cell(panel).rowspan.start
        extra[row] = max(extra.get(row, 0), panel.get_title().count("\n"))
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * sum(extra.values()))


def legend(figure: Figure) -> None:
    """One for all panels, which have their titles: what any of them shows."""
    _make_room(figure)
    shown: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    found = list(shown.values()), list(shown)
    columns = max(1, min(len(found[1]), int(figure.get_figwidth() / max(LEGEND_WIDTH, 0.6 + text_width(found[1])))))
    n_lines = sum(1 + label.count("\n") for label in found[1]) / columns
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * max(0.0, n_lines - 1))  # the panels keep their height
    figure.legend(*found, loc="outside upper center", ncols=columns, frameon=False)


def note(figure: Figure, text: str) -> None:
    """Below all panels, in as many lines as it takes."""
    figure.supxlabel("\n".join(textwrap.wrap(text, int(16 * figure.get_figwidth()))), fontsize=7, color="#444444")


def bar_groups(
    axes: Axes,
    groups: Sequence[Any],
    series: Series,
    group_of: Callable[[Record], Any],
    value: Value,
    looks: dict[str, Look],
    dots: bool = False,
    mark: Callable[[Bar], str] = lambda rows: "",
) -> list[Bar]:
    """Mean and sample standard deviation of every (group, series), with what `mark` says of its rows on top; with
    `dots` also every value. Returns the rows of each bar."""
    width, bars, top = 0.8 / len(series), list[Bar](), 0.0
    for index, (label, rows) in enumerate(series.items()):
        found = grouped([row for row in rows if not math.isnan(value(row))], group_of)
        here = [(at, found[group]) for at, group in enumerate(groups) if group in found]
        for number, (at, members) in enumerate(here):
            values, middle = [value(row) for row in members], at - 0.4 + (index + 0.5) * width
            # one legend entry a series, from its first bar
            height = _bar(axes, middle, 0.92 * width, values, looks[label], "" if number else label)
            if dots:
                height = max(height, *values)
                spread = np.linspace(-0.3, 0.3, len(values)) * width if len(values) > 1 else [0.0]
                axes.plot(middle + np.asarray(spread), values, ".", color="black", ms=2.2, alpha=0.5)
            axes.annotate(mark(members), (middle, height), (0, 2), textcoords="offset points", ha="center",
                          va="bottom", fontsize=6, linespacing=0.95)  # fmt: skip
            bars.append(members)
            top = max(top, height)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(0, 1.17 * top or 1.0)
    return bars


def _bar(axes: Axes, middle: float, width: float, values: Sequence[float], look: Look, label: str) -> float:
    """A bar and its whisker, which never reaches below 0; a single value has none. Returns how high it is."""
    mean = statistics.fmean(values)
    axes.bar(
        middle, mean, width, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0.4, label=label or None
    )
    if len(values) < 2:
        return mean
    deviation = statistics.stdev(values)
    axes.errorbar(middle, mean, [[min(deviation, mean)], [deviation]], color="black", capsize=2.5, lw=0.9)
    return mean + deviation


def cdf(axes: Axes, values: Sequence[float], label: str, look: Look) -> None:
    if values:
        shares = np.arange(1, len(values) + 1) / len(values)
        axes.step([0.0, *values], [0.0, *shares], where="post", label=label, color=look.colour, linestyle=look.dashes,
                  lw=1.6)  # fmt: skip


def n_ranks(rows: Sequence[Record]) -> int:
    return max(len(row["busy_s"]) for row in rows)


def drafting_ranks(row: Record) -> list[int]:
    return [rank for rank, role in enumerate(row["roles"].split(";")) if role.startswith("draft")]


def stack_ranks(axes: Axes, series: Series) -> None:
    """For each policy a stacked bar of means a rank; D below it: this rank drafts."""
    at, ticks, names = 0.0, [], []
    for label, rows in series.items():
        first = at
        for rank in range(n_ranks(rows)):
            bottom = 0.0
            for name, (use, colour) in USES.items():
                shares = [100 * row[name][rank] / row["total_s"] for row in rows if rank < len(row[name])]
                share = statistics.fmean(shares)
                axes.bar(at, share, 0.86, bottom, color=colour, edgecolor="white", linewidth=0.4,
                         label=use if at == 0 else None)  # fmt: skip
                bottom += share
            ticks.append(at)
            names.append(f"{rank}\nD" if rank in drafting_ranks(rows[0]) else str(rank))
            at += 1
        axes.text((first + at - 1) / 2, -0.2, label, ha="center", va="top", transform=axes.get_xaxis_transform())
        at += 0.6
    axes.set_xticks(ticks, names)
    axes.text(-0.01, -0.045, "rank", ha="right", va="top", transform=axes.transAxes)
    axes.set_ylim(0, 100)
