"""The figures of an evaluation from the rows of results.csv, as PipeInfer's paper has them. Draws; measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
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
USES = {"busy_s": ("busy", "#009E73"), "cancelled_s": ("on cancelled runs", "#D55E00"),
        "waiting_s": ("waiting for a run on its way", "#56B4E9"), "idle_s": ("idle", "#DDDDDD")}  # fmt: skip
LONGEST_NAME = 34
LEGEND_WIDTH = 1.5  # inches an entry takes
WITHOUT = {"no-cancel": "without cancellation", "no-partitions": "without KV partitions",
           "no-continuous": "not continuous", "no-async": "not asynchronous"}  # fmt: skip
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


def speed(rows: Sequence[Row]) -> Figure | None:
    """Generation speed by policy, model pair and rank count (the paper's figure 4)."""
    return _bars(rows, lambda row: row["predicted_per_second"], "generation speed (tokens/s)")


def ttft(rows: Sequence[Row]) -> Figure | None:
    """Time to first token (figure 5)."""
    return _bars(rows, lambda row: 1e3 * row["ttft_s"], "time to first token (ms)")


def itl(rows: Sequence[Row]) -> Figure | None:
    """Mean inter-token latency (figure 6)."""
    return _bars(rows, lambda row: 1e3 * row["itl_mean_s"], "mean inter-token latency (ms)")


def memory(rows: Sequence[Row]) -> Figure | None:
    """Speed per memory of a rank: resident pages, mapped ones counted, mean over the ranks (figure 7a)."""
    measured = [row for row in rows if row.get("rss_bytes") and all(row["rss_bytes"])]
    return _bars(
        measured,
        lambda row: row["predicted_per_second"] / (statistics.fmean(row["rss_bytes"]) / 1e9),
        "tokens/s per GB of a rank's memory",
    )


def ablation(rows: Sequence[Row]) -> Figure | None:
    """What each part of a policy is worth: without it (figure 8)."""
    studied = {(*_pair(row), row["ranks"], row["policy"]) for row in rows if row.get("variant")}
    chosen = [row for row in rows if "variant" in row and (*_pair(row), row["ranks"], row["policy"]) in studied]
    if not chosen:
        return None

    def setting(row: Row) -> str:
        return "\n".join([*(clean(name) for name in _pair(row) if name), f"{row['ranks']:g} ranks"])

    groups = list(_grouped(chosen, setting))
    variants = list(dict.fromkeys(row["variant"] for row in sorted(chosen, key=lambda row: row["variant"] != "")))
    labels = {variant: WITHOUT.get(variant, clean(variant)) or "complete" for variant in variants}
    series = {labels[variant]: [row for row in chosen if row["variant"] == variant] for variant in variants}
    styles = {label: (KNOWN["pipeinfer"], *FURTHER)[at] for at, label in enumerate(series)}
    figure, axes = _panels(2, columns=2, width=max(4.2, 1.2 + len(groups) * max(1.3, _text_width(groups))))
    for panel, name, scale, label in (
        (axes[0], "predicted_per_second", 1.0, "generation speed (tokens/s)"),
        (axes[1], "itl_mean_s", 1e3, "mean inter-token latency (ms)"),
    ):
        _bar_groups(panel, groups, series, setting, partial(_figure_of, name, scale), styles)
        panel.set_ylabel(label)
    _legend(figure)
    return figure


def prompts(rows: Sequence[Row]) -> Figure | None:
    """Speed prompt by prompt: the mean, its deviation, and a dot for every generation (figure 10)."""
    whole = [row for row in _whole(rows) if row.get("prompt")]
    sets = list(dict.fromkeys(row["prompt"].split("/")[0] for row in whole))
    if len({row["prompt"] for row in whole}) < 2:
        return None
    settings = _settings(whole)
    figure, axes = _panels(len(settings), width=max(4.5, 1.2 + 0.85 * len(sets)))
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        present = [name for name in sets if any(row["prompt"].split("/")[0] == name for row in chosen)]
        series = _series(chosen)
        _bar_groups(panel, present, series, lambda row: row["prompt"].split("/")[0],
                    lambda row: row["predicted_per_second"], _styles(series), dots=True)  # fmt: skip
        panel.set_xticks(range(len(present)), [clean(name) for name in present], rotation=30, ha="right")
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("generation speed (tokens/s)")
    _legend(figure)
    return figure


def latencies(rows: Sequence[Row]) -> Figure | None:
    """Cumulative distributions of ITL, over all gaps, and of TPOT, over generations."""
    whole = [row for row in _whole(rows) if row.get("itl_percentiles_s")]
    if not whole:
        return None
    settings = _settings(whole)
    figure, axes = _panels(2 * len(settings), columns=2, width=4.6)
    for at, (title, chosen) in enumerate(settings.items()):
        for panel, name in zip(axes[2 * at : 2 * at + 2], ("itl_percentiles_s", "tpot_s"), strict=True):
            series = _series(chosen)
            for label, (colour, _) in _styles(series).items():
                values = chain.from_iterable(np.atleast_1d(row[name]) for row in series[label])
                _cdf(panel, sorted(1e3 * value for value in values if not math.isnan(value)), label, colour)
            panel.set_title(title, fontsize=9)
            panel.grid(True, axis="both")
            panel.set_ylim(0, 1.02)
            panel.set_xlim(left=0)
        axes[2 * at].set_ylabel("share of tokens")
        axes[2 * at].set_xlabel("inter-token latency (ms)")
        axes[2 * at + 1].set_ylabel("share of generations")
        axes[2 * at + 1].set_xlabel("time per output token (ms)")
    _legend(figure)
    return figure


def time_use(rows: Sequence[Row]) -> Figure | None:
    """How each rank spent its time: busy, waiting, idle, on runs that were cancelled."""
    whole = [row for row in _whole(rows) if row.get("busy_s")]
    if not whole:
        return None
    settings = _settings(whole)
    n_bars = max(sum(_n_ranks(found) for found in _series(chosen).values()) for chosen in settings.values())
    figure, axes = _panels(len(settings), width=max(4.5, 1.0 + 0.36 * n_bars))
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        _stack_ranks(panel, _series(chosen))
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("share of the time (%)")
    _legend(figure)
    return figure


FIGURES = {"speed": speed, "ttft": ttft, "itl": itl, "memory": memory, "ablation": ablation, "prompts": prompts,
           "latencies": latencies, "time": time_use}  # fmt: skip


def draw_all(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the rows have the data for; each is closed when the next is asked for."""
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(rows)
            if figure is not None:
                yield name, figure
                plt.close(figure)


# -- which rows belong together


def clean(text: str) -> str:
    """A name as a label: no mathematics, no control characters, not longer than fits."""
    shown = "".join(character if character.isprintable() else "?" for character in text).removesuffix(".gguf")
    return (shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…").replace("$", r"\$")


def _pair(row: Row) -> tuple[str, str]:
    return str(row.get("model", "")), str(row.get("model_draft", ""))


def _figure_of(name: str, scale: float, row: Row) -> float:
    return scale * float(row[name])


def _text_width(texts: Sequence[str]) -> float:
    """Inches the longest line needs, about."""
    return max((0.08 * len(line) for text in texts for line in text.split("\n")), default=0.0)


def _whole(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.get("variant")]


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _by_pair(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each model pair; those without a draft join every pair of their target."""
    pairs = list(dict.fromkeys(_pair(row) for row in rows))
    drafted = [pair for pair in pairs if pair[1]]
    alone = [pair for pair in pairs if not pair[1] and pair[0] not in {target for target, _ in drafted}]
    return {
        " + ".join(clean(name) for name in pair if name): [row for row in rows if _pair(row) in (pair, (pair[0], ""))]
        for pair in drafted + alone
    }


def _settings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each model pair and rank count, by a title."""
    return {
        f"{pair}, {ranks:g} ranks": found
        for pair, members in _by_pair(rows).items()
        for ranks, found in sorted(_grouped(members, lambda row: row["ranks"]).items())
    }


def _series(rows: Sequence[Row]) -> Series:
    """Rows by policy; by policy and settings where one policy comes with several."""
    ambiguous = {policy for policy, found in _grouped(rows, lambda row: row["policy"]).items()
                 if len({row.get("settings") for row in found}) > 1}  # fmt: skip

    def name(row: Row) -> str:
        return clean(row["policy"]) + (f"\n{clean(row['settings'])}" if row["policy"] in ambiguous else "")

    known = list(KNOWN)
    ordered = sorted(rows, key=lambda row: known.index(row["policy"]) if row["policy"] in known else len(known))
    return _grouped(ordered, name)


def _styles(series: Series) -> dict[str, tuple[str, str]]:
    further, styles = iter(FURTHER * (1 + len(series) // len(FURTHER))), {}
    for label in series:
        styles[label] = KNOWN[label] if label in KNOWN else next(further)
    return styles


# -- drawing


def _panels(n_panels: int, columns: int = 0, width: float = 4.2) -> tuple[Figure, list[Axes]]:
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


def _legend(figure: Figure) -> None:
    """One for all panels, from the panel that has the most."""
    found = max((panel.get_legend_handles_labels() for panel in figure.axes), key=lambda pair: len(pair[1]))
    columns = max(1, min(len(found[1]), int(figure.get_figwidth() / LEGEND_WIDTH)))
    figure.legend(*found, loc="outside upper center", ncols=columns, frameon=False)


def _bars(rows: Sequence[Row], value: Value, label: str) -> Figure | None:
    """A panel a model pair, a group of bars a rank count, a bar a policy."""
    whole = [row for row in _whole(rows) if not math.isnan(value(row))]
    if not whole:
        return None
    pairs = _by_pair(whole)
    most = max(len({row.get("ranks") for row in found}) * len(_series(found)) for found in pairs.values())
    figure, axes = _panels(len(pairs), width=max(4.6 if len(pairs) == 1 else 3.4, 1.2 + 0.36 * most))
    for panel, (title, found) in zip(axes, pairs.items(), strict=False):
        ranks = sorted({row["ranks"] for row in found if "ranks" in row})
        series = _series(found)
        _bar_groups(panel, ranks or [None], series, lambda row: row.get("ranks"), value, _styles(series))
        panel.set_xticks(range(len(ranks)), [f"{count:g}" for count in ranks])
        panel.set_xlabel("MPI ranks" if ranks else "")
        panel.set_ylabel(label)
        panel.set_title(title, fontsize=9)
    _legend(figure)
    return figure


def _bar_groups(
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
        found = _grouped(rows, group_of)
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


def _cdf(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    if values:
        shares = np.arange(1, len(values) + 1) / len(values)
        style = {"#999999": "-", "#E69F00": "--"}.get(colour, "-")
        axes.step([0.0, *values], [0.0, *shares], where="post", label=label, color=colour, linestyle=style, lw=1.6)


def _n_ranks(rows: Sequence[Row]) -> int:
    return max(len(row["busy_s"]) for row in rows)


def _stack_ranks(axes: Axes, series: Series) -> None:
    """For each policy a stacked bar a rank."""
    at, ticks, names = 0.0, [], []
    for label, rows in series.items():
        first = at
        for rank in range(_n_ranks(rows)):
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
    axes.set_xlabel("rank", labelpad=16)  # below the names of the policies
    axes.set_ylim(0, 100)
