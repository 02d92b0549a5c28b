"""Options of `pipeinfer bench` about loads: many requests at a time. What is done with them is in `job.bench_load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pipeinfer.cli.delay_option import max_delay_option
from pipeinfer.cli.values import Listed, Number, Whole
from pipeinfer.errors import UserError
from pipeinfer.job.load_sweep import Loads
from pipeinfer.job.options import MAX_SEQUENCES

MAX_REQUESTS, MIN_RATE, MAX_RATE = 100_000, 1e-6, 1e6
PARALLEL = 32  # as of a batch

OPTIONS = (
    click.option(
        "--concurrency", "concurrencies", type=Listed(Whole(1, MAX_SEQUENCES)), default=(),
        help="Measure loads instead: 1,4,16 is three, of so many clients, each of whom asks for the next text when it "
        "has one.",
    ),
    click.option(
        "--rate", "rates", type=Listed(Number(MIN_RATE, MAX_RATE)), default=(),
        help="Measure loads instead: 0.5,2 is two, of so many requests a second, which come at random (Poisson).",
    ),
    click.option(
        "--requests", type=Whole(1, MAX_REQUESTS),
        help="Requests of a load. [default: each prompt once, but twice the largest --concurrency at least]",
    ),
    click.option(
        "-np", "--parallel", type=Whole(1, MAX_SEQUENCES),
        help="Requests of loads at a time at most, for which there is to be room. [default: the largest --concurrency, "
        f"with --rate {PARALLEL} at least]",
    ),
    max_delay_option,
)  # fmt: skip


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def take_loads(given: dict[str, Any]) -> Loads | None:
    """Takes these options out of what is given; None if no loads are to be measured. Raises UserError."""
    concurrencies, rates = given.pop("concurrencies"), given.pop("rates")
    n_requests, parallel, sequences = given.pop("requests"), given.pop("parallel"), given["sequences"]
    if not concurrencies and not rates:
        if n_requests or parallel or given["max_delay_s"]:
            raise UserError("--requests, --parallel and --max-delay are of loads; give --concurrency or --rate too")
        return None
    most = max(concurrencies, default=0)
    parallel = parallel or max(most, PARALLEL if rates else 0)
    if parallel < most:
        raise UserError(f"--parallel {parallel} is less than --concurrency {most}; leave it out, or raise it")
    if sequences and sequences < parallel:
        raise UserError(f"--sequences {sequences} is less than --parallel {parallel}, and each request needs one; "
                        "leave it out, or lower --parallel")  # fmt: skip
    if n_requests and n_requests < most:
        raise UserError(f"--requests {n_requests} are fewer than the clients of --concurrency {most}; give {most} at "
                        "least")  # fmt: skip
    return Loads(concurrencies, rates, n_requests or 0, parallel)
