"""Rows as a benchmark writes them, without running one."""

from __future__ import annotations

from typing import Any

from pipeinfer.results import Row, result_row

SPEEDS = {"iterative": 10.0, "speculative": 14.0, "pipeinfer": 20.0}


def make_result(policy: str = "pipeinfer", ranks: int = 3, speed: float = 0.0, variant: str = "") -> dict[str, Any]:
    """A result object as `pipeinfer run --json` prints it."""
    speed = speed or SPEEDS[policy]
    use = {"busy_s": 0.5, "cancelled_s": 0.1, "waiting_s": 0.3, "idle_s": 0.1}
    stages: list[dict[str, Any]] = [{"layers": None}, *({"layers": [4 * i, 4 * i + 4]} for i in range(ranks - 1))]
    figures = {"threads": 2, "host": "node,1", "rss_bytes": 2_000_000_000, "peak_rss_bytes": 2_100_000_000}
    return {
        "policy": policy,
        "variant": variant,
        "settings": "" if policy == "iterative" else "width 4",
        "seed": 7,
        "temp": 0.0,
        "numerics": "exact",
        "pace": "",
        "version": "0.1.0",
        "model": {"name": "big.gguf", "bytes": 7_000_000_000, "quantisation": "Q4_K_M"},
        "model_draft": None
        if policy == "iterative"
        else {"name": "small.gguf", "bytes": 1_000_000_000, "quantisation": "Q8_0"},
        "timings": {
            "prompt_n": 128,
            "predicted_n": 64,
            "prompt_per_second": 100.0,
            "predicted_per_second": speed,
            "itl_mean_s": 1 / speed,
            "ttft_s": 1.28,
            "tpot_s": 1 / speed,
            "itl_p50_s": 1 / speed,
            "itl_p95_s": 2 / speed,
            "itl_p99_s": 3 / speed,
            "itl_percentiles_s": [index / 50 / speed for index in range(101)],
            "total_s": 1.0,
        },
        "speculation": {"acceptance_rate": float("nan") if policy == "iterative" else 0.8, "accepted_length": 2.5,
                        "draft_n": 90, "runs": 80, "runs_cancelled": 9},
        "wire": {"hops": [{"messages": 80, "bytes": 1000}] * (ranks - 1), "cancel_messages": 4},
        "ranks": [stage | figures | use for stage in stages],
    }  # fmt: skip


def make_row(policy: str = "pipeinfer", prompt: str = "tale", repetition: int = 1, **more: Any) -> Row:
    return result_row(make_result(policy, **more), prompt, repetition)
