"""Which loads are asked for, and how their options go together: of `bench` and of `simulate`. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_SEQUENCES
from pipeinfer.job.options.values import Listed, Number, Whole

MAX_REQUESTS, MIN_RATE, MAX_RATE = 100_000, 1e-6, 1e6
PARALLEL = 32  # as of a batch


@dataclass(frozen=True, kw_only=True)
class LoadSizes:
    """How many requests there are at a time, or a second: each value is a load."""

    heading = "Loads"
    concurrencies: tuple[int, ...] = setting(
        (), "--concurrency", type=Listed(Whole(1, MAX_SEQUENCES)),
        help="Measure loads instead: 1,4,16 is three, of so many clients, each of whom asks for the next text when it "
        "has one.",
    )  # fmt: skip
    rates: tuple[float, ...] = setting(
        (), "--rate", type=Listed(Number(MIN_RATE, MAX_RATE)),
        help="Measure loads instead: 0.5,2 is two, of so many requests a second, which come at random (Poisson).",
    )  # fmt: skip


def parallel_of(
    concurrencies: Sequence[int], rates: Sequence[float], n_requests: int | None, parallel: int | None
) -> int:
    """Requests at a time at most, of any of the loads. Raises UserError for what does not go together."""
    most = max(concurrencies, default=0)
    parallel = parallel or max(most, PARALLEL if rates else 0)
    if parallel < most:
        raise UserError(f"--parallel {parallel} is less than --concurrency {most}; leave it out, or raise it")
    if n_requests and n_requests < most:
        raise UserError(f"--requests {n_requests} are fewer than the clients of --concurrency {most}; give {most} at "
                        "least")  # fmt: skip
    return parallel


def check_once(option: str, given: Sequence[object]) -> None:
    """Raises UserError when a value is there twice: it would be measured twice, and its rows be those of one."""
    twice = [value for value in given if given.count(value) > 1]
    if twice:
        raise UserError(f"{option} has {twice[0]} twice; give it once, -r says how often everything is measured")
