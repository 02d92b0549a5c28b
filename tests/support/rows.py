"""Rows as a benchmark writes them, without running one."""

from __future__ import annotations

from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.observe.columns import SAMPLING, Record
from pipeinfer.observe.figures import Result
from pipeinfer.observe.table import LOADS

SAMPLING_PARAMS = SamplingParams(seed=7, temp=0.0)
SPEEDS = {"iterative": 10.0, "speculative": 14.0, "pipeinfer": 20.0}


def make_result(policy: str = "pipeinfer", ranks: int = 3, speed: float = 0.0) -> dict[str, Any]:
    """A result object as `pipeinfer run --json` prints it."""
    speed = speed or SPEEDS[policy]
    use = {"busy_s": 0.5, "cancelled_s": 0.1, "waiting_s": 0.3, "idle_s": 0.1}
    stages: list[dict[str, Any]] = [{"layers": None, "role": "head" if policy == "iterative" else "draft"}]
    stages += [{"layers": [4 * i, 4 * i + 4], "role": f"stage {i}"} for i in range(ranks - 1)]
    figures = {
        "threads": 2,
        "host": "node,1",
        "joules": 128.0,
        "rss_bytes": 2_000_000_000,
        "peak_rss_bytes": 2_100_000_000,
    }
    return {
        "version": "0.1.0",
        "timings": {
            "prompt_n": 128,
            "cache_n": 0,
            "predicted_n": 64,
            "prompt_per_second": 100.0,
            "predicted_per_second": speed,
            "itl_mean_s": 1 / speed,
            "ttft_s": 1.28,
            "ttft_after_prompt_s": 0.03,
            "tpot_s": 1 / speed,
            "itl_p50_s": 1 / speed,
            "itl_p95_s": 2 / speed,
            "itl_p99_s": 3 / speed,
            "itl_percentiles_s": [index / 50 / speed for index in range(101)],
            "total_s": 1.0,
        },
        "speculation": {
            "acceptance_rate": float("nan") if policy == "iterative" else 0.8,
            "accepted_length": 2.5,
            "hit_rate": 0.9,
            "sent_acceptance": 0.7,
            "top1_rate": 0.75,
            "tokens_per_turn": 1.2,
            "tokens_per_round": 8.0,
            "draft_n": 90,
            "draft_n_sent": 85,
            "draft_steps": 60,
            "runs": 80,
            "rows": 160,
            "runs_cancelled": 9,
        },
        "wire": {"hops": [{"messages": 80, "bytes": 1000}] * (ranks - 1), "cancel_messages": 4},
        "ranks": [stage | figures | use for stage in stages],
    }


def make_asked(policy: str = "pipeinfer", ranks: int = 3, **more: Any) -> Record:
    """What is known before it is measured; `more` in place of it."""
    drafted = policy != "iterative"
    return {
        "policy": policy,
        "variant": "",
        "settings": "width 4" if drafted else "",
        "options": "",
        "model": "big.gguf",
        "model_bytes": 7_000_000_000,
        "model_hash": "1234567890abcdef",
        "quantisation": "Q4_K_M",
        "model_draft": "small.gguf" if drafted else "",
        "model_draft_bytes": 1_000_000_000 if drafted else "",
        "model_draft_hash": "fedcba0987654321" if drafted else "",
        "quantisation_draft": "Q8_0" if drafted else "",
        "ranks": ranks,
        "layers": [4] * (ranks - 1),
        "threads": [2] * ranks,
        "prompt": "tale",
        "prompt_hash": "12ab",
        "prompt_n": 128,
        "predicted_n": 64,
        **{name: getattr(SAMPLING_PARAMS, name) for name in SAMPLING},
        "numerics": "exact",
        "pace": "",
        "pace_hash": "",
        "choices": "",
        "repetition": 1,
    } | more


def make_row(policy: str = "pipeinfer", prompt: str = "tale", repetition: int = 1, **more: Any) -> Record:
    """`more`: `ranks` and `speed`, and what was asked otherwise."""
    result = make_result(policy, more.get("ranks", 3), more.pop("speed", 0.0))
    asked = make_asked(policy, prompt=prompt, prompt_hash=f"hash of {prompt}", repetition=repetition, **more)
    return Result(asked, result).columns() | {"predicted_n": asked["predicted_n"]}


def make_load(policy: str = "pipeinfer", concurrency: int = 4, rate: float = float("nan"), **more: Any) -> Record:
    """A row of load.csv; `speed` in tokens a second, and what was asked otherwise."""
    speed = more.pop("speed", SPEEDS[policy] * max(1, concurrency))
    asked = {name: value for name, value in make_asked(policy).items() if name in LOADS.key}
    asked |= {"n_requests": 8, "predict": 16, "concurrency": concurrency, "rate": rate, "parallel": 16}
    at_s = {"ttft": 0.2, "tpot": 1 / speed, "itl": 1 / speed}
    shares = {"mean": 1.0, "p50": 0.9, "p90": 1.5, "p95": 2.0, "p99": 3.0}
    latencies = {f"{name}_{share}_s": at * by for name, at in at_s.items() for share, by in shares.items()}
    latencies |= {f"{name}_percentiles_s": [at * (0.5 + n / 50) for n in range(101)] for name, at in at_s.items()}
    ranks = asked["ranks"]
    return (
        asked
        | latencies
        | {
            "wall_s": 128 / speed,
            "prompt_n": 8 * 128,
            "cache_n": 64,
            "predicted_n": 128,
            "requests_per_second": speed / 16,
            "offered_per_second": rate,
            "served_per_second": rate,
            "prompt_per_second": 8 * speed,
            "predicted_per_second": speed,
            "draft_n_judged": 90,
            "draft_n_accepted": 72,
            "acceptance_rate": 0.8,
            "open_max": concurrency or 7,
            "busy": [0.5 + 0.1 * at for at in range(ranks - 1)],
            "busy_s": [0.5] * ranks,
            "cancelled_s": [0.1] * ranks,
            "waiting_s": [0.3] * ranks,
            "idle_s": [0.1] * ranks,
            "late_s": [0.0] * ranks,
            "peak_rss_bytes": [2_000_000_000] * ranks,
            "roles": "draft;stage 0;stage 1",
            "version": "0.1.0",
            "date": "2026-01-01T00:00:00+00:00",
            "hosts": "node,1",
        }
        | more
    )
