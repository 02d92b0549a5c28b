"""What the next run may carry, by the load and by what runs cost: roots, guesses, rows of prompts. Sends nothing.

A token waits in every stage for the chunks of prompts before it. A chunk goes when a stage is about to want it, so
chunks follow each other at a distance, and a token waits for about one chunk in each stage, however many there are.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.in_flight import RequestSlice
from pipeinfer.core.kv.blocks import BLOCK
from pipeinfer.core.levels import Level
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.core.scheduling.scheduler import BatchBudget, choose

ONE_CHUNK = 0.0
"""As `max_delay_s`: the time of one chunk of the largest size."""


class BatchPlanner:
    """`active`: the open requests by id. `max_delay_s`: how much later a token may come, in all stages together,
    because other requests' prompts are read."""

    def __init__(
        self, target: Level, run_cost: RunCost | None, active: Mapping[int, ActiveRequest],
        max_delay_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.target, self.run_cost, self.active, self.max_delay_s = target, run_cost, active, max_delay_s
        self._passed: set[int] = set()  # requests whose roots waited when the last chunk was sent

    @property
    def n_open(self) -> int:
        return len(self.active)

    @property
    def _budget(self) -> BatchBudget:
        target = self.target
        n_cheap = self.run_cost.n_cheap_rows(0) if self.run_cost else target.n_rows
        return BatchBudget.for_load(
            max(1, self.n_open), target.pipeline.n_stages, n_cheap, target.n_rows, target.n_chunk
        )

    def n_chunk(self, context: int) -> int:
        """Committed tokens that a run may carry after `context` tokens."""
        most, cost = self.target.n_chunk, self.run_cost
        if cost is None or self.max_delay_s == ONE_CHUNK or not self._delays_others():
            return most
        limit_s = self.max_delay_s / self.target.pipeline.n_stages
        n_rows = bisect_right(range(1, most + 1), limit_s, key=lambda n: cost.chunk_seconds(n, context))
        return n_rows or min(most, cost.n_cheap_rows(context))  # where one row is too long, a few are hardly longer

    @property
    def too_short(self) -> str:
        """Why the limit of delays cannot be held; empty if it can."""
        cost, n_stages, blocks = self.run_cost, self.target.pipeline.n_stages, self.target.blocks
        least_s = n_stages * cost.chunk_seconds(BLOCK if blocks else 1, 0) if cost else 0.0
        if self.max_delay_s >= least_s or self.max_delay_s == ONE_CHUNK:
            return ""
        limit, stages = f"--max-delay {self.max_delay_s:g} cannot be held", f"{n_stages} stage{'s' * (n_stages > 1)}"
        if not blocks:
            return f"{limit}: a single row of a prompt takes {stages} {least_s:.3g} s"
        return (
            f"{limit}: exact numerics read prompts in blocks of {BLOCK} rows, which take {stages} {least_s:.3g} s, the "
            "last block of a prompt up to twice as long; --numerics fast has shorter chunks"
        )

    def n_rows_for_guesses(self, context: int) -> int:
        """Rows of a run that cost hardly more than one and are left by other requests' roots."""
        if self.run_cost is None:
            return 1
        return self.run_cost.n_cheap_rows(context) if self.n_open == 1 else self._budget.n_guesses

    def choose(self, wants: Sequence[RequestSlice], alone: bool) -> list[RequestSlice]:
        """The next run, from what requests want, in the order in which they are due; nothing if none should go now."""
        if alone:
            return choose(wants, self._budget, True, self._n_chunk_rows)
        limited, budget = self.max_delay_s < math.inf, self._budget
        if chunk_rows := [flight.n_rows for flight in self.target.useful_flights if flight.n_context]:
            budget = budget.beside_chunks(len(chunk_rows), max(chunk_rows))
        if limited and (chunk_rows or self._were_passed(wants)):
            wants = sorted(wants, key=lambda part: not _is_root(part))
            budget = replace(budget, n_roots=budget.n_rows)  # roots left behind may have to wait for a chunk
        chosen = choose(wants, budget, False, self._n_chunk_rows)
        if not self._can_dispatch(chosen):
            return []
        if limited and any(part.n_context for part in chosen):
            self._passed = {part.request.id for part in wants if _is_root(part)}
        elif limited:
            self._passed.difference_update(part.request.id for part in chosen)
        return chosen

    def _were_passed(self, wants: Sequence[RequestSlice]) -> bool:
        """Whether a root waited when the last chunk was sent, and would wait for a second one now."""
        return any(part.request.id in self._passed for part in wants if _is_root(part))

    def _n_chunk_rows(self, first: RequestSlice, n_left: int) -> int:
        """Rows of the next chunk, which starts with `first`; `n_left`: rows of all waiting prompts."""
        most = self.n_chunk(self.target.pool.placed_end(first.request.id))
        return self.run_cost.n_chunk_rows(n_left, self.target.pipeline.n_stages, most) if self.run_cost else most

    def _can_dispatch(self, parts: Sequence[RequestSlice]) -> bool:
        if not self.run_cost:
            return True
        n_roots, n_inflight = sum(part.has_root for part in parts), self.target.n_useful_flights
        certain = any(part.committed for part in parts)
        # blocks are read on CPUs, where a chunk takes so long that messages need not be covered
        covers = self.max_delay_s == math.inf and not self.target.blocks
        reads = covers and any(part.n_context for part in parts)
        return self._budget.can_dispatch(n_roots, certain, n_inflight, reads)

    def _delays_others(self) -> bool:
        """Whether there is a limit of delays, and a request that has read its prompt."""
        left = self.target.n_context_left
        return self.max_delay_s < math.inf and not all(left(active.request) for active in self.active.values())


def _is_root(part: RequestSlice) -> bool:
    """Whether it is a root without context."""
    return part.has_root and not part.n_context
