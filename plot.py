#!/usr/bin/env python3
"""Draw generation speed, time to first token and inter-token latency from results.csv: `python plot.py [results.csv]`.

One bar a policy, grouped by model pair and rank count, with the standard deviation over repeated rows. Writes
speed.png, ttft.png and itl.png beside the table.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FIGURES = (
    ("speed.png", "predicted_per_second", 1.0, "generation speed (tokens/s)"),
    ("ttft.png", "ttft_s", 1e3, "time to first token (ms)"),
    ("itl.png", "itl_mean_s", 1e3, "mean inter-token latency (ms)"),
)
COLOURS = ("#999999", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a results.csv. Exits with a line about what is wrong with it."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        sys.exit(f"plot.py: {path}: {error.strerror}")
    wanted = {"policy", "model", "ranks", *(column for _, column, _, _ in FIGURES)}
    if not rows or wanted - set(rows[0]):
        sys.exit(f"plot.py: {path} has no rows with the columns {', '.join(sorted(wanted))}")
    for number, row in enumerate(rows, start=2):
        try:
            [float(row[column]) for _, column, _, _ in FIGURES]
        except (TypeError, ValueError):
            sys.exit(f"plot.py: {path}, line {number}: a figure is missing or not a number")
    return rows


def draw(rows: list[dict[str, str]], column: str, scale: float, label: str, output: Path) -> None:
    groups = list(dict.fromkeys((row["model"], int(row["ranks"])) for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    values = defaultdict(list)
    for row in rows:
        values[row["policy"], (row["model"], int(row["ranks"]))].append(scale * float(row[column]))
    figure, axes = plt.subplots(figsize=(max(5, 1.8 * len(groups)), 4), layout="constrained")
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        found = [values[policy, group] for group in groups]
        axes.bar(
            [at - 0.4 + (index + 0.5) * width for at in range(len(groups))],
            [statistics.fmean(samples) if samples else 0.0 for samples in found],
            width,
            yerr=[statistics.stdev(samples) if len(samples) > 1 else 0.0 for samples in found],
            label=policy,
            color=COLOURS[index % len(COLOURS)],
            capsize=3,
        )
    axes.set_xticks(range(len(groups)), [f"{model.removesuffix('.gguf')}\n{ranks} ranks" for model, ranks in groups])
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(policies), frameon=False)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "results.csv")
    rows = read_rows(path)
    for name, column, scale, label in FIGURES:
        draw(rows, column, scale, label, path.with_name(name))
        print(path.with_name(name))


if __name__ == "__main__":
    main()
