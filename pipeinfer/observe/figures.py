"""The figures of an evaluation from the rows of results.csv, as PipeInfer's paper has them. Draws; measures nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeinfer.observe.charts import (
    STYLE,
    Value,
    bar_groups,
    cdf,
    head,
    legend,
    n_ranks,
    note,
    panels,
    stack_ranks,
)
from pipeinfer.observe.columns import ASKED
from pipeinfer.observe.facets import (
    Bar,
    by_ranks,
    clean,
    count_text,
    grouped,
    in_full,
    note_on,
    panels_of,
    pooled_text,
    prompt_labels,
    series_of,
)
from pipeinfer.observe.looks import VARIANT_LOOKS, looks
from pipeinfer.observe.table import Record

WITHOUT = {"no-cancel": "without cancellation", "no-partitions": "without KV partitions",
           "no-continuous": "not continuous", "no-async": "not asynchronous"}  # fmt: skip
ON_BARS = "Numbers on bars: acceptance rate, right guesses / guesses that got a verdict"
UNSENT = "none"
ON_UNSENT = f"; {UNSENT}: no guess went to the target, which worked as without a draft"


def speed(rows: Sequence[Record]) -> Figure | None:
    """Generation speed by policy, model pair and rank count (the paper's figure 4)."""
    return _bars(
        rows, lambda row: row["predicted_per_second"], "mean generation speed (tokens/s)", with_acceptance=True
    )


def ttft(rows: Sequence[Record]) -> Figure | None:
    """Time to first token (figure 5)."""
    return _bars(rows, _scaled("ttft_s", 1e3), "mean time to first token (ms)")


def itl(rows: Sequence[Record]) -> Figure | None:
    """Mean inter-token latency (figure 6)."""
    return _bars(rows, _scaled("itl_mean_s", 1e3), "mean inter-token latency (ms)")


def memory(rows: Sequence[Record]) -> Figure | None:
    """Speed per memory of a rank: resident pages, mapped ones counted, mean over the ranks (figure 7a)."""
    measured = [row for row in rows if row.get("rss_bytes") and all(row["rss_bytes"])]
    return _bars(
        measured,
        lambda row: row["predicted_per_second"] / (statistics.fmean(row["rss_bytes"]) / 1e9),
        "mean tokens/s per GB of a rank",
    )


def ablation(rows: Sequence[Record]) -> Figure | None:
    """What each part of a policy is worth: without it (figure 8)."""
    # like is compared with like: the complete policy counts where its ablations were measured too
    studied = {_measured(row) for row in rows if row.get("variant")}
    chosen = [row for row in rows if "variant" in row and _measured(row) in studied]
    if not chosen:
        return None
    variants = sorted(dict.fromkeys(row["variant"] for row in chosen), key=bool)
    shown = dict(zip(map(_variant_label, variants), VARIANT_LOOKS * len(variants), strict=False))
    facets, drawn = _by_policy(chosen), dict[Axes, list[Bar]]()
    most = max(len({row["ranks"] for row in found}) for found in facets.values())
    figure, axes = panels(2 * len(facets), columns=2, width=max(4.2, 1.2 + 0.3 * most * len(variants)))
    for at, (title, found) in enumerate(facets.items()):
        ranks, series = (
            sorted({row["ranks"] for row in found}),
            grouped(found, lambda row: _variant_label(row["variant"])),
        )
        ordered = {label: series[label] for label in shown if label in series}
        for panel, name, scale, label in (
            (axes[2 * at], "predicted_per_second", 1.0, "mean generation speed (tokens/s)"),
            (axes[2 * at + 1], "itl_mean_s", 1e3, "mean inter-token latency (ms)"),
        ):
            drawn[panel] = bar_groups(panel, ranks, ordered, lambda row: row["ranks"], _scaled(name, scale), shown,
                               mark=_acceptance if name == "predicted_per_second" else _nothing)  # fmt: skip
            panel.set_ylabel(label)
            panel.set_xlabel("MPI ranks")
            head(panel, title)
    _tell(figure, drawn, f" {_on_bars(drawn)}")
    return figure


def _by_policy(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """Panels of one policy each, by their titles, which name it."""
    return {
        ", ".join(filter(None, (policy, title))): found
        for policy, own in grouped(rows, lambda row: row["policy"]).items()
        for title, found in panels_of(own).items()
    }


def prompts(rows: Sequence[Record]) -> Figure | None:
    """Speed prompt by prompt: the mean, its deviation, and a dot for every generation (figure 10)."""
    whole = [row for row in _whole(rows) if row.get("prompt")]
    label_of = prompt_labels(whole)
    names = list(dict.fromkeys(map(label_of, whole)))
    if len({row["prompt"] for row in whole}) < 2:
        return None
    settings, drawn = by_ranks(whole), dict[Axes, list[Bar]]()
    shown = looks(map(series_of, settings.values()))
    figure, axes = panels(len(settings), width=max(4.5, 1.2 + 0.85 * len(names)))
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        present = [name for name in names if name in set(map(label_of, chosen))]
        series = series_of(chosen)
        drawn[panel] = bar_groups(panel, present, series, label_of, _scaled("predicted_per_second"), shown,
                                  dots=True, mark=_acceptance)  # fmt: skip
        panel.set_xticks(range(len(present)), [clean(name) for name in present], rotation=30, ha="right")
        head(panel, title)
        panel.set_ylabel("mean generation speed (tokens/s)")
    _tell(figure, drawn, f" Dots: each generation. {_on_bars(drawn)}")
    return figure


def latencies(rows: Sequence[Record]) -> Figure | None:
    """Cumulative distributions of ITL, over all gaps, and of TPOT, over generations."""
    whole = [row for row in _whole(rows) if row.get("itl_percentiles_s")]
    if not whole:
        return None
    settings, pooled = by_ranks(whole), list[Bar]()
    shown = looks(map(series_of, settings.values()))
    figure, axes = panels(2 * len(settings), columns=2, width=4.6)
    for at, (title, chosen) in enumerate(settings.items()):
        series = series_of(chosen)
        pooled += series.values()
        for panel, name in zip(axes[2 * at : 2 * at + 2], ("itl_percentiles_s", "tpot_s"), strict=True):
            for label, members in series.items():
                values = chain.from_iterable(np.atleast_1d(row[name]) for row in members)
                cdf(panel, sorted(1e3 * value for value in values if not math.isnan(value)), label, shown[label])
            head(panel, title)
            panel.grid(True, axis="both")
            panel.set_ylim(0, 1.02)
            panel.set_xlim(left=0)
        axes[2 * at].set_ylabel("share of tokens")
        axes[2 * at].set_xlabel("inter-token latency (ms)")
        axes[2 * at + 1].set_ylabel("share of generations")
        axes[2 * at + 1].set_xlabel("time per output token (ms)")
    legend(figure)
    over = pooled_text(pooled)
    note(figure, f"Each curve pools {count_text(pooled)} generations{f' ({over})' if over else ''}; of the inter-token "
                 "latencies every generation gives its 101 percentiles.")  # fmt: skip
    return figure


def time_use(rows: Sequence[Record]) -> Figure | None:
    """How each rank spent its time: busy, waiting, idle, on runs that were cancelled."""
    whole = [row for row in _whole(rows) if row.get("busy_s")]
    if not whole:
        return None
    settings = by_ranks(whole)
    n_bars = max(sum(n_ranks(found) for found in series_of(chosen).values()) for chosen in settings.values())
    figure, axes = panels(len(settings), width=max(4.5, 1.0 + 0.36 * n_bars))
    pooled = list[Bar]()
    for panel, (title, chosen) in zip(axes, settings.items(), strict=False):
        series = series_of(chosen)
        pooled += series.values()
        stack_ranks(panel, series)
        head(panel, title)
        panel.set_ylabel("mean share of the time (%)")
    legend(figure)
    over = pooled_text(pooled)
    note(figure, f"Means over generations, {count_text(pooled)}{f' ({over})' if over else ''}. D: this rank drafts.")
    return figure


FIGURES = {"speed": speed, "ttft": ttft, "itl": itl, "memory": memory, "ablation": ablation, "prompts": prompts,
           "latencies": latencies, "time": time_use}  # fmt: skip


def draw_all(rows: Sequence[Record]) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every figure that the rows have the data for; each is closed when the next is asked for."""
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw(rows)
            if figure is not None:
                yield name, figure
                plt.close(figure)


def _scaled(name: str, scale: float = 1.0) -> Value:
    return lambda row: scale * float(row[name])


def _measured(row: Record) -> tuple[str, ...]:
    """What was asked, but for the ablation and which of the repetitions it is."""
    return tuple(str(row.get(name)) for name in ASKED if name not in ("variant", "repetition"))


def _variant_label(variant: str) -> str:
    return WITHOUT.get(variant, in_full(variant)) or "complete"


def _on_bars(drawn: dict[Axes, list[Bar]]) -> str:
    unsent = any(_acceptance(bar) == UNSENT for bars in drawn.values() for bar in bars)
    return f"{ON_BARS}{ON_UNSENT if unsent else ''}."


def _acceptance(rows: Bar) -> str:
    if all(row.get("draft_n_sent") == 0 < row["draft_steps"] for row in rows):
        return UNSENT
    found = [row["acceptance_rate"] for row in rows if not math.isnan(row.get("acceptance_rate", math.nan))]
    return f"{statistics.fmean(found):.2f}" if found else ""


def _nothing(rows: Bar) -> str:
    return ""


def _whole(rows: Sequence[Record]) -> list[Record]:
    return [row for row in rows if not row.get("variant")]


def _bars(rows: Sequence[Record], value: Value, label: str, with_acceptance: bool = False) -> Figure | None:
    """A panel a model pair, a group of bars a rank count, a bar a policy."""
    whole = [row for row in _whole(rows) if not math.isnan(value(row))]
    if not whole:
        return None
    facets, drawn = panels_of(whole), dict[Axes, list[Bar]]()
    shown = looks(map(series_of, facets.values()))
    most = max(len({row.get("ranks") for row in found}) * len(series_of(found)) for found in facets.values())
    figure, axes = panels(len(facets), width=max(4.6 if len(facets) == 1 else 3.4, 1.2 + 0.36 * most))
    for panel, (title, found) in zip(axes, facets.items(), strict=False):
        ranks = sorted({row["ranks"] for row in found if "ranks" in row})
        series = series_of(found)
        drawn[panel] = bar_groups(panel, ranks or [None], series, lambda row: row.get("ranks"), value, shown,
                           mark=_acceptance if with_acceptance else _nothing)  # fmt: skip
        panel.set_xticks(range(len(ranks)), [str(count) for count in ranks])
        panel.set_xlabel("MPI ranks" if ranks else "")
        panel.set_ylabel(label)
        head(panel, title)
    marked = with_acceptance and any(_acceptance(bar) for bars in drawn.values() for bar in bars)
    _tell(figure, drawn, f" {_on_bars(drawn)}" if marked else "")
    return figure


def _tell(figure: Figure, drawn: dict[Axes, list[Bar]], more: str) -> None:
    """The legend, and what the bars of all panels are; the counts of each where they differ."""
    bars = list(chain.from_iterable(drawn.values()))
    if len({len(bar) for bar in bars}) > 1:
        for panel, here in drawn.items():
            head(panel, f"{panel.get_title()}\n{count_text(here)}")
    legend(figure)
    note(figure, note_on(bars) + more)
