"""Speeds, latencies and acceptance, from the metrics of one request or of many; and the result of a generation, real or
simulated, with its object of --json, its row of results.csv and its trace. Times are seconds."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer import __version__
from pipeinfer.core.requests import Request
from pipeinfer.observe.columns import COLUMNS, NAMES, Record
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.trace import Track, time_use, write_trace

Names = Sequence[str]
Tracks = Sequence[Track]
SHARES = (50, 90, 95, 99)
LATE = 0.02  # of a job's time: a paced rank that is late by more is named
NOT_OFFERED = {"offered_per_second": math.nan, "served_per_second": math.nan}
"""The rates of loads whose requests arrive at once, or when clients send them."""


def percentiles(values: Sequence[float], ranks: Sequence[float] = (50, 95, 99)) -> list[float]:
    return [float(value) for value in np.percentile(values, ranks)] if values else [math.nan] * len(ranks)


def _ratio(value: float, of: float) -> float:
    return value / of if of else math.nan


# -- one request


def ttft_s(metrics: RequestMetrics) -> float:
    """Time to first token, from submission."""
    return metrics.token_s[0] - metrics.submitted_s if metrics.token_s else math.nan


def ttft_after_prompt_s(metrics: RequestMetrics) -> float:
    """From the token that the prompt's evaluation gives to the next one (PipeInfer, section V-A)."""
    first_s = metrics.token_s[0] if metrics.token_s else math.nan
    return next((at_s for at_s in metrics.token_s if at_s > first_s), math.nan) - first_s


def itl_s(metrics: RequestMetrics) -> list[float]:
    """Inter-token latencies, one for each token after the first. Tokens of one verdict share the gap before it."""
    gaps, before_s = list[float](), math.nan
    for now_s, tokens in groupby(metrics.token_s):
        n = len(list(tokens))
        gaps += [0.0] * (n - 1) if math.isnan(before_s) else [(now_s - before_s) / n] * n
        before_s = now_s
    return gaps


def timings(metrics: RequestMetrics) -> dict[str, Any]:
    """`speeds`, and statistics of the inter-token latency."""
    gaps_s = itl_s(metrics)
    p50, p95, p99 = percentiles(gaps_s)
    return {
        **speeds(metrics),
        "itl_mean_s": float(np.mean(gaps_s)) if gaps_s else math.nan,
        "itl_p50_s": p50,
        "itl_p95_s": p95,
        "itl_p99_s": p99,
        "itl_percentiles_s": percentiles(gaps_s, range(101)) if gaps_s else [],
    }


def speeds(metrics: RequestMetrics) -> dict[str, Any]:
    """Figures by the names of llama.cpp's server (ms), then TTFT and TPOT (time per output token) in seconds.
    `prompt_n`: evaluated tokens of the prompt; `cache_n`: the others."""
    n, n_evaluated, first_s = len(metrics.token_s), metrics.n_prompt - metrics.n_kept, ttft_s(metrics)
    generation_s = metrics.token_s[-1] - metrics.token_s[0] if n else math.nan
    return {
        "prompt_n": n_evaluated,
        "cache_n": metrics.n_kept,
        "prompt_ms": 1e3 * first_s,
        "prompt_per_second": n_evaluated / first_s,
        "predicted_n": n,
        "predicted_ms": 1e3 * generation_s,
        "predicted_per_second": (n - 1) / generation_s if n > 1 and generation_s > 0 else math.nan,
        "ttft_s": first_s,
        "ttft_after_prompt_s": ttft_after_prompt_s(metrics),
        "tpot_s": generation_s / (n - 1) if n > 1 else math.nan,
        "total_s": (metrics.finished_s or math.nan) - metrics.submitted_s,
    }


def service_timings(metrics: RequestMetrics) -> dict[str, Any]:
    """`timings` in the answers of a service, by llama.cpp's names. `prompt_ms` excludes `queued_s`, the time before the
    first run; `contested_n` as in `speculation`."""
    figures, queued_s = speeds(metrics), metrics.begun_s - metrics.submitted_s
    prompt_s = figures["ttft_s"] - queued_s
    return {
        **figures,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": figures["prompt_n"] / prompt_s if prompt_s > 0 else math.nan,
        "prompt_per_token_ms": _ratio(1e3 * prompt_s, figures["prompt_n"]),
        "predicted_per_token_ms": 1e3 * figures["tpot_s"],
        "draft_n": metrics.n_judged,
        "draft_n_accepted": metrics.n_matched,
        "contested_n": metrics.n_contested,
        "preempted_n": metrics.n_preempted,
        "queued_s": queued_s,
    }


def speculation(metrics: RequestMetrics) -> dict[str, Any]:
    """What the draft was worth, as docs/reference/results-csv.md defines it. `contested_n`: tokens at whose position
    there was a guess. `by_depth`: how often the likeliest guess was right, by how many tokens ahead it was made."""
    n, n_contested = len(metrics.token_s), metrics.n_contested
    return {
        "draft_n": metrics.n_drafted,
        "refined_n": metrics.n_refined,
        "draft_n_judged": metrics.n_judged,
        "draft_n_accepted": metrics.n_matched,
        "acceptance_rate": _ratio(metrics.n_matched, metrics.n_judged),
        "sent_acceptance": _ratio(metrics.n_sent_matched, metrics.n_sent),
        "top1_rate": _ratio(sum(right for _, right in metrics.by_depth.values()), n_contested),
        "contested_n": n_contested,
        "hit_rate": _ratio(metrics.n_matched, n_contested),
        "by_depth": {str(depth): {"n": n, "right": right} for depth, (n, right) in sorted(metrics.by_depth.items())},
        "accepted_length": _ratio(n, sum(metrics.accepted_lengths.values())),
        "tokens_per_turn": _tokens_per_turn(metrics),
        "tokens_per_round": _ratio(n, metrics.n_rounds),
        "accepted_length_histogram": {str(length): n for length, n in sorted(metrics.accepted_lengths.items())},
        "draft_n_sent": metrics.n_sent,
        "runs": metrics.n_runs,
        "rows": metrics.n_rows,
        "branches": metrics.n_branches,
        "inflight_max": metrics.n_inflight_max,
        "runs_cancelled": metrics.n_cancelled,
        "runs_cancelled_in_time": metrics.n_saved,
        "draft_steps": metrics.n_draft_steps,
        "draft_steps_inflight": metrics.n_draft_steps_inflight,
        "draft_s": metrics.draft_s,
        "draft_step_s": _ratio(metrics.draft_s, metrics.n_draft_steps),
        "notices": list(metrics.notices),
    }


def _tokens_per_turn(metrics: RequestMetrics) -> float:
    """FlowSpec's ALT: tokens / turns of the pipeline, each as long as the slowest stage takes for a run."""
    if not metrics.turns_s or metrics.token_s[-1] == metrics.token_s[0]:
        return math.nan
    per_s = (len(metrics.token_s) - 1) / (metrics.token_s[-1] - metrics.token_s[0])
    return per_s * float(np.mean(metrics.turns_s))


# -- many requests


@dataclass
class Throughput:
    """Sums over finished requests, with two times for each. `itl_s`: inter-token latencies, if they are kept."""

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
            self.ttft_s.append(ttft_s(metrics))
        if n > 1:
            self.tpot_s.append((metrics.token_s[-1] - metrics.token_s[0]) / (n - 1))
        if self.itl_s is not None:
            self.itl_s.extend(itl_s(metrics))

    def figures(self, wall_s: float, n_requests: int) -> dict[str, Any]:
        """`wall_s`: from the first request's submission to the last one's end. NaN for what is unknown."""
        per_s = 1 / wall_s if wall_s > 0 else math.nan
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
            "acceptance_rate": _ratio(self.n_matched, self.n_judged),
        }


def _spread(name: str, values_s: array[float]) -> dict[str, float]:
    shares = zip(SHARES, percentiles(values_s, SHARES), strict=True)
    mean_s = float(np.mean(values_s)) if values_s else math.nan
    return {f"{name}_mean_s": mean_s, **{f"{name}_p{share}_s": value for share, value in shares}}


def load_figures(metrics: Sequence[RequestMetrics], has_rate: bool) -> tuple[Throughput, dict[str, Any]]:
    """The sums and the figures of a load whose requests have all ended. `has_rate`: they arrived one by one."""
    throughput = Throughput(itl_s=array("d"))
    for request in metrics:
        throughput.add(request)
    arrivals_s, ends_s = [each.submitted_s for each in metrics], [each.token_s[-1] for each in metrics]
    offered = {"offered_per_second": _per_second(arrivals_s), "served_per_second": _per_second(ends_s)}
    figures = throughput.figures(max(ends_s) - min(arrivals_s), len(metrics))
    return throughput, figures | (offered if has_rate else NOT_OFFERED)


def _per_second(times_s: Sequence[float]) -> float:
    """The rate from the first to the last."""
    span_s = max(times_s) - min(times_s)
    return (len(times_s) - 1) / span_s if span_s > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Result:
    """`experiment`: the columns known before the generation. `data`: the object that --json prints. `tracks`: one for
    each rank."""

    experiment: Record
    data: dict[str, Any]
    tracks: Tracks = ()

    def columns(self) -> Record:
        """The row of results.csv."""
        data, ranks, hops = self.data, self.data["ranks"], self.data["wire"]["hops"]
        figures = data["timings"] | data["speculation"] | {"version": data["version"]}
        by_host = {rank["host"]: rank.get("joules", math.nan) for rank in ranks}  # ranks of a host have one meter
        figures["joules_per_token"] = sum(by_host.values()) / max(1, figures["predicted_n"])
        figures["prompt_n"] += figures["cache_n"]
        lists = [column.name for column in COLUMNS if column.name in ranks[0] and not column.is_key]
        return {
            **self.experiment,
            **{name: figures[name] for name in NAMES if name in figures},
            **{name: [rank.get(name, "") for rank in ranks] for name in lists},
            "messages": sum(hop["messages"] for hop in hops),
            "message_bytes": sum(hop["bytes"] for hop in hops),
            "cancel_messages": data["wire"]["cancel_messages"],
            **stamp(ranks),
        }

    def write_trace(self, path: Path) -> None:
        """Raises UserError if the file cannot be written."""
        write_trace(path, self.tracks)


def make_result(
    request: Request,
    metrics: RequestMetrics,
    experiment: Record,
    shown: Names,
    tracks: Tracks,
    wire: Record,
    **more: Any,
) -> Result:
    """`shown`: the columns of `experiment` in --json; `more`: further fields there, and the text, if it is known."""
    window = metrics.submitted_s, metrics.finished_s or metrics.submitted_s
    data = {
        "text": "",
        "tokens": request.tokens[len(request.prompt) :],
        "prompt_tokens": list(request.prompt),
        "finish": request.finish.value if request.finish else None,
        **{name: experiment[name] for name in shown},
        "version": __version__,
        "timings": timings(metrics),
        "speculation": speculation(metrics),
        **more,
        "wire": wire,
        "ranks": [track.row | asdict(time_use(track.ledger, track.runs, window)) for track in tracks],
    }
    return Result(experiment, data, tracks)


def stamp(ranks: Sequence[dict[str, Any]]) -> Record:
    """Columns that say where and when a row was measured."""
    return {
        "roles": ";".join(rank["role"] for rank in ranks),
        "hosts": ",".join(rank["host"] for rank in ranks),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def missed_pace(late_s: Mapping[int, float], wall_s: float) -> str:
    """A warning for ranks that were late for a clear part of `wall_s` under `--pace`; else empty."""
    late = {rank: seconds / wall_s for rank, seconds in sorted(late_s.items())}
    shown = ", ".join(f"rank {rank} for {share:.0%} of the time" for rank, share in late.items() if share > LATE)
    return f"slower than --pace says: {shown}; let more real seconds count as one (--pace NAME*K)" if shown else ""
