"""The picture of policies side by side. Knows speeds, not where they are from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from pipeinfer.observe.charts import STYLE, note
from pipeinfer.observe.looks import looks
from pipeinfer.observe.timeline import picture_format
from pipeinfer.outputs import write_file


def draw(path: Path, speeds: Sequence[tuple[str, Sequence[float]]], limit: float) -> None:
    """A bar a policy, its generations as dots, and the limit as a line; tokens a second.

    Raises UserError when the file cannot be written or is named like none of the pictures that can be made.
    """
    suffix = picture_format(path)
    shown = looks([{policy: [{"policy": policy}] for policy, _ in speeds}])
    with plt.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(7.0, 0.42 * len(speeds) + 1.3), layout="constrained")
        for at, (policy, values) in enumerate(speeds):
            look = shown[policy]
            mean = float(np.mean(values))
            axes.barh(at, mean, 0.7, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0.4)
            if len(values) > 1:
                axes.plot(values, [at] * len(values), ".", color="black", ms=3.0)
            axes.annotate(f"{mean:.3g}", (max(mean, *values), at), (4, 0), textcoords="offset points", va="center")
        axes.axvline(limit, color="#222222", linestyle="--", linewidth=1.2)
        axes.annotate("limit", (limit, -0.62), (3, 0), textcoords="offset points", color="#222222", fontsize=8)
        axes.set_yticks(range(len(speeds)), [policy for policy, _ in speeds])
        axes.set_ylim(len(speeds) - 0.4, -0.8)
        axes.set_xlim(0, 1.12 * max(limit, *(max(values) for _, values in speeds)))
        axes.set_xlabel("generation speed (tokens/s)")
        note(
            figure,
            "Limit: a token whenever the slowest stage has evaluated one row; runs of several rows can pass it. "
            "Dots: single generations.",
        )
        file = io.BytesIO()
        figure.savefig(file, format=suffix, dpi=150)
        plt.close(figure)
    write_file(path, "--output", file.getvalue())
