"""A plan for people: its rows as cells of a table, its predictions and what would help as lines. Knows plain data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeinfer.observe.report import number
from pipeinfer.observe.texts.markdown import markdown_table
from pipeinfer.sizes import size_text

Row = Mapping[str, Any]

ALWAYS = ("rank", "host", "role", "layers", "weights", "KV", "memory", "spare", "threads")
"""What fits on a narrow terminal."""

UNFIT = "its plan does not fit"
"""Why no speed is predicted of a policy, where it is that."""

USUAL = {"backend": "llama"}
"""A column whose cells all say this is not shown; of the others one of dashes."""

WORDS = ("host", "GPU", "backend", "device", "speed from", "a layer", "role", "layers")


def _size(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else f"-{size_text(-n_bytes)}" if n_bytes < 0 else size_text(n_bytes)


def _speed(row: Row) -> str:
    if row["read_bytes_per_s"] is None:
        return "-"
    return f"{row['read_bytes_per_s'] / 1e9:.3g} GB/s, {row['flop_per_s'] / 1e9:.4g} GFLOP/s"


def _layer(row: Row) -> str:
    return "-" if row["layer_s"] is None else f"{1e3 * row['layer_s']:.3g} ms, {row['layer_source']}"


CELLS: Mapping[str, Callable[[Row], str]] = {
    "rank": lambda row: str(row["rank"]),
    "host": lambda row: row["host"],
    "cores": lambda row: _or_dash(row["n_cores"]),
    "free": lambda row: _size(row["room_bytes"]),
    "GPU": lambda row: _or_dash(row["gpu"]),
    "backend": lambda row: row["backend"],
    "device": lambda row: _or_dash(row["device"]),
    "speed": _speed,
    "speed from": lambda row: _or_dash(row["speed_source"]),
    "a layer": _layer,
    "role": lambda row: row["role"],
    "layers": lambda row: _or_dash(row["layers"]),
    "weights": lambda row: _size(row["weight_bytes"]),
    "KV": lambda row: _size(row["kv_bytes"]),
    "buffers": lambda row: _size(row["buffer_bytes"]),
    "memory": lambda row: _size(row["memory_bytes"]),
    "spare": lambda row: _size(row["spare_bytes"]),
    "on GPUs": lambda row: _size(row["gpu_bytes"] or None),
    "spare there": lambda row: _size(row["gpu_spare_bytes"]),
    "fits": lambda row: "yes" if row["fits"] else "no",
    "threads": lambda row: _or_dash(row["threads"]),
}


def plan_cells(rows: Sequence[Row], names: Sequence[str] = tuple(CELLS)) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of `plan_rows`; of columns that not always say something, those that do here."""
    cells = {name: [CELLS[name](row) for row in rows] for name in names}
    shown = [name for name in names if name in ALWAYS or set(cells[name]) != {USUAL.get(name, "-")}]
    return shown, [[cells[name][index] for name in shown] for index in range(len(rows))]


def plan_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of `plan_report`."""
    drafts = f", drafts {', '.join(found['drafts'])}" if found["drafts"] else ""
    wire = "" if found["wire_type"] == "f32" else f", activations travel as {found['wire_type']}"
    yield (
        f"{found['model']}{drafts}: policy {found['policy']}, context {found['n_ctx']}, "
        f"numerics {found['numerics_name']}"
        f"{wire}"
    )
    yield ""
    columns, cells = plan_cells(found["ranks"])
    yield from markdown_table(columns, cells, [column for column in columns if column not in WORDS])
    yield ""
    if found["predictions"]:
        yield from _predictions(found)
        yield ""
    yield from _not_predicted(found["not_predicted"])
    yield from (f"helps: {_way(way)}" for way in found["ways"])
    yield from (f"note: {note}" for note in (*found["warnings"], *found["notes"]))


def _predictions(found: Mapping[str, Any]) -> Iterator[str]:
    link = found["link"]
    assumed = ", ".join(number(share) for share in found["acceptance"])
    yield (
        f"Predicted for a prompt of {found['prompt_n']} tokens, links of {8e-9 * link['bytes_per_s']:.3g} Gbit/s and "
        f"{1e6 * link['latency_s']:.3g} us" + (f", acceptance {assumed}:" if assumed else ":")
    )
    yield ""
    rows = [
        [
            f"{each['policy']}{' (planned)' if each['planned'] else ''}",
            number(each["tokens_per_s"]),
            "-" if each["over_iterative"] is None else number(each["over_iterative"]),
            number(each["limit_per_s"]),
            *(number(1e3 * each[name], 1) for name in ("ttft_s", "itl_p50_s")),
        ]
        for each in found["predictions"]
    ]
    columns = ["policy", "tokens/s", "over iterative", "limit", "TTFT ms", "ITL ms p50"]
    yield from markdown_table(columns, rows, columns[1:])


def _not_predicted(whys: Mapping[str, str]) -> Iterator[str]:
    """A line a reason; none where nothing fits, which is said anyway."""
    for why in dict.fromkeys(why for why in whys.values() if why != UNFIT):
        yield f"not predicted: {', '.join(policy for policy, other in whys.items() if other == why)}: {why}"


def _way(way: Mapping[str, Any]) -> str:
    if not way["fits"]:
        return f"{way['what']}: then {size_text(way['short_bytes'])} are missing"
    speed = way["tokens_per_s"]
    return f"{way['what']}: it fits" if speed is None else f"{way['what']}: {number(speed)} tokens/s"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
