"""What a benchmark prints: one line a combination, means and deviations over its generations. Measures nothing."""

import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from pipeinfer.observe.columns import ASKED
from pipeinfer.observe.metrics import percentiles
from pipeinfer.observe.report import number, without_suffixes
from pipeinfer.observe.table import Record
from pipeinfer.observe.texts.json_text import json_text, without_nan
from pipeinfer.observe.texts.markdown import markdown_table
from pipeinfer.sizes import size_text

SAME = tuple(name for name in ASKED if name not in ("prompt_hash", "prompt_n", "seed", "repetition"))
"""Rows that agree in these are samples of one combination; all questions of a set are one prompt."""

AVERAGED = ("prompt_n", "prompt_per_second", "predicted_per_second", "ttft_s", "tpot_s", "itl_mean_s",
            "acceptance_rate", "hit_rate", "accepted_length", "total_s")  # fmt: skip


def summarise(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """One dict a combination, in the order of first appearance. `_std` is the sample deviation, NaN for one sample."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(_shared(row).values()), []).append(row)
    return [_combination(samples) for samples in found.values()]


def _shared(row: Record) -> dict[str, Any]:
    return {name: row[name].split("/")[0] if name == "prompt" else row[name] for name in SAME}


def _combination(rows: Sequence[Record]) -> dict[str, Any]:
    summary = _shared(rows[0]) | {"samples": len(rows)}
    for name in AVERAGED:
        values = [row[name] for row in rows if not math.isnan(row[name])]
        # one number that all agree on stays what it is: an integer, if it is one
        same = len(set(values)) == 1
        summary[name] = values[0] if same else statistics.fmean(values) if values else math.nan
        summary[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else math.nan
    # each row's 101 percentiles stand for its latencies: pooled, they are those of all rows
    p50, p95, p99 = percentiles(list(chain.from_iterable(row["itl_percentiles_s"] for row in rows)))
    return summary | {"itl_p50_s": p50, "itl_p95_s": p95, "itl_p99_s": p99}


def print_summary(rows: Sequence[Record], output: str) -> None:
    """`output`: md, csv, json or jsonl."""
    print_records(summarise(rows), output, markdown)


def print_records(
    summaries: Sequence[dict[str, Any]], output: str, as_table: Callable[[Sequence[dict[str, Any]]], list[str]]
) -> None:
    """Dicts with the same keys: as a table, or as they are."""
    if output == "md":
        for line in as_table(summaries):
            print(line)
    elif output == "csv" and summaries:
        writer = csv.DictWriter(sys.stdout, list(summaries[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in summary.items()} for summary in summaries)
    elif output == "json":
        print(json.dumps(without_nan(summaries), indent=1))
    elif output == "jsonl":
        for summary in summaries:
            print(json_text(summary))
    sys.stdout.flush()


def _cell(value: Any) -> Any:
    """Empty for NaN; of a list all whole numbers with all their digits."""
    if isinstance(value, tuple | list):
        return ",".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in value)
    return without_nan(value)


COLUMNS_OF_NAMES = ("model", "size", "draft", "ranks", "layers", "policy", "test")
COLUMNS_OF_FIGURES = ("pp t/s", "tg t/s", "acceptance", "hit rate", "TTFT ms", "ITL p50 / p95 / p99 ms", "TPOT ms")
RIGHT_ALIGNED = ("size", "ranks", *COLUMNS_OF_FIGURES)


def markdown(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """A table in llama-bench's manner: `pp` is the prompt, `tg` the generated text."""
    names = _told_apart(summaries)
    rows = [name + _figures(summary) for name, summary in zip(names, summaries, strict=True)]
    return markdown_table((*COLUMNS_OF_NAMES, *COLUMNS_OF_FIGURES), rows, right_aligned=RIGHT_ALIGNED)


def _told_apart(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells that name each combination; of those that look alike, what they differ in is added."""
    names = [_names(summary) for summary in summaries]
    for mine, summary in zip([*names], summaries, strict=True):
        alike = [other for name, other in zip(names, summaries, strict=True) if name[:-1] == mine[:-1]]
        differing = [name for name in SAME if len({str(other[name]) for other in alike}) > 1 and name not in NAMED]
        mine[-1] += "".join(f", {name} {summary[name]}" for name in differing)
    return names


NAMED = ("prompt", "predicted_n")  # what the last of the names shows


def _names(summary: dict[str, Any]) -> list[str]:
    return [
        f"{without_suffixes(summary['model'])} {summary['quantisation']}",
        size_text(summary["model_bytes"]) if summary["model_bytes"] else "-",  # a profile has no file
        without_suffixes(summary["model_draft"]) or "-",
        str(summary["ranks"]),
        ",".join(map(str, summary["layers"])),
        " ".join(filter(None, (summary["policy"], summary["variant"], summary["pace"]))),
        f"{summary['prompt']} tg{summary['predicted_n']}",
    ]


def _figures(summary: dict[str, Any]) -> list[str]:
    def mean(name: str, scale: float = 1.0) -> str:
        deviation = summary[f"{name}_std"]
        return number(scale * summary[name]) + ("" if math.isnan(deviation) else f" ± {number(scale * deviation)}")

    itl = " / ".join(number(1e3 * summary[f"itl_p{rank}_s"]) for rank in (50, 95, 99))
    return [
        mean("prompt_per_second"), mean("predicted_per_second"), number(summary["acceptance_rate"]),
        number(summary["hit_rate"]), mean("ttft_s", 1e3), itl, mean("tpot_s", 1e3),
    ]  # fmt: skip
