"""What rank 0 prints on stderr: tables, statistics, and the progress of a long prompt, a transfer or a batch. Plain
text if that is no terminal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from pipeinfer.launchers import terminal_width
from pipeinfer.text import count_text, labelled, milliseconds, number, size_text

WIDTH = 12  # of a label
DEPTHS_SHOWN = 8
WIDEST = 10_000
UNEVEN = 2.0  # ratio of the busy times of two stages above which the busier one has too many layers
USES = ("busy", "waiting", "idle", "cancelled")  # of a rank's time
SHARES = (50, 90, 95, 99)  # percentiles of the latencies of many requests


def stderr_console() -> Console:
    console = Console(stderr=True, highlight=False)
    # a pipe has no width: lines are not broken
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=200)


def show_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column not in ("host", "role", "layers", "hop", "GPU", "speed from")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = console.width if console.is_terminal else terminal_width(2) or console.width
    if console.measure(table, options=console.options.update(max_width=WIDEST)).maximum > width:
        # a row would be cut: print it as a line
        for row in rows:
            console.print(", ".join(f"{column} {cell}" for column, cell in zip(columns, row, strict=True)))
        return
    console.print(table)


def show_statistics(console: Console, result: dict[str, Any]) -> None:
    """The statistics of `run -v`, from the object that --json prints."""
    for line in labelled(_statistics(result), WIDTH):
        console.print(line)


def _statistics(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    t, s = result["timings"], result["speculation"]
    ttft, p50, p95, p99 = (milliseconds(t[f"{name}_s"]) for name in ("ttft", "itl_p50", "itl_p95", "itl_p99"))
    yield "prompt", f"{count_text(t['prompt_n'], 'token')}, {number(t['prompt_per_second'])} tokens/s, TTFT {ttft}"
    speed = f"{count_text(t['predicted_n'], 'token')}, {number(t['predicted_per_second'])} tokens/s"
    yield "generation", f"{speed}, ITL p50 {p50}, p95 {p95}, p99 {p99}"
    if s["draft_n"]:
        n_right, acceptance, hit_rate = s["draft_n_accepted"], number(s["acceptance_rate"]), number(s["hit_rate"])
        right = f"acceptance {acceptance} ({n_right} of {s['draft_n_judged']} guesses right)"
        hit = f"hit rate {hit_rate} ({n_right} of {s['contested_n']} tokens guessed)"
        length = f"{number(s['accepted_length'])} tokens a verdict"
        yield "speculation", f"{right}, {hit}, {length}, draft time {number(s['draft_s'])} s"
        depths = ", ".join(
            f"{depth}: {100 * counts['right'] / counts['n']:.0f}% of {counts['n']}"
            for depth, counts in list(s["by_depth"].items())[:DEPTHS_SHOWN]
        )
        yield "depth", f"likeliest guess right, by tokens ahead: {depths or '-'}"
        rows = ", ".join(map(milliseconds, result["stage_row_s"]))
        yield "costs", f"draft step {milliseconds(s['draft_step_s'])}; one row in each stage {rows}"
    yield from (("note", notice) for notice in s["notices"])
    yield "runs", f"{s['runs']}, {s['rows']} rows, {s['runs_cancelled']} cancelled"
    if s["runs_cancelled"]:
        n_layers = sum(rank.get("layers_saved", 0) for rank in result["ranks"])
        yield "cancelled", f"{s['runs_cancelled']} runs, which spared {n_layers} layer evaluations"
    if hops := result["wire"]["hops"]:
        yield "wire", "; ".join(map(_hop_text, hops))


def _hop_text(hop: dict[str, Any]) -> str:
    direct = f" ({hop['from_device']} from device to device)" if hop["from_device"] else ""
    return f"{hop['from']}->{hop['to']} {hop['messages']} messages{direct}, {size_text(hop['bytes'])}"


def show_outcome(console: Console, result: dict[str, Any], has_draft: bool, is_split: bool) -> None:
    """The end of a run in two lines: its speed, and how busy the ranks were. `has_draft`: there is one, used or not;
    `is_split`: the user has split the layers."""
    guessed = guessed_text(result["speculation"]) or "; guessed ahead 0" * (result["policy"] != "iterative")
    lines = [speed_text(result["timings"]) + guessed, busy_text(result["ranks"])]
    if not result["speculation"]["notices"] and (advice := advice_on(result, has_draft, is_split)):
        lines[-1] += f"; {advice}"
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def speed_text(t: dict[str, Any]) -> str:
    """The speed of one text, from its `timings`."""
    read = f"{t['prompt_n']} of {t['prompt_n'] + t['cache_n']}" if t["cache_n"] else str(t["prompt_n"])
    speed = f"{t['predicted_n']} tokens, {number(t['predicted_per_second'])} tokens/s"
    return f"{speed}, first after {number(t['ttft_s'])} s; {read} prompt tokens read"


def guessed_text(s: dict[str, Any]) -> str:
    """How many tokens of a text a draft guessed, of those it could have guessed; empty without a draft."""
    return f"; guessed ahead {s['draft_n_accepted']} of {s['contested_n']}" if s["draft_n"] else ""


def busy_text(ranks: Sequence[dict[str, Any]]) -> str:
    shown = ", ".join(f"rank {rank['rank']} {100 * busy_share(rank):.0f}%" for rank in ranks[:DEPTHS_SHOWN])
    return f"busy: {shown}{', …' if len(ranks) > DEPTHS_SHOWN else ''}"


def busy_share(rank: dict[str, Any]) -> float:
    return float(rank["busy_s"] / max(rank["wall_s"], 1e-9))


def advice_on(result: dict[str, Any], has_draft: bool, is_split: bool) -> str:
    """What would make a run faster by its figures, and is not done already."""
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
        yield f"--policy auto {'lets the draft guess' if has_draft else 'guesses what stood in the text before'}"
    if not has_draft:
        yield "-md FILE gives a draft"


def show_ranks(console: Console, ranks: Sequence[dict[str, Any]]) -> None:
    """How each rank spent its time, and what cancellations saved it, if known."""
    saved_columns = ["runs saved", "layers saved"] if "layers_saved" in ranks[0] else []
    rows = []
    for rank in ranks:
        uses = [f"{100 * rank[f'{use}_s'] / max(rank['wall_s'], 1e-9):.0f}%" for use in USES]
        saved = [rank["runs_skipped"] + rank["runs_stopped"], rank["layers_saved"]] if saved_columns else []
        place = str(rank["rank"]), rank["host"], rank["role"]
        rows.append([*place, *uses, *map(str, saved), size_text(rank["peak_rss_bytes"])])
    show_table(console, ["rank", "host", "role", *USES, *saved_columns, "peak memory"], rows)


def show_throughput(console: Console, summary: dict[str, Any], verbose: bool) -> None:
    """The end of a batch, from the object that --json prints."""
    for line in labelled(_throughput(summary, verbose), WIDTH):
        console.print(line)
    if verbose:
        show_ranks(console, summary["ranks"])
    else:
        guesses = _guesses_text(summary)
        console.print(busy_text(summary["ranks"]) + (guesses and f"; {guesses}"), markup=False, soft_wrap=True)


def _throughput(s: dict[str, Any], verbose: bool) -> Iterator[tuple[str, str]]:
    counts = f"{s['completed']} completed, {s['failed']} not served, {s['done_before']} done before, {s['left']} left"
    preempted = f", preempted {s['preempted_n']} times" if s["preempted_n"] else ""
    at_once = f"{s['open_max']} at a time at most{preempted}"
    yield "requests", f"{counts}; {number(s['requests_per_second'])} a second, {at_once}"
    speed = f"{s['predicted_n']} tokens in {number(s['wall_s'])} s, {number(s['predicted_per_second'])} tokens/s"
    shared = f", {s['cache_n']} of them shared" if s["cache_n"] else ""
    yield "throughput", f"{speed}; {s['prompt_n']} prompt tokens, {number(s['prompt_per_second'])} tokens/s{shared}"
    for name in ("ttft", "tpot") if verbose else ():
        shares = "".join(f", p{share} {milliseconds(s[f'{name}_p{share}_s'])}" for share in SHARES)
        yield name.upper(), f"mean {milliseconds(s[f'{name}_mean_s'])}{shares}"
    if verbose and (guesses := _guesses_text(s)):
        yield "speculation", f"acceptance {number(s['acceptance_rate'])} ({guesses})"


def _guesses_text(s: dict[str, Any]) -> str:
    return f"{s['draft_n_accepted']} of {s['draft_n_judged']} guesses right" if s["draft_n_judged"] else ""


PATIENCE_S = 1.0  # nothing is shown before
LONGEST_S = 60.0  # between two lines


class ProgressBar:
    """A bar on a terminal, after PATIENCE_S; else lines after 1, 2, 4, … seconds, at most a minute apart."""

    def __init__(
        self, console: Console, clock: Callable[[], float], what: str, n_total: int, unit: str, stays: bool = False
    ) -> None:
        """Starts the time. `unit`: of `n_total`, shown in MB if these are bytes. `stays`: at its end."""
        self.console, self.clock, self.what, self.n_total = console, clock, what, n_total
        self._unit, self._stays, is_bytes = unit, stays, unit == "MB"
        self._per_unit = 1e6 if is_bytes else 1
        self._columns = (DownloadColumn(), TransferSpeedColumn()) if is_bytes else (MofNCompleteColumn(),)
        self._n_done = self._n_tokens = 0
        self._start_s, self._next_s = clock(), PATIENCE_S
        self._bar: Progress | None = None

    def advance(self, n_more: int) -> None:
        self.update(self._n_done + n_more)

    def update(self, n_done: int, n_tokens: int = 0) -> None:
        """`n_tokens`: further tokens, whose rate is shown if there are any."""
        self._n_done, self._n_tokens = n_done, self._n_tokens + n_tokens
        passed_s = self.clock() - self._start_s
        rate = f", {self._n_tokens / max(passed_s, 1e-9):.1f} tokens/s" if self._n_tokens else ""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=n_done, rate=rate)
        elif passed_s >= self._next_s and n_done < self.n_total:
            self._show(passed_s, rate)
        if n_done >= self.n_total:
            self.close()

    def _show(self, passed_s: float, rate: str) -> None:
        if self.console.is_terminal:
            amount = TextColumn(self.what), BarColumn(), *self._columns, TextColumn("{task.fields[rate]}")
            times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
            self._bar = Progress(*amount, *times, console=self.console, transient=not self._stays)
            self._bar.add_task("", total=self.n_total, completed=self._n_done, rate=rate)
            self._bar.start()
            return
        while self._next_s <= passed_s:
            self._next_s += min(self._next_s, LONGEST_S)
        done, total = (f"{n / self._per_unit:.0f}" for n in (self._n_done, self.n_total))
        self.console.print(f"{self.what}: {done} of {total} {self._unit} after {passed_s:.1f} s{rate}", style="dim")

    def close(self) -> None:
        """End the bar. May be called twice."""
        if self._bar:
            self._bar.stop()
            self._bar = None
