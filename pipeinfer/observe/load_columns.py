"""The columns of load.csv, a row a load: many requests at a time, and how they fared. Knows no file and no row."""

from __future__ import annotations

from pipeinfer.observe.columns import COLUMNS, Column
from pipeinfer.observe.table import Table

SHARED = {column.name: column for column in COLUMNS}
"""Of results.csv, with the same meaning here."""

SHARES = (("mean", "mean"), ("p50", "median"), ("p90", "90th percentile"), ("p95", "95th percentile"),
          ("p99", "99th percentile"))  # fmt: skip
LATENCIES = {
    "ttft": "time to first token (s) over requests, from when each came",
    "tpot": "mean time per output token (s) after the first, over requests",
    "itl": "inter-token latency (s) over all tokens but the first ones; tokens of one verdict share the gap before it",
}


def _shared(*names: str) -> tuple[Column, ...]:
    return tuple(SHARED[name] for name in names)


def _latency(name: str, meaning: str) -> tuple[Column, ...]:
    figures = (Column(f"{name}_{share}_s", "number", f"{shown}: {meaning}") for share, shown in SHARES)
    return (*figures, Column(f"{name}_percentiles_s", "numbers", "all its percentiles, 0 to 100"))


LOAD_COLUMNS = (
    *_shared("policy", "variant", "settings", "options", "model", "model_bytes", "model_hash", "quantisation"),
    *_shared("model_draft", "model_draft_bytes", "model_draft_hash", "quantisation_draft"),
    *_shared("ranks", "layers", "threads"),
    Column("prompt", "text", "names of the files that prompts are of, joined with +", asked=True),
    Column("prompt_hash", "text", "of the tokens of all prompts, in the order in which they are asked", asked=True),
    Column("n_requests", "integer", "requests; where prompts are fewer they are asked again", asked=True),
    Column("predict", "integer", "tokens generated for each", asked=True),
    Column("concurrency", "integer", "clients, each asks when it has its text; 0: they come at a `rate`", asked=True),
    Column("rate", "number", "requests a second, a Poisson process; empty: as clients ask", asked=True),
    Column("parallel", "integer", "requests at a time that the job was loaded for, and has open at most", asked=True),
    Column("seed", "integer", "of when requests come, and of the first one's sampling", asked=True),
    *_shared("temp", "top_k", "top_p", "min_p", "repeat_last_n", "repeat_penalty", "frequency_penalty"),
    *_shared("presence_penalty", "numerics", "pace", "pace_hash", "repetition"),
    Column("wall_s", "number", "time (s) from when the first request came to the last token"),
    Column("prompt_n", "integer", "tokens of all prompts, cached ones included"),
    Column("cache_n", "integer", "of these, those that another request which begins alike had evaluated"),
    Column("predicted_n", "integer", "tokens generated, of all requests"),
    Column("requests_per_second", "number", "requests / `wall_s`"),
    Column("offered_per_second", "number", "of those of a `rate`, how many a second came, from the first to the last"),
    Column("served_per_second", "number", "of these, how many a second ended, from the first end to the last"),
    Column("prompt_per_second", "number", "tokens of all prompts / `wall_s`"),
    Column("predicted_per_second", "number", "tokens generated / `wall_s`: the throughput"),
    *(column for name, meaning in LATENCIES.items() for column in _latency(name, meaning)),
    Column("draft_n_judged", "integer", "guesses that got a verdict"),
    Column("draft_n_accepted", "integer", "those that were right"),
    *_shared("acceptance_rate"),
    Column("open_max", "integer", "most requests open at a time"),
    Column("busy", "numbers", "share of each stage's time, from the first token to the last, spent on runs"),
    Column("busy_s", "numbers", "time of each rank (s) spent working, from the first token to the last"),
    *_shared("cancelled_s", "waiting_s", "idle_s", "peak_rss_bytes", "roles", "version", "date", "hosts"),
)

LOADS = Table(LOAD_COLUMNS)
