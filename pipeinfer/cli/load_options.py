"""Options of `pipeinfer bench` about loads: many requests at a time. What is done with them is in `job.bench_load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pipeinfer.cli.given import check_sequences
from pipeinfer.cli.load_rules import MAX_REQUESTS, PARALLEL, concurrency_option, parallel_of, rate_option
from pipeinfer.errors import UserError
from pipeinfer.job.bench.load_sweep import Loads
from pipeinfer.job.options.limits import MAX_SEQUENCES
from pipeinfer.job.options.values import Whole

OPTIONS = (
    concurrency_option,
    rate_option,
    click.option(
        "--requests", type=Whole(1, MAX_REQUESTS),
        help="Requests of a load. [default: each prompt once, but twice the largest --concurrency at least]",
    ),
    click.option(
        "-np", "--parallel", type=Whole(1, MAX_SEQUENCES),
        help="Requests of loads at a time at most, for which there is to be room. [default: the largest --concurrency, "
        f"with --rate {PARALLEL} at least]",
    ),
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
        if n_requests or parallel or given["max_delay_s"] is not None:
            raise UserError("--requests, --parallel and --max-delay are of loads; give --concurrency or --rate too")
        return None
    parallel = parallel_of(concurrencies, rates, n_requests, parallel)
    check_sequences(sequences, parallel)
    return Loads(concurrencies, rates, n_requests or 0, parallel)
