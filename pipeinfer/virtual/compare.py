"""Policies side by side on one cluster in virtual time, and how near they come to what its stages allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.observe.report import number
from pipeinfer.observe.texts.markdown import markdown_table
from pipeinfer.virtual.simulation import Simulated

COLUMNS = ("policy", "settings", "tokens/s", "over iterative", "of the limit", "TTFT ms", "ITL ms p50 / p95 / p99",
           "rows a token", "hit rate", "busiest stage")  # fmt: skip
LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy's generations: tokens a second of each, and the means of what else there is. `limit`: tokens a second
    of a pipeline that emits one whenever its slowest stage has evaluated a single row. `rows_a_token`: roots and
    guesses that were sent. `busy`: the share of the time that the busiest stage worked on runs that counted."""

    policy: str
    settings: str
    speeds: tuple[float, ...]
    limit: float
    ttft_s: float
    itl_s: tuple[float, float, float]
    rows_a_token: float
    hit_rate: float
    busy: float

    @property
    def speed(self) -> float:
        return statistics.fmean(self.speeds)


def generation_of(simulated: Simulated, result: dict[str, Any]) -> Compared:
    """A single generation. `result`: its result object."""
    metrics, timings = simulated.metrics, result["timings"]
    return Compared(
        result["policy"], str(result["settings"]), (timings["predicted_per_second"],),
        limit_of(simulated.profile, len(simulated.request.prompt)), timings["ttft_s"],
        (timings["itl_p50_s"], timings["itl_p95_s"], timings["itl_p99_s"]),
        (metrics.n_root_runs + metrics.n_sent) / len(metrics.token_s), metrics.hit_rate, _busiest(result),
    )  # fmt: skip


def _averaged(found: Sequence[Compared]) -> Compared:
    """Generations of one policy."""

    def mean(of: Callable[[Compared], float]) -> float:
        return statistics.fmean(map(of, found))

    p50, p95, p99 = (statistics.fmean(values) for values in zip(*(each.itl_s for each in found), strict=True))
    return replace(
        found[0], speeds=tuple(each.speed for each in found), ttft_s=mean(lambda each: each.ttft_s),
        itl_s=(p50, p95, p99), rows_a_token=mean(lambda each: each.rows_a_token),
        hit_rate=mean(lambda each: each.hit_rate), busy=mean(lambda each: each.busy),
    )  # fmt: skip


def limit_of(profile: Profile, context: int) -> float:
    return 1.0 / max(stage.seconds(1, context) for stage in profile.stages)


def _busiest(result: dict[str, Any]) -> float:
    shares = [rank["busy_s"] / rank["wall_s"] for rank in result["ranks"] if rank["layers"]]
    return max(shares, default=math.nan)


def side_by_side(generations: Sequence[Compared]) -> list[str]:
    """A Markdown table: a row for each policy, then what the stages allow with the draft where it is."""
    names = dict.fromkeys(each.policy for each in generations)
    found = [_averaged([each for each in generations if each.policy == name]) for name in names]
    return markdown_table(COLUMNS, list(_rows(found)), right_aligned=COLUMNS[2:])


def _rows(found: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    limit = min(each.limit for each in found)  # with a draft there may be one stage less
    plain = next((each.speed for each in found if each.policy == "iterative"), math.nan)
    for each in found:
        yield (
            each.policy, each.settings, number(each.speed), number(each.speed / plain), number(each.speed / limit),
            number(1e3 * each.ttft_s, 1), " / ".join(number(1e3 * itl_s, 1) for itl_s in each.itl_s),
            number(each.rows_a_token, 1), number(each.hit_rate), f"{100 * each.busy:.0f}%",
        )  # fmt: skip
    yield (LIMIT, "a token whenever the slowest stage has done a row", number(limit), number(limit / plain),
           "1.00", *["-"] * 5)  # fmt: skip
