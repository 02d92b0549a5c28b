"""Traces as a picture, one row a rank (the form of PipeInfer's figure 3). Knows traces, no ranks and no clock."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from pipeinfer.errors import UserError

# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {
    "draft": "#0072B2",
    "evaluate": "#009E73",
    "cancelled": "#D55E00",
    "waiting": "#E8E8E8",
    "settle": "#000000",
    "cancel": "#CC79A7",
}
LABELS = {
    "draft": "draft step",
    "evaluate": "run evaluated",
    "cancelled": "run cancelled",
    "waiting": "waiting for a run",
    "settle": "tokens accepted",
    "cancel": "cancellation sent",
}
MARKS = {"settle": "v", "cancel": "x"}
N_SETTLED = 12
"""Verdicts that are drawn unless the user says from when to when."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """What of a trace is drawn, from `start_ms`: the labels of its tracks, and its events."""

    name: str
    labels: dict[int, str]
    events: list[Event]
    start_ms: float

    def n_accepted(self, long_ms: float) -> int:
        """Tokens that were accepted in so long after the start."""
        times = ((event["ts"] / 1e3 - self.start_ms, event) for event in self.events if event["name"] == "settle")
        return sum(event["args"].get("tokens", 0) for after_ms, event in times if 0 < after_ms <= long_ms)


def draw_timelines(paths: Sequence[Path], from_ms: float | None, for_ms: float | None) -> Any:
    """The figure of traces below each other, in which each takes the same time, to be closed by the caller. `from_ms`,
    `for_ms`: where they begin and how long they last; None: the N_SETTLED accepted verdicts from the first token on,
    of several traces those of the fastest. Raises UserError for what is no trace."""
    traces, long_ms = [], math.inf
    for path in paths:
        labels, events = read_trace(path)
        start_ms, end_ms = window(events, from_ms, for_ms)
        traces.append(Trace(path.stem, labels, events, start_ms))
        long_ms = min(long_ms, end_ms - start_ms)
    return paint(traces, long_ms)


def window(events: list[Event], from_ms: float | None, for_ms: float | None) -> tuple[float, float]:
    """When the picture begins and ends (ms). Raises UserError where nothing would be in it."""
    settles = sorted(event["ts"] / 1e3 for event in events if event["name"] == "settle")
    last = max(((event["ts"] + event["dur"]) / 1e3 for event in events), default=0.0)
    if from_ms is not None and from_ms >= last:
        raise UserError(f"--from {from_ms:g}: the trace ends at {last:.1f} ms; begin before that")
    start = from_ms if from_ms is not None else settles[0] if settles else 0.0
    later = [at for at in settles if at > start][:N_SETTLED]
    end = start + for_ms if for_ms else later[-1] if later else last
    begins = [event["ts"] / 1e3 for event in events if event["ts"] + event["dur"] >= start * 1e3]
    if for_ms and begins and min(begins) > end:
        raise UserError(
            f"--from {start:g} --for {for_ms:g}: nothing happens then; the next thing begins at {min(begins):.1f} ms"
        )
    return start, max(end, start + 1e-3)


def read_trace(path: Path) -> tuple[dict[int, str], list[Event]]:
    """Track labels, and what can be drawn. Raises UserError when the file is no trace."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        labels = {int(event["tid"]): str(event["args"]["name"]) for event in events if event["ph"] == "M"}
        drawn = [_checked(event, labels) for event in events if event["ph"] != "M" and event["name"] in COLOURS]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"  # its repr may hold the whole file
        raise UserError(f"{path} is not a trace that `pipeinfer run --trace` wrote: {reason}") from None
    return labels, drawn


def _checked(event: Event, labels: dict[int, str]) -> Event:
    labels[event["tid"]]  # a track that nobody named is a KeyError
    times = {"ts": float(event["ts"]), "dur": float(event.get("dur", 0.0))}
    if not all(map(math.isfinite, times.values())):
        raise ValueError(f"times of {event['name']}: {times}")
    return event | times | {"args": dict(event.get("args", {}))}


def paint(traces: Sequence[Trace], long_ms: float) -> Any:
    """The figure, to be closed by the caller. Several traces have low rows without numbers of runs, and titles with the
    tokens that each accepted."""
    several = len(traces) > 1
    row_inches = 0.27 if several else 0.7
    heights = [len(trace.labels) * row_inches + 0.5 * several for trace in traces]
    figure, panels = plt.subplots(
        len(traces),
        figsize=(9 if several else 11, sum(heights) + 1.4),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    seen: dict[str, Any] = {}
    unit_ms, unit = (1e3, "s") if long_ms >= 5e3 else (1.0, "ms")
    for trace, axes in zip(traces, panels[:, 0], strict=True):
        _paint_one(axes, trace, long_ms, unit_ms, seen, has_numbers=not several)
        axes.set_yticks(list(trace.labels), [label.replace("$", r"\$") for label in trace.labels.values()])
        axes.set_ylim(len(trace.labels) - 0.5, -0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if several:
            axes.tick_params(axis="y", labelsize=8)
            title = f"{trace.name}: {trace.n_accepted(long_ms)} tokens in {long_ms / unit_ms:.3g} {unit}"
            axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=11, fontweight="bold", pad=12)
    has_questions = any("question" in event["args"] for trace in traces for event in trace.events)
    runs = "runs (q: questions to a larger draft)" if has_questions else "runs"
    bars = "" if several else f"numbers on the bars are {runs}, "
    axes.set_xlim(0, long_ms / unit_ms)
    axes.set_xlabel(f"time ({unit}); {bars}numbers on the triangles tokens accepted at once")
    kinds = [kind for kind in COLOURS if kind in seen]
    figure.legend(
        [seen[kind] for kind in kinds],
        [LABELS[kind] for kind in kinds],
        loc="outside upper center",
        ncols=3 if several else len(COLOURS),
        frameon=False,
    )
    return figure


def _paint_one(
    axes: Any, trace: Trace, long_ms: float, unit_ms: float, seen: dict[str, Any], has_numbers: bool
) -> None:
    """`seen`: kind -> something drawn of it, for the legend."""
    last_ms = float("-inf")
    for event in sorted(trace.events, key=lambda event: event["ts"]):
        at_ms, lasts_ms, kind = event["ts"] / 1e3 - trace.start_ms, event["dur"] / 1e3, event["name"]
        if at_ms + lasts_ms < 0 or at_ms > long_ms:
            continue
        if kind in MARKS:
            # whole at the edges too
            seen[kind] = axes.plot(
                at_ms / unit_ms,
                event["tid"] + (0.42 if kind == "cancel" else -0.42),
                MARKS[kind],
                color=COLOURS[kind],
                markersize=6 if has_numbers else 4,
                clip_on=False,
                zorder=3,
            )[0]
        else:
            seen[kind] = _bar(axes, event, at_ms / unit_ms, lasts_ms / unit_ms, long_ms / unit_ms, has_numbers)
        # numbers of verdicts that come at once would lie on each other
        if kind == "settle" and at_ms - last_ms > long_ms / 120:
            axes.annotate(
                str(event["args"].get("tokens", "")),
                (at_ms / unit_ms, event["tid"] - (0.5 if has_numbers else 0.65)),
                ha="center",
                va="bottom",
                fontsize=8,
                annotation_clip=False,
            )
            last_ms = at_ms


def _bar(axes: Any, event: Event, at: float, lasts: float, window: float, has_number: bool) -> Any:
    """A span, with its run's number where there is room for it. Hatches are for prints without colours."""
    kind, track, number = event["name"], event["tid"], number_of(event)
    height = 0.2 if kind == "waiting" else 0.6 if has_number else 0.76
    bar = axes.barh(
        track,
        lasts,
        left=at,
        height=height,
        color=COLOURS[kind],
        edgecolor="white",
        lw=0.4,
        hatch="//////" if kind == "cancelled" else "",
    )
    first, last = max(0.0, at), min(at + lasts, window)
    if has_number and kind != "waiting" and number and last - first > window / 40:
        axes.text((first + last) / 2, track, number, ha="center", va="center", fontsize=7, color="white")
    return bar


def number_of(event: Event) -> str:
    """A run's number; a question's to a larger draft, which are counted by themselves, is marked as such."""
    args = event["args"]
    return f"q{args['question']}" if "question" in args else str(args.get("run", ""))
