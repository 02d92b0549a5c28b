"""Options of loads, many requests at a time: what `bench` measures and `simulate` predicts. Runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_SEQUENCES
from pipeinfer.job.options.values import Listed, Number, Whole

MAX_REQUESTS, MIN_RATE, MAX_RATE = 100_000, 1e-6, 1e6
PARALLEL = 32
"""Requests at a time where they arrive at a rate, as in a batch."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Each concurrency and each rate is a load. `parallel`: the most requests that are open at a time."""

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
    requests: int | None = setting(
        None, "--requests", type=Whole(1, MAX_REQUESTS),
        help="Requests of a load. [default: each prompt once, but twice the largest --concurrency at least]",
    )  # fmt: skip
    parallel: int | None = setting(
        None, "--parallel", type=Whole(1, MAX_SEQUENCES),
        help="Requests of loads at a time at most, for which there is to be room. [default: the largest --concurrency, "
        f"with --rate {PARALLEL} at least]",
    )  # fmt: skip

    @property
    def most_clients(self) -> int:
        return max(self.concurrencies, default=0)

    def checked(self) -> "Loads":
        """With the default of `parallel`, 0 where nothing limits it. Raises UserError for a contradiction."""
        check_once("--concurrency", self.concurrencies)
        check_once("--rate", self.rates)
        most = self.most_clients
        parallel = self.parallel or max(most, PARALLEL if self.rates else 0)
        if parallel < most:
            raise UserError(f"--parallel {parallel} is less than --concurrency {most}; leave it out, or raise it")
        if self.requests and self.requests < most:
            raise UserError(f"--requests {self.requests} are fewer than the clients of --concurrency {most}; give "
                            f"{most} at least")  # fmt: skip
        return replace(self, parallel=parallel)


def check_once(option: str, given: Sequence[object]) -> None:
    """Raises UserError when a value is given twice: it would be measured twice under one name."""
    twice = [value for value in given if given.count(value) > 1]
    if twice:
        raise UserError(f"{option} has {twice[0]} twice; give it once, -r says how often everything is measured")
