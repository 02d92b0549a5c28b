"""Panels, bars with whiskers, distributions, stacks: what figures are made of. Knows rows only through functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeinfer.results import Row

# Okabe and Ito's palette: told apart with any colour vision; hatches serve those who print in grey
KNOWN = {"iterative": ("#999999", ""), "speculative": ("#E69F00", "//"), "pipeinfer": ("#0072B2", "")}
FURTHER = (("#009E73", "\\\\"), ("#D55E00", ""), ("#CC79A7", ".."), ("#56B4E9", ""), ("#F0E442", "xx"))
USES = {"busy_s": ("busy", "#009E73"), "cancelled_s": ("cancelled runs", "#D55E00"),
        "waiting_s": ("waiting for a run", "#56B4E9"), "idle_s": ("idle", "#DDDDDD")}  # fmt: skip
LONGEST_NAME = 34
LEGEND_WIDTH = 1.5  # inches an entry takes at least
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

Value = Callable[[Row], float]
Series = dict[str, list[Row]]


def clean(text: str) -> str:
    """A name as a label: no mathematics, no control characters, not longer than fits."""
    shown = "".join(character if character.isprintable() else "?" for character in text).removesuffix(".gguf")
    return (shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…").replace("$", r"\$")


def text_width(texts: Sequence[str]) -> float:
    """Inches the longest line needs, about."""
    return max((0.08 * len(line) for text in texts for line in text.split("\n")), default=0.0)


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def styles(series: Series) -> dict[str, tuple[str, str]]:
    further, styles = iter(FURTHER * (1 + len(series) // len(FURTHER))), {}
    for label in series:
        styles[label] = KNOWN[label] if label in KNOWN else next(further)
    return styles


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


def legend(figure: Figure) -> None:
    """One for all panels, from the panel that has the most."""
    found = max((panel.get_legend_handles_labels() for panel in figure.axes), key=lambda pair: len(pair[1]))
    columns = max(1, min(len(found[1]), int(figure.get_figwidth() / max(LEGEND_WIDTH, 0.6 + text_width(found[1])))))
    figure.legend(*found, loc="outside upper center", ncols=columns, frameon=False)


def bar_groups(
    axes: Axes,
    groups: Sequence[Any],
    series: Series,
    group_of: Callable[[Row], Any],
    value: Value,
    styles: dict[str, tuple[str, str]],
    dots: bool = False,
) -> None:
    """Mean and sample standard deviation of every (group, series); with `dots` also every value."""
    width = 0.8 / len(series)
    for index, (label, rows) in enumerate(series.items()):
        found = grouped(rows, group_of)
        colour, hatch = styles[label]
        named = False  # one legend entry a series, from its first bar
        for at, group in enumerate(groups):
            values = [value(row) for row in found.get(group, []) if not math.isnan(value(row))]
            if not values:
                continue
            middle = at - 0.4 + (index + 0.5) * width
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            axes.bar(middle, statistics.fmean(values), 0.92 * width, color=colour, hatch=hatch, edgecolor="white",
                     linewidth=0.4, label=None if named else label)  # fmt: skip
            named = True
            if deviation:
                axes.errorbar(middle, statistics.fmean(values), deviation, color="black", capsize=2.5, lw=0.9)
            if dots:
                spread = np.linspace(-0.3, 0.3, len(values)) * width if len(values) > 1 else [0.0]
                axes.plot(middle + np.asarray(spread), values, ".", color="black", ms=2.2, alpha=0.5)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_ylim(bottom=0)


def cdf(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    if values:
        shares = np.arange(1, len(values) + 1) / len(values)
        style = {"#999999": "-", "#E69F00": "--"}.get(colour, "-")
        axes.step([0.0, *values], [0.0, *shares], where="post", label=label, color=colour, linestyle=style, lw=1.6)


def n_ranks(rows: Sequence[Row]) -> int:
    return max(len(row["busy_s"]) for row in rows)


def stack_ranks(axes: Axes, series: Series) -> None:
    """For each policy a stacked bar a rank."""
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
            names.append(str(rank))
            at += 1
        axes.text((first + at - 1) / 2, -0.11, label, ha="center", va="top", transform=axes.get_xaxis_transform())
        at += 0.6
    axes.set_xticks(ticks, names)
    axes.text(-0.01, -0.045, "rank", ha="right", va="top", transform=axes.transAxes)
    axes.set_ylim(0, 100)
