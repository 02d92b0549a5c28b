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
from pipeinfer.observe.table import LOADS
from pipeinfer.text import json_text, markdown_table, milliseconds, number, size_text, without_nan, without_suffixes

SHARED = tuple(name for name in KEY if name not in ("prompt_hash", "prompt_n", "seed", "repetition"))
"""Generations that agree in these are samples of one combination; all questions of a set are one prompt."""

AVERAGED = ("prompt_n", "prompt_per_second", "predicted_per_second", "ttft_s", "tpot_s", "itl_mean_s",
            "acceptance_rate", "hit_rate", "accepted_length", "total_s")  # fmt: skip
LAST_NAME = ("prompt", "predicted_n")  # what the last of the names shows
NAMES = ("model", "size", "draft", "ranks", "layers", "policy", "test")
FIGURES = ("pp t/s", "tg t/s", "acceptance", "hit rate", "TTFT ms", "ITL p50 / p95 / p99 ms", "TPOT ms")
RIGHT_ALIGNED = ("size", "ranks", *FIGURES)

SHARED_BY_LOADS = tuple(name for name in LOADS.key if name not in ("seed", "repetition"))
KEPT_UP = 0.9
"""Share of the arrival rate that ranks which keep up with it serve at least."""

BEHIND = ("Requests/s `a of b`: b a second came, a were answered, from the first to the last of each; the longer such "
          "a load, the longer they wait.")  # fmt: skip

Cells = dict[str, Callable[[dict[str, Any]], str]]
"""A table: column -> the cell of a load."""

LOAD_SET_UP: Cells = {
    "model": lambda load: f"{without_suffixes(load['model'])} {load['quantisation']}",
    "draft": lambda load: without_suffixes(load["model_draft"]) or "-",
    "ranks": lambda load: str(load["ranks"]),
    "layers": lambda load: ",".join(map(str, load["layers"])),
    "test": lambda load: f"{load['prompt']} tg{load['predict']}",
}
LOAD_SETTINGS: Cells = {
    "policy": lambda load: " ".join(filter(None, (load["policy"], load.get("variant"), load.get("pace")))),
    "settings": lambda load: load["settings"] or "-",
    "requests": lambda load: str(load["n_requests"]),
    "come": lambda load: arrival_text(load),
}
LOAD_FIGURES: Cells = {
    "tokens/s": lambda load: number(load["predicted_per_second"]),
    "requests/s": lambda load: _requests_text(load),
    "TTFT p50, p99": lambda load: _times(load, "ttft_p50_s", "ttft_p99_s"),
    "TPOT mean, p99": lambda load: _times(load, "tpot_mean_s", "tpot_p99_s"),
    "ITL p50, p99": lambda load: _times(load, "itl_p50_s", "itl_p99_s"),
    "acceptance": lambda load: number(load["acceptance_rate"]),
    "busiest stage": lambda load: f"{100 * busiest([load['busy']])[0]:.1f}%",
}
SIMULATED: Cells = {"stages evaluate": lambda load: f"{100 * fmean(load['evaluating']):.1f}%"}


def print_summary(rows: Sequence[Record], output: str) -> None:
    """Print generations. `output`: md, csv, json or jsonl."""
    _print(summarise(rows), output, markdown)


def print_loads(rows: Sequence[Record], output: str) -> None:
    """Print measured loads."""
    _print(summarise_loads(rows), output, lambda loads: load_table(LOAD_SET_UP | LOAD_SETTINGS | LOAD_FIGURES, loads))


def print_simulated_loads(loads: Iterable[dict[str, Any]], output: str, as_json: bool) -> None:
    """`as_json`: print an object for each load as soon as it is simulated."""
    if as_json:
        for load in loads:
            print(json_text(load))
    else:
        _print(list(loads), output, lambda all_: load_table(LOAD_SETTINGS | LOAD_FIGURES | SIMULATED, all_))


def _print(
    summaries: Sequence[dict[str, Any]], output: str, as_table: Callable[[Sequence[dict[str, Any]]], list[str]]
) -> None:
    if output == "md":
        print("\n".join(as_table(summaries)))
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
    """Empty for NaN; a list joined with commas, its whole numbers with all their digits."""
    if isinstance(value, tuple | list):
        return ",".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in value)
    return without_nan(value)


def _grouped(rows: Sequence[Record], key: Callable[[Record], Hashable]) -> list[list[Record]]:
    """Rows of the same key together, in the order of first appearance."""
    groups: dict[Hashable, list[Record]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


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
    """A table in llama-bench's manner: `pp` is the prompt, `tg` the generated text."""
    names = _distinct_names(summaries)
    rows = [name + _figures(summary) for name, summary in zip(names, summaries, strict=True)]
    return markdown_table((*NAMES, *FIGURES), rows, right_aligned=RIGHT_ALIGNED)


def _distinct_names(summaries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells that name each combination; combinations that look alike also name what they differ in."""
    names = [_names(summary) for summary in summaries]
    for cells, summary in zip([*names], summaries, strict=True):
        alike = [other for name, other in zip(names, summaries, strict=True) if name[:-1] == cells[:-1]]
        others = (name for name in SHARED if name not in LAST_NAME)
        differing = [name for name in others if len({str(other[name]) for other in alike}) > 1]
        cells[-1] += "".join(f", {name} {summary[name]}" for name in differing)
    return names


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


# -- loads


def summarise_loads(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """A dict for each combination of loads: its key columns, the number of samples, and means of the others."""
    groups = _grouped(rows, lambda row: tuple(str(row[name]) for name in SHARED_BY_LOADS))
    return [
        {name: samples[0][name] for name in SHARED_BY_LOADS} | {"samples": len(samples)} | _means(samples)
        for samples in groups
    ]


def _means(rows: Sequence[Record]) -> dict[str, Any]:
    """Means of all figures; of lists place by place."""
    means: dict[str, Any] = {}
    for column in LOAD_COLUMNS:
        if not column.is_key and column.kind != "text":
            values = [row[column.name] for row in rows]
            is_list = column.kind in ("integers", "numbers")
            means[column.name] = tuple(map(fmean, zip(*values, strict=False))) if is_list else _mean(values)
    return means


def load_table(cells: Cells, loads: Sequence[dict[str, Any]]) -> list[str]:
    """`busiest stage`: its share of busy time; `stages evaluate`: the mean share, without the hosts' other work."""
    rows = ([text(load) for text in cells.values()] for load in loads)
    lines = markdown_table(list(cells), rows, ["ranks", "requests", *LOAD_FIGURES, *SIMULATED])
    return [*lines, "", BEHIND] if any(map(falls_behind, loads)) else lines


def arrival_text(load: dict[str, Any]) -> str:
    """How requests of a load arrive: `4 clients`, `0.5/s, 32 at a time`."""
    if load["concurrency"]:
        return f"{load['concurrency']} {'client' if load['concurrency'] == 1 else 'clients'}"
    at_once = load["rate"] is None or math.isnan(load["rate"])
    return f"{'at once' if at_once else format(load['rate'], 'g') + '/s'}, {load['parallel']} at a time"


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
