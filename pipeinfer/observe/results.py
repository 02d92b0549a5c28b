"""The tables results.csv, a row a generation, and load.csv, a row a load. Knows no ranks and no file."""

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from pipeinfer import __version__
from pipeinfer.core.requests import Request
from pipeinfer.observe.columns import COLUMNS, LOAD_COLUMNS, NAMES
from pipeinfer.observe.metrics import RequestMetrics, speculation, timings
from pipeinfer.observe.table import Record, Table

RESULTS, LOADS = Table(COLUMNS), Table(LOAD_COLUMNS)
"""results.csv and load.csv."""

key_of, check_results, append_result, as_read = RESULTS.key_of, RESULTS.check, RESULTS.append, RESULTS.as_read
read_results = RESULTS.read


def result_object(
    request: Request, metrics: RequestMetrics, asked: Record, shown: Sequence[str], text: str = "", **others: Any
) -> dict[str, Any]:
    """One generation, as `--json` prints it. `shown`: its columns of `asked`; `others`: of a real, or of a simulated
    one."""
    return {
        "text": text,
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        **{name: asked[name] for name in shown},
        "version": __version__,
        "timings": timings(metrics),
        "speculation": speculation(metrics),
        **others,
    }


def result_row(result: dict[str, Any], asked: Record) -> Record:
    """The columns of one generation: what was asked for, and what its result object (what `--json` prints) measured."""
    ranks, hops = result["ranks"], result["wire"]["hops"]
    known = result["timings"] | result["speculation"] | {"version": result["version"]}
    by_host = {rank["host"]: rank.get("joules", math.nan) for rank in ranks}  # ranks of a host have one meter
    known["joules_per_token"] = sum(by_host.values()) / max(1, known["predicted_n"])
    known["prompt_n"] = known["prompt_n"] + known["cache_n"]
    lists = [column.name for column in COLUMNS if column.name in ranks[0] and not column.asked]
    return asked | {name: known[name] for name in NAMES if name in known} | {
        name: [rank.get(name, "") for rank in ranks] for name in lists
    } | {
        "messages": sum(hop["messages"] for hop in hops),
        "message_bytes": sum(hop["bytes"] for hop in hops),
        "cancel_messages": result["wire"]["cancel_messages"],
        "roles": ";".join(rank["role"] for rank in ranks),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hosts": ",".join(rank["host"] for rank in ranks),
    }  # fmt: skip
