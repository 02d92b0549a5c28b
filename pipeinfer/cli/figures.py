"""The figures of an evaluation from the rows of results.csv, as PipeInfer's paper has them. Draws; measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pipeinfer.cli.charts import (
    FURTHER,
    KNOWN,
    STYLE,
    Series,
    Value,
    bar_groups,
    cdf,
    clean,
    grouped,
    legend,
    n_ranks,
    panels,
    stack_ranks,
    styles,
    text_width,
)  # fmt: skip
from pipeinfer.results import Row

WITHOUT = {"no-cancel": "without cancellation", "no-partitions": "without KV partitions",
           "no-continuous": "not continuous", "no-async": "not asynchronous"}  # fmt: skip


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
    # like is compared with like: the complete policy counts where its ablations were measured too
    studied = {_measured(row) for row in rows if row.get("variant")}
    chosen = [row for row in rows if "variant" in row and _measured(row) in studied]
    if not chosen:
        return None

    def setting(row: Row) -> str:
        return "\n".join([*(clean(name) for name in _pair(row) if name), f"{row['ranks']:g} ranks"])

    groups = list(grouped(chosen, setting))
    variants = list(dict.fromkeys(row["variant"] for row in sorted(chosen, key=lambda row: row["variant"] != "")))
    labels = {variant: WITHOUT.get(variant, clean(variant)) or "complete" for variant in variants}
    series = {labels[variant]: [row for row in chosen if row["variant"] == variant] for variant in variants}
    looks = {label: (KNOWN["pipeinfer"], *FURTHER)[at] for at, label in enumerate(series)}
    figure, axes = panels(2, columns=2, width=max(4.2, 1.2 + len(groups) * max(1.3, text_width(groups))))
    for panel, name, scale, label in (
        (axes[0], "predicted_per_second", 1.0, "generation speed (tokens/s)"),
        (axes[1], "itl_mean_s", 1e3, "mean inter-token latency (ms)"),
    ):
        bar_groups(panel, groups, series, setting, partial(_figure_of, name, scale), looks)
        panel.set_ylabel(label)
    legend(figure)
    return figure


def prompts(rows: Sequence[Row]) -> Figure | None:
    """Speed prompt by prompt: the mean, its deviation, and a dot for every generation (figure 10)."""
    whole = [row for row in _whole(rows) if row.get("prompt")]
    sets = list(dict.fromkeys(row["prompt"].split("/")[0] for row in whole))
    if len({row["prompt"] for row in whole}) < 2:
        return None
    settings = _settings(whole)
    figure, axes = panels(len(settings), width=max(4.5, 1.2 + 0.85 * len(sets)))
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        present = [name for name in sets if any(row["prompt"].split("/")[0] == name for row in chosen)]
        series = _series(chosen)
        bar_groups(panel, present, series, lambda row: row["prompt"].split("/")[0],
                    lambda row: row["predicted_per_second"], styles(series), dots=True)  # fmt: skip
        panel.set_xticks(range(len(present)), [clean(name) for name in present], rotation=30, ha="right")
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("generation speed (tokens/s)")
    legend(figure)
    return figure


def latencies(rows: Sequence[Row]) -> Figure | None:
    """Cumulative distributions of ITL, over all gaps, and of TPOT, over generations."""
    whole = [row for row in _whole(rows) if row.get("itl_percentiles_s")]
    if not whole:
        return None
    settings = _settings(whole)
    figure, axes = panels(2 * len(settings), columns=2, width=4.6)
    for at, (title, chosen) in enumerate(settings.items()):
        for panel, name in zip(axes[2 * at : 2 * at + 2], ("itl_percentiles_s", "tpot_s"), strict=True):
            series = _series(chosen)
            for label, (colour, _) in styles(series).items():
                values = chain.from_iterable(np.atleast_1d(row[name]) for row in series[label])
                cdf(panel, sorted(1e3 * value for value in values if not math.isnan(value)), label, colour)
            panel.set_title(title, fontsize=9)
            panel.grid(True, axis="both")
            panel.set_ylim(0, 1.02)
            panel.set_xlim(left=0)
        axes[2 * at].set_ylabel("share of tokens")
        axes[2 * at].set_xlabel("inter-token latency (ms)")
        axes[2 * at + 1].set_ylabel("share of generations")
        axes[2 * at + 1].set_xlabel("time per output token (ms)")
    legend(figure)
    return figure


def time_use(rows: Sequence[Row]) -> Figure | None:
    """How each rank spent its time: busy, waiting, idle, on runs that were cancelled."""
    whole = [row for row in _whole(rows) if row.get("busy_s")]
    if not whole:
        return None
    settings = _settings(whole)
    n_bars = max(sum(n_ranks(found) for found in _series(chosen).values()) for chosen in settings.values())
    figure, axes = panels(len(settings), width=max(4.5, 1.0 + 0.36 * n_bars))
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        stack_ranks(panel, _series(chosen))
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("share of the time (%)")
    legend(figure)
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


def _pair(row: Row) -> tuple[str, str]:
    model, pace = str(row.get("model", "")), row.get("pace")
    # paced to another cluster, a model is another one
    return f"{model.removesuffix('.gguf')} on {pace}" if pace else model, str(row.get("model_draft", ""))


def _figure_of(name: str, scale: float, row: Row) -> float:
    return scale * float(row[name])


def _measured(row: Row) -> tuple[Any, ...]:
    return *_pair(row), row["ranks"], row["policy"], row["prompt"], row["predicted_n"]


def _whole(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.get("variant")]


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
        for ranks, found in sorted(grouped(members, lambda row: row["ranks"]).items())
    }


def _series(rows: Sequence[Row]) -> Series:
    """Rows by policy; by policy and settings where one policy comes with several."""
    ambiguous = {policy for policy, found in grouped(rows, lambda row: row["policy"]).items()
                 if len({row.get("settings") for row in found}) > 1}  # fmt: skip

    def name(row: Row) -> str:
        return clean(row["policy"]) + (f"\n{clean(row['settings'])}" if row["policy"] in ambiguous else "")

    known = list(KNOWN)
    ordered = sorted(rows, key=lambda row: known.index(row["policy"]) if row["policy"] in known else len(known))
    return grouped(ordered, name)


def _bars(rows: Sequence[Row], value: Value, label: str) -> Figure | None:
    """A panel a model pair, a group of bars a rank count, a bar a policy."""
    whole = [row for row in _whole(rows) if not math.isnan(value(row))]
    if not whole:
        return None
    pairs = _by_pair(whole)
    most = max(len({row.get("ranks") for row in found}) * len(_series(found)) for found in pairs.values())
    figure, axes = panels(len(pairs), width=max(4.6 if len(pairs) == 1 else 3.4, 1.2 + 0.36 * most))
    for panel, (title, found) in zip(axes, pairs.items(), strict=False):
        ranks = sorted({row["ranks"] for row in found if "ranks" in row})
        series = _series(found)
        bar_groups(panel, ranks or [None], series, lambda row: row.get("ranks"), value, styles(series))
        panel.set_xticks(range(len(ranks)), [f"{count:g}" for count in ranks])
        panel.set_xlabel("MPI ranks" if ranks else "")
        panel.set_ylabel(label)
        panel.set_title(title, fontsize=9)
    legend(figure)
    return figure
