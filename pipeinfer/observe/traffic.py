"""What became of many requests, as a table: throughput, latencies, how busy the stages were. Measures nothing."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeinfer.observe.columns import LOAD_COLUMNS
from pipeinfer.observe.report import milliseconds, number, without_suffixes
from pipeinfer.observe.summary import print_records
from pipeinfer.observe.table import Record
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.observe.texts.markdown import markdown_table

Cells = dict[str, Callable[[dict[str, Any]], str]]

ASKED: Cells = {
    "policy": lambda load: " ".join(filter(None, (load["policy"], load.get("variant"), load.get("pace")))),
    "settings": lambda load: load["settings"] or "-",
    "requests": lambda load: str(load["n_requests"]),
    "come": lambda load: come_text(load),
}
SET_UP: Cells = {
    "model": lambda load: f"{without_suffixes(load['model'])} {load['quantisation']}",
    "draft": lambda load: without_suffixes(load["model_draft"]) or "-",
    "ranks": lambda load: str(load["ranks"]),
    "layers": lambda load: ",".join(map(str, load["layers"])),
    "test": lambda load: f"{load['prompt']} tg{load['predict']}",
}
FIGURES: Cells = {
    "tokens/s": lambda load: number(load["predicted_per_second"]),
    "requests/s": lambda load: _requests_text(load),
    "TTFT p50, p99": lambda load: _pair(load, "ttft_p50_s", "ttft_p99_s"),
    "TPOT mean, p99": lambda load: _pair(load, "tpot_mean_s", "tpot_p99_s"),
    "ITL p50, p99": lambda load: _pair(load, "itl_p50_s", "itl_p99_s"),
    "acceptance": lambda load: number(load["acceptance_rate"]),
    "busiest stage": lambda load: f"{100 * busiest([load['busy']])[0]:.1f}%",
}
SIMULATED: Cells = {
    "stages evaluate": lambda load: f"{100 * sum(load['evaluating']) / len(load['evaluating']):.1f}%",
}
KEPT_UP = 0.9
"""Of the rate at which requests come, what they end at least at where the ranks keep up with them."""
BEHIND = ("Requests/s `a of b`: b a second came, a were answered, from the first to the last of each; the longer such "
          "a load, the longer they wait.")  # fmt: skip
SAMPLES = ("seed", "repetition")
"""What loads of one combination may differ in."""


def come_text(load: dict[str, Any]) -> str:
    """How its requests come: `4 clients`, `0.5/s, 32 at a time`."""
    if load["concurrency"]:
        return f"{load['concurrency']} {'client' if load['concurrency'] == 1 else 'clients'}"
    at_once = load["rate"] is None or math.isnan(load["rate"])
    return f"{'at once' if at_once else format(load['rate'], 'g') + '/s'}, {load['parallel']} at a time"


def show_loads(loads: Iterable[dict[str, Any]], output: str, as_json: bool) -> None:
    """Simulated ones. `output` as for `print_records`; `as_json`: an object a load instead, each as it comes."""
    if as_json:
        for load in loads:
            print(json_text(load))
    else:
        print_records(list(loads), output, lambda found: table(ASKED | FIGURES | SIMULATED, found))


def print_loads(rows: Sequence[Record], output: str) -> None:
    """Measured ones: a line a combination, of repetitions the means."""
    print_records(summarise(rows), output, lambda found: table(SET_UP | ASKED | FIGURES, found))


def table(cells: Cells, loads: Sequence[dict[str, Any]]) -> list[str]:
    """Its lines. `busiest stage`: its share of busy time; `stages evaluate`: the mean share, without hosts' other
    work."""
    rows = ([text(load) for text in cells.values()] for load in loads)
    lines = markdown_table(list(cells), rows, ["ranks", "requests", *FIGURES, *SIMULATED])
    return [*lines, "", BEHIND] if any(map(falls_behind, loads)) else lines


def falls_behind(load: dict[str, Any]) -> bool:
    """Whether requests came faster than they were answered. False where clients ask, who wait for each other."""
    return bool(load["served_per_second"] < KEPT_UP * load["offered_per_second"])


def _requests_text(load: dict[str, Any]) -> str:
    if falls_behind(load):
        return f"{number(load['served_per_second'])} of {number(load['offered_per_second'])}"
    return number(load["requests_per_second"])


def _pair(load: dict[str, Any], *names: str) -> str:
    return ", ".join(milliseconds(load[name]) for name in names)


def busiest(busy: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition, how busy the stage is that is busiest on average. `busy`: stages' shares, by repetition."""
    means = [statistics.fmean(stage) for stage in zip(*busy, strict=False)]
    return [shares[means.index(max(means))] for shares in busy]


def summarise(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """One dict a combination, in the order of first appearance: what was asked, how often, and means."""
    asked = [column.name for column in LOAD_COLUMNS if column.asked and column.name not in SAMPLES]
    groups = dict[tuple[str, ...], list[Record]]()
    for row in rows:
        groups.setdefault(tuple(str(row[name]) for name in asked), []).append(row)
    return [
        {name: found[0][name] for name in asked} | {"samples": len(found)} | _means(found) for found in groups.values()
    ]


def _means(rows: Sequence[Record]) -> dict[str, Any]:
    """Of the figures; of lists place by place."""
    means: dict[str, Any] = {}
    for column in LOAD_COLUMNS:
        values = [row[column.name] for row in rows]
        if column.asked or column.kind == "text":
            continue
        if column.kind in ("integers", "numbers"):
            means[column.name] = tuple(statistics.fmean(place) for place in zip(*values, strict=False))
        else:
            means[column.name] = values[0] if len(set(values)) == 1 else statistics.fmean(values)
    return means
