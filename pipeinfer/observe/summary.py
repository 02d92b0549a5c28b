"""What `bench` and `simulate` print: a line for each combination, with means over its rows. Measures nothing."""

import csv
import json
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from pipeinfer.observe.columns import KEY, LOAD_COLUMNS, Record
from pipeinfer.observe.figures import percentiles
from pipeinfer.observe.table import LOADS, list_text
from pipeinfer.text import (
    count_text,
    json_text,
    markdown_table,
    milliseconds,
    number,
    printed,
    size_text,
    without_nan,
    without_suffixes,
)

SHARED = tuple(name for name in KEY if name not in ("prompt_hash", "prompt_n", "seed", "repetition"))
"""Generations that agree in these are samples of one combination; all questions of a set are one prompt."""

SPEEDS = ("prompt_n", "prompt_per_second", "predicted_per_second", "ttft_s", "tpot_s", "itl_mean_s")
AVERAGED = (*SPEEDS, "acceptance_rate", "hit_rate", "accepted_length", "total_s")
SHARED_BY_LOADS = tuple(name for name in LOADS.key if name not in ("seed", "repetition"))
KEPT_UP = 0.9  # share of the arrival rate that ranks which keep up with it serve at least

BEHIND = (
    "Requests/s `a of b`: b a second came, a were answered, from the first to the last of each; "
    "the longer such a load, the longer they wait."
)

Formats = dict[str, Callable[[dict[str, Any]], str]]  # a table: column -> what makes its cell of a summary

MODELS: Formats = {
    "model": lambda row: f"{without_suffixes(row['model'])} {row['quantisation']}",
    "draft": lambda row: without_suffixes(row["model_draft"]) or "-",
    "ranks": lambda row: str(row["ranks"]),
    "layers": lambda row: ",".join(map(str, row["layers"])),
}
POLICY: Formats = {"policy": lambda row: " ".join(filter(None, (row["policy"], row.get("variant"), row.get("pace"))))}
GENERATIONS: Formats = {
    "model": MODELS["model"],
    "size": lambda row: size_text(row["model_bytes"]) if row["model_bytes"] else "-",  # a profile has no file
    **MODELS,
    **POLICY,
    "test": lambda row: f"{row['prompt']} tg{row['predicted_n']}",
    "pp t/s": lambda row: _deviating(row, "prompt_per_second"),
    "tg t/s": lambda row: _deviating(row, "predicted_per_second"),
    "acceptance": lambda row: number(row["acceptance_rate"]),
    "hit rate": lambda row: number(row["hit_rate"]),
    "TTFT ms": lambda row: _deviating(row, "ttft_s", 1e3),
    "ITL p50 / p95 / p99 ms": lambda row: " / ".join(number(1e3 * row[f"itl_p{rank}_s"]) for rank in (50, 95, 99)),
    "TPOT ms": lambda row: _deviating(row, "tpot_s", 1e3),
}
TEST = list(GENERATIONS).index("test")
LOAD_SETTINGS: Formats = {
    **POLICY,
    "settings": lambda row: row["settings"] or "-",
    "requests": lambda row: str(row["n_requests"]),
    "come": lambda row: arrival_text(row),
    "tokens/s": lambda row: number(row["predicted_per_second"]),
    "requests/s": lambda row: _requests_text(row),
    "TTFT p50, p99": lambda row: _times(row, "ttft_p50_s", "ttft_p99_s"),
    "TPOT mean, p99": lambda row: _times(row, "tpot_mean_s", "tpot_p99_s"),
    "ITL p50, p99": lambda row: _times(row, "itl_p50_s", "itl_p99_s"),
    "acceptance": lambda row: number(row["acceptance_rate"]),
    "busiest stage": lambda row: f"{100 * busiest([row['busy']])[0]:.1f}%",
}
MEASURED_LOADS = MODELS | {"test": lambda row: f"{row['prompt']} tg{row['predict']}"} | LOAD_SETTINGS
SIMULATED_LOADS: Formats = LOAD_SETTINGS | {"stages evaluate": lambda row: f"{100 * fmean(row['evaluating']):.1f}%"}
"""`busiest stage`: its share of busy time; `stages evaluate`: the mean share, without the hosts' other work."""

LEFT_ALIGNED = ("model", "draft", "layers", "policy", "test", "settings", "come")


def print_summary(rows: Sequence[Record], output: str) -> None:
    """Print generations. `output`: md, csv, json or jsonl."""
    _print(summarise(rows), output, markdown)


def print_loads(rows: Sequence[Record], output: str) -> None:
    """Print measured loads."""
    _print(summarise_loads(rows), output, lambda loads: _load_table(MEASURED_LOADS, loads))


def print_simulated_loads(loads: Iterable[dict[str, Any]], output: str, as_json: bool) -> None:
    """`as_json`: print an object for each load as soon as it is simulated."""
    if as_json:
        for load in loads:
            print(json_text(load))
    else:
        _print(list(loads), output, lambda all_: _load_table(SIMULATED_LOADS, all_))


def _print(
    summaries: Sequence[dict[str, Any]], output: str, as_table: Callable[[Sequence[dict[str, Any]]], list[str]]
) -> None:
    if output == "md":
        print(printed(as_table(summaries)))
    elif output == "csv" and summaries:
        names = dict.fromkeys(name for summary in summaries for name in summary)  # some have a notice
        writer = csv.DictWriter(sys.stdout, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in summary.items()} for summary in summaries)
    elif output == "json":
        print(json.dumps(without_nan(summaries), indent=1))
    elif output == "jsonl":
        for summary in summaries:
            print(json_text(summary))
    sys.stdout.flush()


def _cell(value: Any) -> Any:
    """Empty for NaN."""
    return list_text(value) if isinstance(value, tuple | list) else without_nan(value)


def _grouped(rows: Sequence[Record], key: Callable[[Record], Hashable]) -> Iterable[list[Record]]:
    """Rows of the same key together, in the order of first appearance."""
    groups: dict[Hashable, list[Record]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.values()


def _mean(values: Sequence[Any]) -> Any:
    """A number that all agree on stays an integer, if it is one."""
    return values[0] if len(set(values)) == 1 else fmean(values) if values else math.nan


# -- generations


def summarise(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """A dict for each combination of generations. `_std`: the sample deviation, NaN for one sample."""
    return [_combination(samples) for samples in _grouped(rows, lambda row: tuple(_shared(row).values()))]


def _shared(row: Record) -> dict[str, Any]:
    return {name: row[name].split("/")[0] if name == "prompt" else row[name] for name in SHARED}


def _combination(rows: Sequence[Record]) -> dict[str, Any]:
    summary = _shared(rows[0]) | {"samples": len(rows)}
    for name in AVERAGED:
        values = [row[name] for row in rows if not math.isnan(row[name])]
        summary[name] = _mean(values)
        summary[f"{name}_std"] = stdev(values) if len(values) > 1 else math.nan
    # each row's 101 percentiles stand for its latencies: pooled, they are those of all rows
    p50, p95, p99 = percentiles(list(chain.from_iterable(row["itl_percentiles_s"] for row in rows)))
    return summary | {"itl_p50_s": p50, "itl_p95_s": p95, "itl_p99_s": p99}


def markdown(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """A table in llama-bench's manner: `pp` is the prompt, `tg` the generated text. Combinations that look alike also
    name what they differ in."""
    rows = [[cell(summary) for cell in GENERATIONS.values()] for summary in summaries]
    for row, summary in zip(rows, summaries, strict=True):
        alike = [other for cells, other in zip(rows, summaries, strict=True) if cells[:TEST] == row[:TEST]]
        others = [name for name in SHARED if name not in ("prompt", "predicted_n")]  # which `test` has
        differing = [name for name in others if len({str(other[name]) for other in alike}) > 1]
        row[TEST] += "".join(f", {name} {summary[name]}" for name in differing)
    return _table(GENERATIONS, rows)


def _table(formats: Formats, rows: Iterable[Sequence[str]]) -> list[str]:
    return markdown_table(list(formats), rows, right_aligned=[name for name in formats if name not in LEFT_ALIGNED])


def _deviating(summary: dict[str, Any], name: str, scale: float = 1.0) -> str:
    deviation = summary[f"{name}_std"]
    return number(scale * summary[name]) + ("" if math.isnan(deviation) else f" ± {number(scale * deviation)}")


# -- loads


def summarise_loads(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """A dict for each combination of loads: its key columns, the number of samples, and means of the others."""
    summaries = []
    for samples in _grouped(rows, lambda row: tuple(str(row[name]) for name in SHARED_BY_LOADS)):
        shared = {name: samples[0][name] for name in SHARED_BY_LOADS}
        summaries.append(shared | {"samples": len(samples)} | _means(samples))
    return summaries


def _means(rows: Sequence[Record]) -> dict[str, Any]:
    """Means of all figures; of lists place by place."""
    means: dict[str, Any] = {}
    for column in LOAD_COLUMNS:
        if not column.is_key and column.kind != "text":
            values = [row[column.name] for row in rows]
            is_list = column.kind in ("integers", "numbers")
            means[column.name] = tuple(map(fmean, zip(*values, strict=False))) if is_list else _mean(values)
    return means


def _load_table(formats: Formats, loads: Sequence[dict[str, Any]]) -> list[str]:
    lines = _table(formats, [[cell(load) for cell in formats.values()] for load in loads])
    return [*lines, "", BEHIND] if any(map(falls_behind, loads)) else lines


def arrival_text(load: dict[str, Any]) -> str:
    """How requests of a load arrive: `4 clients`, `0.5/s, 32 at a time`."""
    if load["concurrency"]:
        return count_text(load["concurrency"], "client")
    arrival = "at once" if load["rate"] is None or math.isnan(load["rate"]) else f"{load['rate']:g}/s"
    return f"{arrival}, {load['parallel']} at a time"


def falls_behind(load: dict[str, Any]) -> bool:
    """Whether requests arrived faster than they were served. False for clients, which wait for their texts."""
    return bool(load["served_per_second"] < KEPT_UP * load["offered_per_second"])


def _requests_text(load: dict[str, Any]) -> str:
    if falls_behind(load):
        return f"{number(load['served_per_second'])} of {number(load['offered_per_second'])}"
    return number(load["requests_per_second"])


def _times(load: dict[str, Any], *names: str) -> str:
    return ", ".join(milliseconds(load[name]) for name in names)


def busiest(busy: Sequence[Sequence[float]]) -> list[float]:
    """For each repetition, the share of the stage that is busiest on average. `busy`: stages' shares by repetition."""
    means = [fmean(stage) for stage in zip(*busy, strict=False)]
    return [shares[means.index(max(means))] for shares in busy]
