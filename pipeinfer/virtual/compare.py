"""Policies side by side on one cluster in virtual time, and how near they come to what its stages allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.cluster.costs import Profile
from pipeinfer.core.policy import Policy
from pipeinfer.observe.metrics import timings
from pipeinfer.observe.report import number
from pipeinfer.virtual.study import Question

COLUMNS = ("policy", "settings", "tokens/s", "over iterative", "of the limit", "TTFT ms", "ITL ms p50 / p95 / p99",
           "rows a token", "hit rate", "busiest stage")  # fmt: skip
LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy's generations: tokens a second of each, and the means of what else there is. `limit`: tokens a second
    of a pipeline that emits one whenever its slowest stage has evaluated a single row. `rows_a_token`: roots and
    guesses that were sent. `busy`: the share of the time
    that the busiest stage worked on runs that counted."""

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


def compare(question: Question, seeds: Sequence[int]) -> Iterator[Compared]:
    """One policy after another. Raises UserError when one cannot be simulated."""
    for policy in question.policies:
        yield _generations(question, policy, seeds)


def _generations(question: Question, policy: Policy, seeds: Sequence[int]) -> Compared:
    answers = [question.answer(policy, seed, repetition) for repetition, seed in enumerate(seeds, start=1)]
    simulated = [answer[0] for answer in answers]
    found = [timings(each.metrics) for each in simulated]

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in found)

    return Compared(
        policy.name, str(answers[0][2]["settings"]), tuple(each["predicted_per_second"] for each in found),
        limit_of(simulated[0].profile, len(simulated[0].request.prompt)), mean("ttft_s"),
        (mean("itl_p50_s"), mean("itl_p95_s"), mean("itl_p99_s")),
        statistics.fmean(
            (each.metrics.n_root_runs + each.metrics.n_sent) / len(each.metrics.token_s) for each in simulated
        ),
        statistics.fmean(each.metrics.hit_rate for each in simulated),
        statistics.fmean(_busiest(answer[1]) for answer in answers),
    )  # fmt: skip


def limit_of(profile: Profile, context: int) -> float:
    return 1.0 / max(stage.seconds(1, context) for stage in profile.stages)


def _busiest(result: dict[str, Any]) -> float:
    shares = [rank["busy_s"] / rank["wall_s"] for rank in result["ranks"] if rank["layers"]]
    return max(shares, default=math.nan)


def table(found: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """A row for each policy in the order of COLUMNS, then what the stages allow with the draft where it is."""
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
