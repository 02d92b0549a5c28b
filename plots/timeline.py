"""A trace as a picture, one row a rank (the form of PipeInfer's figure 3). Knows traces, no ranks and no clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from pipeinfer.errors import UserError

# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {"draft": "#0072B2", "evaluate": "#009E73", "cancelled": "#D55E00", "waiting": "#E8E8E8", "settle": "#000000",
           "cancel": "#CC79A7"}  # fmt: skip
LABELS = {"draft": "draft step", "evaluate": "run evaluated", "cancelled": "run cancelled",
          "waiting": "waiting for a run", "settle": "tokens accepted", "cancel": "cancellation sent"}  # fmt: skip
MARKS = {"settle": "v", "cancel": "x"}
N_SETTLED = 12
"""Verdicts that are drawn unless the user says from when to when."""

Event = dict[str, Any]


def draw_timeline(trace: Path, from_ms: float | None, for_ms: float | None) -> Any:
    """The figure of a trace, to be closed by the caller. `from_ms`, `for_ms`: where it begins and how long it lasts;
    None: the N_SETTLED accepted verdicts from the first token on. Raises UserError for what is no trace."""
    labels, events = read_trace(trace)
    return paint(labels, events, *window(events, from_ms, for_ms))


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
        raise UserError(f"--from {start:g} --for {for_ms:g}: nothing happens then; the next thing begins at "
                        f"{min(begins):.1f} ms")  # fmt: skip
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
        found = f"{type(error).__name__}: {error}"  # its repr may hold the whole file
        raise UserError(f"{path} is not a trace that `pipeinfer run --trace` wrote: {found}") from None
    return labels, drawn


def _checked(event: Event, labels: dict[int, str]) -> Event:
    labels[event["tid"]]  # a track that nobody named is a KeyError
    times = {"ts": float(event["ts"]), "dur": float(event.get("dur", 0.0))}
    if not all(map(math.isfinite, times.values())):
        raise ValueError(f"times of {event['name']}: {times}")
    return event | times | {"args": dict(event.get("args", {}))}


def paint(labels: dict[int, str], events: list[Event], start_ms: float, end_ms: float) -> Any:
    """The figure, to be closed by the caller."""
    figure, axes = plt.subplots(figsize=(11, 0.7 * len(labels) + 1.4), layout="constrained")
    seen: dict[str, Any] = {}
    last_ms = float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        at, long, kind = event["ts"] / 1e3 - start_ms, event["dur"] / 1e3, event["name"]
        if at + long < 0 or at > end_ms - start_ms:
            continue
        if kind in MARKS:
            # whole at the edges too
            seen[kind] = axes.plot(
                at, event["tid"] + (0.42 if kind == "cancel" else -0.42), MARKS[kind], color=COLOURS[kind],
                markersize=6, clip_on=False, zorder=3,
            )[0]  # fmt: skip
        else:
            seen[kind] = _bar(axes, event, at, long, end_ms - start_ms)
        # numbers of verdicts that come at once would lie on each other
        if kind == "settle" and at - last_ms > (end_ms - start_ms) / 120:
            axes.annotate(
                str(event["args"].get("tokens", "")), (at, event["tid"] - 0.5), ha="center", va="bottom", fontsize=8
            )
            last_ms = at
    axes.set_yticks(list(labels), [label.replace("$", r"\$") for label in labels.values()])
    axes.set_ylim(len(labels) - 0.5, -0.8)
    axes.set_xlim(0, end_ms - start_ms)
    asked = any("question" in event["args"] for event in events)
    numbers = "runs (q: questions to a larger draft)" if asked else "runs"
    axes.set_xlabel(f"time (ms); numbers on the bars are {numbers}, those on the triangles tokens accepted at once")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in COLOURS if kind in seen]
    figure.legend(
        [seen[kind] for kind in kinds],
        [LABELS[kind] for kind in kinds],
        loc="outside upper center",
        ncols=len(COLOURS),
        frameon=False,
    )
    return figure


def _bar(axes: Any, event: Event, at_ms: float, long_ms: float, window_ms: float) -> Any:
    """A span, with its run's number where there is room for it."""
    kind, track, number = event["name"], event["tid"], number_of(event)
    height = 0.2 if kind == "waiting" else 0.6
    bar = axes.barh(track, long_ms, left=at_ms, height=height, color=COLOURS[kind], edgecolor="white", lw=0.4)
    middle = at_ms + long_ms / 2
    if kind != "waiting" and number and long_ms > window_ms / 40 and 0 < middle < window_ms:
        axes.text(middle, track, number, ha="center", va="center", fontsize=7, color="white")
    return bar


def number_of(event: Event) -> str:
    """A run's number; a question's to a larger draft, which are counted by themselves, is marked as such."""
    args = event["args"]
    return f"q{args['question']}" if "question" in args else str(args.get("run", ""))
