"""Throughput and latencies of many requests. Keeps two numbers a request; with `itl_s` also one a token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from pipeinfer.observe.metrics import RequestMetrics, percentiles
from pipeinfer.observe.report import busy_text, milliseconds, number, show_ranks

SHARES = (50, 90, 95, 99)


@dataclass
class Throughput:
    """Requests that have finished, added up. Times are seconds. `itl_s`: of every token but first ones, if kept."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] | None = None
    n_prompt: int = 0
    n_kept: int = 0
    n_preempted: int = 0
    n_predicted: int = 0
    n_judged: int = 0
    n_matched: int = 0

    def add(self, metrics: RequestMetrics) -> None:
        n = len(metrics.token_s)
        self.n_prompt += metrics.n_prompt
        self.n_kept += metrics.n_kept
        self.n_preempted += metrics.n_preempted
        self.n_predicted += n
        self.n_judged += metrics.n_judged
        self.n_matched += metrics.n_matched
        if n:
            self.ttft_s.append(metrics.ttft_s)
        if n > 1:
            self.tpot_s.append((metrics.token_s[-1] - metrics.token_s[0]) / (n - 1))
        if self.itl_s is not None:
            self.itl_s.extend(metrics.itl_s)

    def figures(self, wall_s: float, n_requests: int) -> dict[str, Any]:
        """`wall_s`: from the first request's submission to the last one's end. NaN where there is nothing to tell."""
        per_s = 1 / wall_s if wall_s > 0 else float("nan")
        return {
            "wall_s": wall_s,
            "prompt_n": self.n_prompt,
            "cache_n": self.n_kept,
            "predicted_n": self.n_predicted,
            "requests_per_second": n_requests * per_s,
            "prompt_per_second": self.n_prompt * per_s,
            "predicted_per_second": self.n_predicted * per_s,
            **_spread("ttft", self.ttft_s),
            **_spread("tpot", self.tpot_s),
            **({} if self.itl_s is None else _spread("itl", self.itl_s)),
            "draft_n_judged": self.n_judged,
            "draft_n_accepted": self.n_matched,
            "acceptance_rate": self.n_matched / self.n_judged if self.n_judged else float("nan"),
        }


def offered_and_served(metrics: Sequence[RequestMetrics]) -> dict[str, float]:
    """How many requests a second came, and how many ended, of those that came one by one; else NaN."""
    came_s = [each.submitted_s for each in metrics]
    ended_s = [each.token_s[-1] for each in metrics]
    return {"offered_per_second": _per_second(came_s), "served_per_second": _per_second(ended_s)}


def _per_second(times_s: Sequence[float]) -> float:
    """From the first to the last."""
    span_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / span_s if span_s > 0 else math.nan


NOT_OFFERED = {"offered_per_second": math.nan, "served_per_second": math.nan}
"""Where clients ask, or all requests come at once."""


def _spread(name: str, values_s: array[float]) -> dict[str, float]:
    found = zip(SHARES, percentiles(values_s, SHARES), strict=True)
    mean_s = float(np.mean(values_s)) if values_s else float("nan")
    return {f"{name}_mean_s": mean_s, **{f"{name}_p{share}_s": value for share, value in found}}


def _guessed(s: dict[str, Any]) -> str:
    return f"; {s['draft_n_accepted']} of {s['draft_n_judged']} guesses right" if s["draft_n_judged"] else ""


def show_throughput(console: Console, summary: dict[str, Any], verbose: bool) -> None:
    """The end of a batch, from the same object that --json prints."""
    s = summary
    console.print(
        f"requests    {s['completed']} completed, {s['failed']} not served, {s['done_before']} done before, "
        f"{s['left']} left; {number(s['requests_per_second'])} a second, {s['open_max']} at a time at most"
        + (f", preempted {s['preempted_n']} times" if s["preempted_n"] else "")
    )
    console.print(
        f"throughput  {s['predicted_n']} tokens in {number(s['wall_s'])} s, {number(s['predicted_per_second'])} "
        f"tokens/s; {s['prompt_n']} prompt tokens, {number(s['prompt_per_second'])} tokens/s"
        + (f", {s['cache_n']} of them shared" if s["cache_n"] else "")
    )
    if not verbose:
        console.print(busy_text(s["ranks"]) + _guessed(s), markup=False, soft_wrap=True)
        return
    for name in ("ttft", "tpot"):
        shares = "".join(f", p{share} {milliseconds(s[f'{name}_p{share}_s'])}" for share in SHARES)
        console.print(f"{name.upper():12}mean {milliseconds(s[f'{name}_mean_s'])}{shares}")
    if s["draft_n_judged"]:
        console.print(
            f"speculation acceptance {number(s['acceptance_rate'])} ({s['draft_n_accepted']} of {s['draft_n_judged']} "
            "guesses right)"
        )
    show_ranks(console, s["ranks"])
