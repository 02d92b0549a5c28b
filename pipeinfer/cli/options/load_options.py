"""Options of `pipeinfer bench` about loads: many requests at a time. What is done with them is in `job.bench_load`."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.cli.options.given import check_sequences
from pipeinfer.cli.options.load_rules import MAX_REQUESTS, PARALLEL, LoadSizes, parallel_of
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.bench.load_sweep import Loads
from pipeinfer.job.options.limits import MAX_SEQUENCES
from pipeinfer.job.options.values import Whole


@dataclass(frozen=True, kw_only=True)
class LoadOptions(LoadSizes):
    """As they are given."""

    requests: int | None = setting(
        None, "--requests", type=Whole(1, MAX_REQUESTS),
        help="Requests of a load. [default: each prompt once, but twice the largest --concurrency at least]",
    )  # fmt: skip
    parallel: int | None = setting(
        None, "--parallel", "-np", type=Whole(1, MAX_SEQUENCES),
        help="Requests of loads at a time at most, for which there is to be room. [default: the largest --concurrency, "
        f"with --rate {PARALLEL} at least]",
    )  # fmt: skip

    def loads(self, sequences: int, max_delay_s: float | None) -> Loads | None:
        """None if no loads are to be measured. Raises UserError for options that do not go together."""
        if not self.concurrencies and not self.rates:
            if self.requests or self.parallel or max_delay_s is not None:
                raise UserError("--requests, --parallel and --max-delay are of loads; give --concurrency or --rate too")
            return None
        parallel = parallel_of(self.concurrencies, self.rates, self.requests, self.parallel)
        check_sequences(sequences, parallel)
        return Loads(self.concurrencies, self.rates, self.requests or 0, parallel)
