"""The figures of load.csv: throughput and latencies by how many ask, their distributions, how busy the stages were.
Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from pipeinfer.observe.summary import busiest
from pipeinfer.observe.table import LOADS
from plots.charts import distributions, finish, lines, looks_of, panels
from plots.frames import SHOWN, layout, means_text, points, pooled_text, what_text

POINTS = {"by clients": "clients at a time", "by rate": "requests a second", "at once": "requests that come at once"}
"""By how requests come: what the points of a line are at."""

FACETS = tuple(name for name in LOADS.key if name not in (*SHOWN, "concurrency", "rate"))
LATENCIES = {
    "ttft": "time to first token (ms)\nfrom a request's arrival",
    "tpot": "time per output token (ms)",
    "itl": "inter-token latency (ms)",
}
SHARES = {"50": ("median", "-"), "90": ("90th percentile", "--"), "99": ("99th percentile", ":")}
POINT = ["panel", "point", "series"]

Lines = Mapping[str, tuple[str, str]]
"""By column: the label of a kind of lines, and its dashes."""


def curves(frame: pd.DataFrame) -> Figure:
    """Throughput and latencies over concurrency, rate or requests that come at once."""
    times = {f"{name}_p{share}": 1e3 * frame[f"{name}_p{share}_s"] for name in LATENCIES for share in SHARES}
    values: dict[str, Lines] = {"throughput (tokens/s)": {"predicted_per_second": ("", "-")}}
    for name, label in LATENCIES.items():
        values[label] = {f"{name}_p{share}": kind for share, kind in SHARES.items()}
    return _lines("Throughput and latencies by load", _laid_out(frame.assign(**times)), values, _asked_text(frame))


def cdfs(frame: pd.DataFrame) -> Figure | None:
    """Distributions of TTFT, over requests, and of ITL, over all gaps; two panels a load. Simulated loads have none."""
    frame = frame[frame.ttft_percentiles_s.map(len) > 0]
    if frame.empty:
        return None
    frame = frame.assign(late=frame.concurrency == 0).sort_values(["late", "concurrency", "rate"], kind="stable")
    by = zip(frame.concurrency, frame.rate, strict=True)
    loads = [f"clients: {n}" if n else f"{rate:g} requests/s" for n, rate in by]
    frame = layout(frame.assign(load=loads), FACETS, ["ranks", "load"])
    counts = {"ttft": frame.n_requests, "itl": frame.predicted_n - frame.n_requests}
    steps = {
        name: [points(1e3 * np.array(each), n) for each, n in zip(frame[f"{name}_percentiles_s"], ns, strict=True)]
        for name, ns in counts.items()
    }
    values = {"ttft": (LATENCIES["ttft"], "share of requests"), "itl": (LATENCIES["itl"], "share of tokens")}
    figure = distributions(frame.assign(**steps), values, looks_of(frame))
    groups = frame.groupby(["panel", "series"], observed=True)
    is_one = groups.size().max() == 1
    pooled = f"is one {what_text(frame, 'load')}" if is_one else f"pools {pooled_text(groups, 'loads')}"
    note = f"Each curve {pooled}; a step is a request or token, or of more than 101 one of their percentiles 0 to 100."
    return finish(figure, frame, "Distribution of latencies by load", note + _asked_text(frame))


def utilisation(frame: pd.DataFrame) -> Figure | None:
    """How busy the stages were over the same."""
    frame = frame[frame.busy.map(len) > 0]
    if frame.empty:
        return None
    asked, frame = _asked_text(frame), _laid_out(frame)
    for _, own in frame.groupby(POINT, observed=True):
        frame.loc[own.index, "busiest"] = 100 * np.array(busiest(own.busy.tolist()))
    values = {"mean": ("mean over the stages", "-"), "busiest": ("busiest stage", "--")}
    frame = frame.assign(mean=100 * frame.busy.map(np.mean))
    title = "How busy the stages were, from the first token to the last (cancelled runs count)"
    return _lines(title, frame, {"share of the time spent on runs (%)": values}, asked)


FIGURES = {"load_curves": curves, "load_cdfs": cdfs, "load_utilisation": utilisation}


def _laid_out(frame: pd.DataFrame) -> pd.DataFrame:
    """Each way in which requests come has panels of its own. `point`: the place of a row on their axis."""
    has_clients, at_once = frame.concurrency > 0, (frame.concurrency == 0) & frame.rate.isna()
    by = np.select([has_clients, at_once], ["by clients", "at once"], "by rate")
    point = np.select([has_clients, at_once], [frame.concurrency, frame.n_requests], frame.rate)
    # points of one line differ in how many come at once, and in how many of them are open where all are
    all_open = at_once & (frame.parallel == frame.n_requests)
    shown = {"n_requests": frame.n_requests.mask(at_once), "parallel": frame.parallel.mask(all_open)}
    return layout(frame.assign(load=by, point=point, **shown), FACETS, ["ranks", "load"])


def _lines(title: str, frame: pd.DataFrame, values: Mapping[str, Lines], asked: str) -> Figure:
    """Of each panel one for each of `values`: the label of its axis, its lines."""
    looks = looks_of(frame)
    figure, cells = panels(frame, values)
    for axes, panel, label in cells:
        for column, (_, dashes) in values[label].items():
            lines(axes, panel, "point", column, looks, dashes)
        measured = sorted(set(panel.point))  # where the ticks are
        axes.set_xscale("log", base=2)
        axes.set_xticks(measured, [f"{x:g}" for x in measured])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(True, axis="both")
        axes.set(ylim=(0, 1.04 * axes.get_ylim()[1]), xlabel=POINTS[panel.load.iloc[0]], ylabel=label)
    for words, dashes in values[label].values():  # for the legend
        axes.plot([], [], color="#444444", marker="o", ms=4.5, lw=1.4, ls=dashes, label=words)
    note = means_text(frame.groupby(POINT, observed=True), "point", "load")
    return finish(figure, frame, title, note + asked)


def _asked_text(frame: pd.DataFrame) -> str:
    """How much a load asks for; titles have what differs."""
    counts = {"requests": frame.n_requests, "tokens": frame.predict}
    shown = {
        words: (f"{column.min()} to " if column.nunique() > 1 else "") + f"{column.max()} {words}"
        for words, column in counts.items()
    }
    return f" A load: {shown['requests']}, {shown['tokens']} each."
