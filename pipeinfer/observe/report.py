"""What rank 0 prints on stderr: tables and statistics. Plain text when it is no terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeinfer.sizes import size_text

DEPTHS_SHOWN = 8
WIDEST = 10_000
UNEVEN = 2.0
"""A stage that is busy so many times as long as another one has too many layers."""

USES = ("busy", "waiting", "idle", "cancelled")  # of a rank's time


def stderr_console() -> Console:
    console = Console(stderr=True, highlight=False)
    # a pipe has no width: let lines be as long as they are
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=200)


def show_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column not in ("host", "role", "layers", "hop", "GPU", "speed from")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(max_width=WIDEST)).maximum > console.width:
        # cut columns would hide what the user looks for
        for row in rows:
            console.print(", ".join(f"{column} {cell}" for column, cell in zip(columns, row, strict=True)))
        return
    console.print(table)


def number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def without_suffixes(names: str) -> str:
    """Of one model, or of several joined with +."""
    return "+".join(name.removesuffix(".gguf") for name in names.split("+"))


def milliseconds(value_s: float) -> str:
    return "-" if math.isnan(value_s) else f"{1e3 * value_s:.1f} ms"


def show_statistics(console: Console, result: dict[str, Any]) -> None:
    """The end of a run, from the same object that --json prints."""
    t, s = result["timings"], result["speculation"]
    p50, p95, p99 = (milliseconds(t[f"itl_p{rank}_s"]) for rank in (50, 95, 99))
    console.print(
        f"prompt      {t['prompt_n']} tokens, {number(t['prompt_per_second'])} tokens/s, "
        f"TTFT {milliseconds(t['ttft_s'])}"
    )
    console.print(
        f"generation  {t['predicted_n']} tokens, {number(t['predicted_per_second'])} tokens/s, "
        f"ITL p50 {p50}, p95 {p95}, p99 {p99}"
    )
    if s["draft_n"]:
        console.print(
            f"speculation acceptance {number(s['acceptance_rate'])} ({s['draft_n_accepted']} of {s['draft_n_judged']} "
            f"guesses right), hit rate {number(s['hit_rate'])} ({s['draft_n_accepted']} of {s['contested_n']} tokens "
            f"guessed), {number(s['accepted_length'])} tokens a verdict, draft time {number(s['draft_s'])} s"
        )
        depths = ", ".join(
            f"{depth}: {100 * counts['right'] / counts['n']:.0f}% of {counts['n']}"
            for depth, counts in list(s["by_depth"].items())[:DEPTHS_SHOWN]
        )
        console.print(f"depth       likeliest guess right, by tokens ahead: {depths or '-'}")
        rows = ", ".join(milliseconds(row_s) for row_s in result["stage_row_s"])
        console.print(f"costs       draft step {milliseconds(s['draft_step_s'])}; one row in each stage {rows}")
    for notice in s["notices"]:
        console.print(f"note        {notice}")
    console.print(f"runs        {s['runs']}, {s['rows']} rows, {s['runs_cancelled']} cancelled")
    if s["runs_cancelled"]:
        n_layers = sum(rank["layers_saved"] for rank in result["ranks"] if "layers_saved" in rank)
        console.print(f"cancelled   {s['runs_cancelled']} runs, which spared {n_layers} layer evaluations")
    hops = [
        f"{hop['from']}->{hop['to']} {hop['messages']} messages{_apart(hop)}, {size_text(hop['bytes'])}"
        for hop in result["wire"]["hops"]
    ]
    if hops:
        console.print(f"wire        {'; '.join(hops)}")


def show_outcome(console: Console, result: dict[str, Any], has_draft: bool, is_split: bool) -> None:
    """The end of a run in two lines: how fast it was, and how busy the ranks were. `has_draft`: there is one, used or
    not; `is_split`: the user has split the layers."""
    lines = [speed_text(result["timings"]) + guessed_text(result["speculation"]), busy_text(result["ranks"])]
    if not result["speculation"]["notices"] and (advice := advice_on(result, has_draft, is_split)):
        lines[-1] += f"; {advice}"
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def speed_text(t: dict[str, Any]) -> str:
    """Of one text, from its timings."""
    read = f"{t['prompt_n']} of {t['prompt_n'] + t['cache_n']}" if t["cache_n"] else str(t["prompt_n"])
    return (f"{t['predicted_n']} tokens, {number(t['predicted_per_second'])} tokens/s, first after "
            f"{number(t['ttft_s'])} s; {read} prompt tokens read")  # fmt: skip


def guessed_text(s: dict[str, Any]) -> str:
    """How many tokens of a text a draft had guessed, of those that it could have; empty without a draft."""
    return f"; guessed ahead {s['draft_n_accepted']} of {s['contested_n']}" if s["draft_n"] else ""


def busy_text(ranks: Sequence[dict[str, Any]]) -> str:
    shown = ", ".join(f"rank {rank['rank']} {100 * busy_share(rank):.0f}%" for rank in ranks[:DEPTHS_SHOWN])
    return f"busy: {shown}{', …' if len(ranks) > DEPTHS_SHOWN else ''}"


def busy_share(rank: dict[str, Any]) -> float:
    return float(rank["busy_s"] / max(rank["wall_s"], 1e-9))


def advice_on(result: dict[str, Any], has_draft: bool, is_split: bool) -> str:
    """What would make a run faster, as far as its figures tell, and is not done already."""
    stages = [rank for rank in result["ranks"] if rank["layers"]]
    shares = [busy_share(rank) for rank in stages]
    ways = [] if result["speculation"]["draft_n"] else [*_ways_to_guess(result["policy"], has_draft)]
    if len(stages) > 1 and ways:
        return f"without guesses ranks wait for each other: {', '.join(ways)}"
    if len(stages) > 1 and max(shares) > UNEVEN * max(min(shares), 0.01):
        most = f"rank {stages[shares.index(max(shares))]['rank']} has most to do"
        return f"{most} by this --layer-split" if is_split else f"{most}: see --layer-split"
    return "-v says more"


def _ways_to_guess(policy: str, has_draft: bool) -> Iterator[str]:
    if policy == "iterative":
        yield (
            "--policy auto lets the draft guess" if has_draft else "--policy auto guesses what stood in the text before"
        )
    if not has_draft:
        yield "-md FILE gives a draft"


def _apart(hop: dict[str, Any]) -> str:
    return f" ({hop['from_device']} from device to device)" if hop["from_device"] else ""


def show_ranks(console: Console, ranks: Sequence[dict[str, Any]]) -> None:
    """How each rank spent its time, and what it was spared, where that is known."""
    saved = ["runs saved", "layers saved"] if "layers_saved" in ranks[0] else []
    rows = [
        [
            str(rank["rank"]), rank["host"], rank["role"],
            *(f"{100 * rank[f'{use}_s'] / max(rank['wall_s'], 1e-9):.0f}%" for use in USES),
            *([str(rank["runs_skipped"] + rank["runs_stopped"]), str(rank["layers_saved"])] if saved else []),
            size_text(rank["peak_rss_bytes"]),
        ]
        for rank in ranks
    ]  # fmt: skip
    show_table(console, ["rank", "host", "role", *USES, *saved, "peak memory"], rows)
