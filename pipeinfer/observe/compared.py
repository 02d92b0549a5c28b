"""The picture of policies side by side. Knows speeds, not where they are from."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pipeinfer.observe.pictures import pyplot

NOTE = "Limit: one token each time the slowest stage evaluates one row; runs of several rows can be faster."


def paint(speeds: Sequence[tuple[str, Sequence[float]]], limit: float) -> Any:
    """A figure with a bar for each policy, a dot for each of its generations and the limit as a line; tokens/s."""
    figure, axes = pyplot().subplots(figsize=(7.0, 0.42 * len(speeds) + 1.3), layout="constrained")
    names = [policy for policy, _ in speeds]
    axes.barh(names, [statistics.fmean(values) for _, values in speeds], 0.7, color="#0072B2")
    for policy, values in speeds:
        if len(values) > 1:
            axes.plot(values, [policy] * len(values), ".", color="black", ms=3.0)
        axes.annotate(f"{statistics.fmean(values):.3g}", (max(values), policy), (4, 0), textcoords="offset points",
                      va="center")  # fmt: skip
    axes.axvline(limit, color="#222222", linestyle="--", linewidth=1.2, label="limit")
    axes.set_xlim(0, 1.12 * max(limit, *(max(values) for _, values in speeds)))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("mean generation speed (tokens/s); dots: single generations")
    figure.legend(loc="outside upper right", frameon=False)
    figure.supxlabel(NOTE, fontsize=7)
    return figure
