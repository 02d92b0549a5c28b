"""The figures of results.csv, which are those of PipeInfer's paper. Measures nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pipeinfer.observe.columns import KEY
from plots.charts import HATCHES, LINE_HEIGHT, Look, bars, distributions, finish, looks_of, panels
from plots.frames import (
    SHOWN,
    in_full,
    is_simulated,
    layout,
    mean,
    means_text,
    points,
    pooled_text,
    prompt_labels,
    ranks_text,
)

FACETS = tuple(name for name in KEY if name not in SHOWN)
GREYS = ("0.25", "0.5", "0.75")
USES = {
    "busy_s": ("busy", "#009E73", ""),
    "cancelled_s": ("cancelled runs", "#D55E00", "//////"),
    "waiting_s": ("waiting for a run", "#56B4E9", ""),
    "idle_s": ("idle", "#DDDDDD", ""),
}
SPEED, ITL = "mean generation speed (tokens/s)", "mean inter-token latency (ms)"
ON_BARS = "\n% on a bar: acceptance rate"
UNSENT = "none"
WIDEST, MOST_BARS = 10.5, 36  # inches, and bars in them, whose numbers can be read in a column of 7 inches
GAP = 0.6  # bars that fit between the ranks of one series and those of the next


def acceptance(rows: pd.DataFrame) -> str:
    """What stands on a bar: how many guesses of its rows were right."""
    if ((rows.draft_n_sent == 0) & (rows.policy != "iterative")).all():
        return UNSENT
    rate = mean(rows.acceptance_rate, rows["sample"])
    return f"{rate:.0%}" if rate == rate else ""


def means(title: str, label: str, value: Callable[[pd.DataFrame], Any], frame: pd.DataFrame) -> Figure | None:
    """A panel a model pair, a group of bars a number of ranks, a bar a policy."""
    frame = frame.assign(value=value(frame))[lambda each: (each.variant == "") & each.value.notna()]
    if frame.empty:
        return None
    if label != SPEED or frame.acceptance_rate.isna().all():
        return _bars(title, layout(frame, FACETS), "ranks", {"value": label}, mark=lambda rows: "")
    return _bars(title, layout(frame, FACETS), "ranks", {"value": SPEED + ON_BARS})


def ablation(frame: pd.DataFrame) -> Figure | None:
    """What each part of a policy is worth. The complete policy counts where its ablations were measured too."""
    experiments = frame[[name for name in KEY if name not in ("variant", "repetition")]]
    measured = pd.Series(list(map(str, experiments.itertuples(index=False, name=None))), frame.index)
    frame = frame[measured.isin(measured[frame.variant != ""])]
    if frame.empty:
        return None
    names = {each: in_full(each) or "complete" for each in sorted(frame.variant.unique(), key=bool)}
    looks = dict(zip(names.values(), (Look(grey, hatch) for hatch in ("", *HATCHES) for grey in GREYS), strict=False))
    frame = layout(frame, FACETS, ["policy"])
    frame = frame.assign(series=pd.Categorical(frame.variant.map(names), list(looks)), itl=1e3 * frame.itl_mean_s)
    return _bars("Ablations", frame, "ranks", {"predicted_per_second": SPEED + ON_BARS, "itl": ITL}, looks)


def prompts(frame: pd.DataFrame) -> Figure | None:
    """Speed by prompt. Every panel has the same prompts in the same places."""
    frame = frame[(frame.variant == "") & (frame.prompt != "")]
    if frame.prompt.nunique() < 2:
        return None
    frame = layout(frame.assign(label=prompt_labels(frame)), FACETS, ["ranks"])
    return _bars(
        "Generation speed by prompt; a dot is one generation",
        frame,
        "label",
        {"predicted_per_second": SPEED + ON_BARS},
        groups=list(frame.label.unique()),
        dots=True,
    )


def _bars(
    title: str,
    frame: pd.DataFrame,
    by: str,
    values: Mapping[str, str],
    looks: Mapping[str, Look] | None = None,
    mark: Callable[[pd.DataFrame], str] = acceptance,
    **options: Any,
) -> Figure:
    figure = bars(frame, by, values, looks or looks_of(frame), mark, **options)
    groups = frame.groupby(["panel", by, "series"], observed=True)
    note = means_text(groups, "bar", "generation", by != "label")
    marks = {mark(rows) for _, rows in groups}
    if marks != {""}:
        note += " Acceptance rate: right guesses / guesses that got a verdict"
        note += f"; {UNSENT}: no guess went to the target, which worked as without a draft." if UNSENT in marks else "."
    for axes in figure.axes:
        axes.tick_params(axis="x", rotation=0 if by == "ranks" else 15)
        axes.set_xlabel(ranks_text(frame) if by == "ranks" else "")
        if not frame.ranks.any():  # the original's table does not have them
            axes.set(xlabel="", xticks=[])
    return finish(figure, frame, title, note)


def latencies(frame: pd.DataFrame) -> Figure | None:
    """Distributions of ITL, over all gaps, and of TPOT, over generations."""
    frame = frame[(frame.variant == "") & (frame.itl_percentiles_s.map(len) > 0)]
    if frame.empty:
        return None
    frame = layout(frame, FACETS, ["ranks"])
    gaps = zip(frame.itl_percentiles_s, frame.predicted_n - 1, strict=True)
    frame = frame.assign(
        itl=[points(1e3 * np.array(each), n) for each, n in gaps],
        tpot=[points([1e3 * each] * (each == each), 1) for each in frame.tpot_s],
    )
    values = {
        "itl": ("inter-token latency (ms)", "share of tokens"),
        "tpot": ("time per output token (ms)", "share of generations"),
    }
    figure = distributions(frame, values, looks_of(frame))
    note = (
        f"Each curve pools {pooled_text(frame.groupby(['panel', 'series'], observed=True), 'generations')}; a "
        "generation of more than 102 tokens gives the 101 percentiles of its inter-token latencies."
    )
    return finish(figure, frame, "Distribution of latencies", note)


def time_use(frame: pd.DataFrame) -> Figure | None:
    """How each rank spent its time."""
    frame = frame[(frame.variant == "") & (frame.busy_s.map(len) > 0)]
    if frame.empty:
        return None
    frame, rank = layout(frame, FACETS, ["ranks"]), "node" if is_simulated(frame) else "rank"
    slots = frame.busy_s.map(len).clip(lower=3)  # places for bars, so that a label fits below
    frame = frame.assign(panel=_in_parts(frame, slots))
    n_slots = frame.assign(slots=slots).groupby(["panel", "series"], observed=True).slots.max().groupby("panel").sum()
    width = 1.0 + 0.42 * n_slots.max()
    figure, cells = panels(frame, [""], min(WIDEST, max(4.5, width)))
    letters = 5 * min(1.0, WIDEST / width)  # below a bar
    for panel, rows, _ in cells:
        ticks, first, n_lines = dict[float, str](), 0.0, 0
        for label, own in rows.groupby("series", observed=True):
            slot, n_ranks = slots[own.index].max(), own.busy_s.map(len).max()
            at, bottom = first + (slot - n_ranks) / 2 + np.arange(n_ranks), 0.0
            for use, (words, colour, hatch) in USES.items():
                shares = 100 * mean(pd.DataFrame(own[use].tolist(), own.index).div(own.total_s, axis=0), own["sample"])
                panel.bar(at, shares, 0.86, bottom, color=colour, hatch=hatch, edgecolor="white", lw=0.4, label=words)
                bottom = bottom + shares
            roles = own.roles.iloc[0].split(";")
            ticks |= {
                place: f"{number}\nD" if role.startswith("draft") else str(number)
                for number, (place, role) in enumerate(zip(at, roles, strict=False))
            }
            shown = "\n".join(textwrap.fill(line, int(letters * slot)) for line in label.split("\n"))
            panel.annotate(shown, (at.mean(), 0), (0, -30), textcoords="offset points", ha="center", va="top")
            n_lines = max(n_lines, shown.count("\n"))
            first += slot + GAP
        panel.set_xticks(list(ticks), list(ticks.values()))
        panel.annotate(rank, (0, 0), (-3, -5), "axes fraction", "offset points", ha="right", va="top")
        figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * n_lines)
        panel.set(ylim=(0, 100), ylabel="mean share of the time (%)")
    pooled = pooled_text(frame.groupby(["panel", "series"], observed=True), "generations")
    return finish(figure, frame, f"How {rank}s spent their time", f"Means over {pooled}. D: this {rank} drafts.")


def _in_parts(frame: pd.DataFrame, slots: pd.Series) -> list[str]:
    """The panel of each row, so that none has too many bars to read: `PANEL (2 of 3)`."""
    parts = dict[tuple[str, str], int]()
    for panel, rows in frame.groupby("panel", sort=False):
        part, used = 1, 0.0
        for series, own in rows.groupby("series", observed=True):
            slot = slots[own.index].max() + GAP
            part, used = (part + 1, slot) if used and used + slot > MOST_BARS else (part, used + slot)
            parts[panel, series] = part
    most = {panel: part for (panel, _), part in parts.items()}
    places = zip(frame.panel, frame.series, strict=True)
    return [
        panel if most[panel] == 1 else f"{panel} ({parts[panel, series]} of {most[panel]})" for panel, series in places
    ]


def _mean_gb(rss_bytes: Sequence[int]) -> float:
    """Resident pages of a rank, mapped ones counted."""
    return float(np.mean(rss_bytes)) / 1e9 if rss_bytes and all(rss_bytes) else np.nan


FIGURES: dict[str, Callable[[pd.DataFrame], Figure | None]] = {
    "speed": partial(means, "Generation speed", SPEED, lambda frame: frame.predicted_per_second),
    "ttft": partial(
        means,
        "Time to first token, counted from submission",
        "mean time to first token (ms)",
        lambda frame: 1e3 * frame.ttft_s,
    ),
    "itl": partial(means, "Inter-token latency", ITL, lambda frame: 1e3 * frame.itl_mean_s),
    "memory": partial(
        means,
        "Generation speed per memory",
        "mean tokens/s per GB of a rank",
        lambda frame: frame.predicted_per_second / frame.rss_bytes.map(_mean_gb),
    ),
    "ablation": ablation,
    "prompts": prompts,
    "latencies": latencies,
    "time": time_use,
}
