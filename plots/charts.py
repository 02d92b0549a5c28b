"""Figures of bars, lines and distributions from a frame that `frames.layout` made: a panel for each `panel`, a bar or
line for each `series`. Knows no figure's subject."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from plots.frames import means_by, n_text, pace_text, spread

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "hatch.linewidth": 0.6,
    "legend.title_fontsize": 11,
    "svg.hashsalt": "pipeinfer",
}
LINE_HEIGHT = 0.19  # inches


class Look(NamedTuple):
    """`hatch`: of bars; `marker`: of points; `dashes`: of a distribution."""

    colour: Any
    hatch: str = ""
    marker: str = "o"
    dashes: Any = "-"


# Okabe and Ito's palette: distinct with any colour vision; hatches and dashes are for prints without colours
POLICY_LOOKS = {
    "iterative": Look("#999999", dashes=":"),
    "speculative": Look("#E69F00", "//", "s", "--"),
    "pipeinfer": Look("#0072B2", "", "D", (0, (8, 2))),
    "pipedec": Look("#009E73", "\\\\", "^", (0, (3, 1, 1, 1))),
    "flowspec": Look("#CC79A7", "..", "v", (0, (5, 1, 1, 1, 1, 1))),
    "pipespec": Look("#56B4E9", "xx", "P", (0, (1, 3))),
    "ssd": Look("#F0E442", "++", "X", "-."),
    "auto": Look("#D55E00", "", "*"),
}
TONES = (0.5, -0.35, 0.75, -0.6)  # towards white; below 0 towards black
HATCHES, MARKERS, DASHES = ("///", "\\\\\\", "...", "xxx", "---"), "Xp<>dh8", ("--", "-.", ":")


def looks_of(frame: pd.DataFrame) -> dict[str, Look]:
    """By series: a policy's own look; a series that is more than a policy's name has another tone of its colour."""
    policies = dict(zip(frame.series, frame.policy, strict=True))
    looks, numbers = dict[str, Look](), Counter[Any]()
    for label in frame.series.cat.categories:
        look = POLICY_LOOKS.get(policies[label], Look("#000000", "", "x"))
        if label != policies[label]:
            at = numbers[look.colour]
            numbers[look.colour] += 1
            tone, rgb = TONES[at % len(TONES)], np.array(to_rgb(look.colour))
            colour = tuple(rgb + abs(tone) * ((tone > 0) - rgb))
            look = Look(colour, *(each[at % len(each)] for each in (HATCHES, MARKERS, DASHES)))
        looks[label] = look
    return looks


def panels(
    frame: pd.DataFrame, values: Collection[str], width: float = 4.6, counts: Mapping[str, str] | None = None
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame, str]]]:
    """Axes for each panel of the frame and each of `values`, with the rows of the panel and the value. The grid is 10
    inches wide where `width`, of one of them, allows it. `counts`: by panel, the last line of its title."""
    cells = [(name, rows, value) for name, rows in frame.groupby("panel", sort=False) for value in values]
    columns = min(len(cells), 2 if len(values) > 1 else max(1, int(10.5 // width)))
    titles = [textwrap.fill(name, int(13 * (width - 0.4))) for name, _, _ in cells]
    if counts:
        titles = [f"{title}\n{counts[name]}" for title, (name, _, _) in zip(titles, cells, strict=True)]
    n_rows = -(-len(cells) // columns)
    n_lines = sum(max(title.count("\n") for title in titles[at * columns :][:columns]) for at in range(n_rows))
    size = (width * columns, 2.9 * n_rows + 0.5 + LINE_HEIGHT * n_lines)
    figure, grid = plt.subplots(n_rows, columns, figsize=size, layout="constrained", squeeze=False)
    for spare in grid.flat[len(cells) :]:
        spare.remove()
    for axes, title in zip(grid.flat, titles, strict=False):
        axes.set_title(title)
    return figure, [(axes, rows, value) for axes, (_, rows, value) in zip(grid.flat, cells, strict=False)]


def finish(figure: Figure, frame: pd.DataFrame, title: str, note: str) -> Figure:
    """Add one legend for all panels under the figure's title, and a note below. Panels keep their height."""
    note += pace_text(frame)
    shown: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    letters = max(len(line) for label in shown for line in label.split("\n"))
    columns = max(1, min(len(shown), int(figure.get_figwidth() / max(1.5, 0.6 + 0.08 * letters))))
    n_lines = sum(1 + label.count("\n") for label in shown) / columns
    figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * n_lines)
    figure.legend(shown.values(), shown, title=title, loc="outside upper center", ncols=columns, frameon=False)
    figure.supxlabel(textwrap.fill(note, int(16 * figure.get_figwidth())), fontsize=7, color="#444444")
    return figure


def series_of(frame: pd.DataFrame, by: str, value: str) -> Iterator[tuple[str, pd.DataFrame, pd.Series, pd.Series]]:
    """(label, rows, means, deviations as in `spread`) of each series that has the value; the last two by `by`."""
    for label, rows in frame[frame[value].notna()].groupby("series", observed=True):
        yield label, rows, means_by(rows, by, value), spread(rows, by, value)


def whiskers(axes: Axes, places: Any, means: pd.Series, deviations: pd.Series, colour: Any) -> None:
    """Where there is a deviation; never below 0."""
    there = deviations.notna()
    if there.any():
        x, y, above = (np.asarray(each)[there] for each in (places, means, deviations))
        axes.errorbar(x, y, [np.minimum(above, y), above], color=colour, ls="", capsize=2.5, lw=0.9)


def bars(
    frame: pd.DataFrame,
    by: str,
    values: Mapping[str, str],
    looks: Mapping[str, Look],
    mark: Callable[[pd.DataFrame], str] = lambda rows: "",
    groups: Sequence[str] = (),
    dots: bool = False,
) -> Figure:
    """Means by `by` and series of `values`, columns with the labels of their axes. `mark`: what is written on a bar of
    the first column. `groups`: values of `by` that every panel has, by default its own. `dots`: one for every row."""
    sizes = frame.groupby(["panel", by, "series"], observed=True).size()
    counts = {name: n_text(sizes[name]) for name in frame.panel.unique()} if sizes.nunique() > 1 else None
    n_groups = len(groups) or frame.groupby("panel")[by].nunique().max()
    width = max(4.6 if frame.panel.nunique() == 1 else 3.4, 1.2 + 0.3 * n_groups * len(looks))
    figure, cells = panels(frame, values, width, counts)
    for axes, panel, value in cells:
        shown, n_series = groups or sorted(set(panel[by])), panel.series.nunique()
        highest, wide = 0.0, 0.8 / n_series
        for index, (label, rows, means, deviations) in enumerate(series_of(panel, by, value)):
            middles = pd.Series(np.arange(len(shown)) - 0.4 + (index + 0.5) * wide, shown)[means.index]
            axes.bar(
                middles,
                means,
                0.92 * wide,
                label=label,
                color=looks[label].colour,
                hatch=looks[label].hatch,
                edgecolor="white",
                lw=0.4,
            )
            whiskers(axes, middles, means, deviations, "black")
            tops = means + deviations.fillna(0.0)
            for group, members in rows.groupby(by):
                if dots:
                    offsets = np.linspace(-0.3, 0.3, len(members)) * wide if len(members) > 1 else 0.0
                    axes.plot(middles[group] + offsets, members[value], ".", color="black", ms=2.2, alpha=0.5)
                    tops[group] = max(tops[group], members[value].max())
                text = mark(members) if value == next(iter(values)) else ""
                axes.annotate(
                    text,
                    (middles[group], tops[group]),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=6,
                )
            highest = max(highest, tops.max())
        axes.set_xticks(range(len(shown)), list(map(str, shown)))
        axes.set(xlim=(-0.6, len(shown) - 0.4), ylim=(0, 1.17 * highest or 1.0), ylabel=values[value])
    return figure


def distributions(frame: pd.DataFrame, values: Mapping[str, tuple[str, str]], looks: Mapping[str, Look]) -> Figure:
    """Cumulative distributions as steps of each of `values`: columns of (values, weights), with the labels of both
    axes."""
    figure, cells = panels(frame, values)
    for axes, panel, value in cells:
        for label, rows in panel.groupby("series", observed=True):
            numbers, weights = map(np.concatenate, zip(*rows[value], strict=True))
            if len(numbers):
                axes.ecdf(numbers, weights, label=label, color=looks[label].colour, ls=looks[label].dashes, lw=1.6)
        axes.grid(True, axis="both")
        axes.set(ylim=(0, 1.02), xlabel=values[value][0], ylabel=values[value][1])
        axes.set_xlim(left=0)
    return figure


def lines(axes: Axes, panel: pd.DataFrame, by: str, value: str, looks: Mapping[str, Look], dashes: str) -> None:
    """A line a series through the means by `by`. Solid lines are in the legend."""
    for label, _, means, deviations in series_of(panel, by, value):
        axes.plot(
            means.index,
            means,
            color=looks[label].colour,
            marker=looks[label].marker,
            ls=dashes,
            ms=4.5,
            lw=1.4,
            label=label if dashes == "-" else None,
        )
        whiskers(axes, means.index, means, deviations, looks[label].colour)
