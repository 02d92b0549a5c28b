"""Policies side by side on one cluster in virtual time, and how near they come to what its stages allow."""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.observe.report import number
from pipeinfer.observe.texts.markdown import markdown_table
from pipeinfer.virtual.simulation import Simulated

COLUMNS = ("policy", "settings", "tokens/s", "over iterative", "of the limit", "TTFT ms", "ITL ms p50 / p95 / p99",
           "rows a token", "hit rate", "busiest stage")  # fmt: skip
LIMIT = "limit"
Generation = tuple[Simulated, dict[str, Any]]
"""A generation and its result object."""


def limit_of(profile: Profile, context: int) -> float:
    """Tokens a second of a pipeline that emits one whenever its slowest stage has evaluated a single row."""
    return 1.0 / max(stage.seconds(1, context) for stage in profile.stages)


def side_by_side(generations: Sequence[Generation]) -> list[str]:
    """A Markdown table: a row of means for each policy, the speed's deviation between texts beside it, then what the
    stages allow with the draft where it is."""
    return markdown_table(COLUMNS, list(_rows(generations)), right_aligned=COLUMNS[2:])


def _rows(generations: Sequence[Generation]) -> Iterator[tuple[str, ...]]:
    by_policy: dict[str, list[Generation]] = {}
    for each in generations:
        by_policy.setdefault(each[1]["policy"], []).append(each)
    speeds = {policy: fmean(_timings(found, "predicted_per_second")) for policy, found in by_policy.items()}
    plain = speeds.get("iterative", math.nan)
    # with a draft there may be one stage less
    limit = min(limit_of(simulated.profile, len(simulated.request.prompt)) for simulated, _ in generations)
    for policy, found in by_policy.items():
        metrics = [simulated.metrics for simulated, _ in found]
        spread = f" ± {number(stdev(_timings(found, 'predicted_per_second')))}" if len(found) > 1 else ""
        itl_s = (fmean(_timings(found, f"itl_p{rank}_s")) for rank in (50, 95, 99))
        yield (
            policy, str(found[0][1]["settings"]), number(speeds[policy]) + spread, number(speeds[policy] / plain),
            number(speeds[policy] / limit), number(1e3 * fmean(_timings(found, "ttft_s")), 1),
            " / ".join(number(1e3 * each_s, 1) for each_s in itl_s),
            number(fmean((each.n_root_runs + each.n_sent) / len(each.token_s) for each in metrics), 1),
            number(fmean(each.hit_rate for each in metrics)), f"{100 * fmean(map(_busiest, found)):.0f}%",
        )  # fmt: skip
    yield (LIMIT, "a token whenever the slowest stage has done a row", number(limit), number(limit / plain),
           "1.00", *["-"] * 5)  # fmt: skip


def _timings(found: Sequence[Generation], name: str) -> Iterable[float]:
    return (result["timings"][name] for _, result in found)


def _busiest(generation: Generation) -> float:
    """The share of the time that the busiest stage worked on runs that counted."""
    shares = [rank["busy_s"] / rank["wall_s"] for rank in generation[1]["ranks"] if rank["layers"]]
    return max(shares, default=math.nan)
