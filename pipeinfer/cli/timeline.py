"""`pipeinfer timeline`: draw a trace as a picture, one row a rank (the form of PipeInfer's figure 3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pipeinfer.errors import UserError

# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {"draft": "#0072B2", "evaluate": "#009E73", "cancelled": "#D55E00", "settle": "#000000"}
LABELS = {"draft": "draft step", "evaluate": "run evaluated", "cancelled": "run cancelled", "settle": "tokens accepted"}


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Picture; .png, .svg or .pdf.")
@click.option("--from", "from_ms", type=float, help="Begin here (ms). [default: the first token]")
@click.option("--for", "for_ms", type=float, help="Draw this long (ms). [default: twelve accepted verdicts]")
def timeline(trace: Path, output: Path, from_ms: float | None, for_ms: float | None) -> None:
    """Draw what each rank did, from a file that `run --trace` wrote."""
    labels, events = read_trace(trace)
    settles = [event["ts"] / 1e3 for event in events if event["name"] == "settle"] or [0.0]
    start = settles[0] if from_ms is None else from_ms
    end = start + for_ms if for_ms else settles[min(len(settles) - 1, 12)]
    try:
        draw(labels, events, start, max(end, start + 1e-3), output)
    except (OSError, ValueError) as error:
        raise UserError(f"--output {output}: {error}") from None
    click.echo(output)


def read_trace(path: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Track labels and events. Raises UserError when the file is no trace."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
        labels = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a trace that `pipeinfer run --trace` wrote: {error}") from None
    return labels, [event for event in events if event["ph"] != "M"]


def draw(labels: dict[int, str], events: list[dict[str, Any]], start_ms: float, end_ms: float, output: Path) -> None:
    """Raises OSError or ValueError when the picture cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 0.7 * len(labels) + 1.4), layout="constrained")
    seen: dict[str, Any] = {}
    for event in events:
        at, long = event["ts"] / 1e3 - start_ms, event.get("dur", 0.0) / 1e3
        if at + long < 0 or at > end_ms - start_ms:
            continue
        kind, track = event["name"], event["tid"]
        if kind == "settle":
            seen[kind] = axes.plot(at, track - 0.42, "v", color=COLOURS[kind], markersize=6)[0]
            axes.annotate(str(event["args"]["tokens"]), (at, track - 0.5), ha="center", va="bottom", fontsize=8)
        else:
            seen[kind] = axes.barh(track, long, left=at, height=0.6, color=COLOURS[kind], edgecolor="white", lw=0.4)
            if long > (end_ms - start_ms) / 40 and "run" in event["args"]:
                axes.text(
                    at + long / 2, track, event["args"]["run"], ha="center", va="center", fontsize=7, color="white"
                )
    axes.set_yticks(list(labels), [labels[track] for track in labels])
    axes.set_ylim(len(labels) - 0.5, -0.8)
    axes.set_xlim(0, end_ms - start_ms)
    axes.set_xlabel("time (ms); numbers on the bars are runs, those on the triangles tokens accepted at once")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in COLOURS if kind in seen]
    figure.legend(
        [seen[kind] for kind in kinds],
        [LABELS[kind] for kind in kinds],
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(output, dpi=150)
