"""What became of many requests, as a table: throughput, latencies, how busy the stages were. Simulates nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeinfer.observe.json_text import json_text
from pipeinfer.observe.markdown import markdown_table
from pipeinfer.observe.report import milliseconds, number
from pipeinfer.observe.summary import print_records

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "policy": lambda load: str(load["policy"]),
    "settings": lambda load: load["settings"] or "-",
    "requests": lambda load: str(load["n_requests"]),
    "at a time": lambda load: str(load["parallel"]),
    "tokens/s": lambda load: number(load["predicted_per_second"]),
    "TTFT p50, p99": lambda load: f"{milliseconds(load['ttft_p50_s'])}, {milliseconds(load['ttft_p99_s'])}",
    "TPOT mean, p99": lambda load: f"{milliseconds(load['tpot_mean_s'])}, {milliseconds(load['tpot_p99_s'])}",
    "acceptance": lambda load: number(load["acceptance_rate"]),
    "busiest stage": lambda load: f"{100 * max(load['busy']):.1f}%",
    "stages evaluate": lambda load: f"{100 * sum(load['evaluating']) / len(load['evaluating']):.1f}%",
}


def show_loads(loads: Iterable[dict[str, Any]], output: str, as_json: bool) -> None:
    """`output` as for `print_records`; `as_json`: an object a load instead, each as it comes."""
    if as_json:
        for load in loads:
            print(json_text(load))
    else:
        print_records(list(loads), output, table)


def table(loads: Sequence[dict[str, Any]]) -> list[str]:
    """Its lines. `busiest stage`: how much of the time it was not idle; `stages evaluate`: the mean of all stages'
    time, without what their hosts do besides."""
    rows = ([text(load) for text in COLUMNS.values()] for load in loads)
    return markdown_table(list(COLUMNS), rows, list(COLUMNS)[2:])
