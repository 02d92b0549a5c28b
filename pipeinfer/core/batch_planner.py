"""What the next run may carry, by the load and by what runs cost: roots, guesses, rows of prompts. Sends nothing.

A token waits for the chunks of prompts that are in front of it, in every stage. A chunk goes no sooner than a stage
wants it, so that chunks follow each other at a distance, and who comes behind the last of them waits for about one
chunk in each stage, however many there are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.in_flight import RequestSlice
from pipeinfer.core.levels import Level
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.scheduler import BatchBudget, choose

ONE_CHUNK = 0.0
"""In place of seconds: what one chunk takes that is as long as chunks may be."""


class BatchPlanner:
    """`active`: the open requests by id. `max_delay_s`: by so much at most a token shall come later, in all stages
    together, because prompts of other requests are read."""

    def __init__(
        self,
        target: Level,
        run_cost: RunCost | None,
        active: Mapping[int, ActiveRequest],
        max_delay_s: float = math.inf,
    ) -> None:
        self.target, self.run_cost, self.active, self.max_delay_s = target, run_cost, active, max_delay_s
        self._passed: set[int] = set()  # requests whose roots waited when the last chunk went

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
        """Certain tokens that a run may carry at most, after so many."""
        most, cost = self.target.n_chunk, self.run_cost
        if cost is None or self.max_delay_s == ONE_CHUNK or not self._delays_others():
            return most
        limit_s = self.max_delay_s / self.target.pipeline.n_stages
        n_rows = bisect_right(range(1, most + 1), limit_s, key=lambda n: cost.chunk_seconds(n, context))
        return n_rows or min(most, cost.n_cheap_rows(context))  # what one row exceeds, few hardly exceed by more

    @property
    def too_short(self) -> str:
        """Why the limit cannot be held, in a line; empty if it can."""
        cost, n_stages, blocks = self.run_cost, self.target.pipeline.n_stages, self.target.blocks
        least_s = n_stages * cost.chunk_seconds(BLOCK if blocks else 1, 0) if cost else 0.0
        if self.max_delay_s >= least_s or self.max_delay_s == ONE_CHUNK:
            return ""
        limit, stages = f"--max-delay {self.max_delay_s:g} cannot be held", f"{n_stages} stage{'s' * (n_stages > 1)}"
        if not blocks:
            return f"{limit}: a single row of a prompt takes {stages} {least_s:.3g} s"
        return (
            f"{limit}: exact numerics read prompts in blocks of {BLOCK} rows, and one takes {stages} {least_s:.3g} s, "
            "a prompt's last block up to twice as long; so much later tokens of others may come. --numerics fast has "
            "shorter chunks"
        )

    def n_rows_for_guesses(self, context: int) -> int:
        """Rows of a run that cost hardly more than one and that other requests' roots leave."""
        if self.run_cost is None:
            return 1
        return self.run_cost.n_cheap_rows(context) if self.n_open == 1 else self._budget.n_guesses

    def choose(self, wants: Sequence[RequestSlice], alone: bool) -> list[RequestSlice]:
        """What the next run carries of what requests want, in the order in which they are due; nothing where none shall
        go now."""
        limited, budget = self.max_delay_s < math.inf and not alone, self._budget
        chunk_rows = [] if alone else [flight.n_rows for flight in self.target.useful_flights if flight.n_context]
        if chunk_rows:
            budget = budget.beside_chunks(len(chunk_rows), max(chunk_rows))
        if limited and (chunk_rows or self._were_passed(wants)):
            wants = sorted(wants, key=lambda part: not _is_root(part))
            budget = replace(budget, n_roots=budget.n_rows)  # for those left behind the next run may be a chunk
        found = choose(wants, budget, alone, self._n_chunk_rows)
        chosen = [part.cut(n_context, n_nodes) for part, n_context, n_nodes in found]
        if not alone and not self._can_dispatch(chosen):
            return []
        if limited and any(part.n_context for part in chosen):
            self._passed = {part.request.id for part in wants if _is_root(part)}
        elif limited:
            self._passed.difference_update(part.request.id for part in chosen)
        return chosen

    def _were_passed(self, wants: Sequence[RequestSlice]) -> bool:
        """Whether a chunk went while a root waited that would wait for a second one now."""
        return any(part.request.id in self._passed for part in wants if _is_root(part))

    def _n_chunk_rows(self, first: RequestSlice, n_left: int) -> int:
        """Of how many rows the next chunk shall be; `first`: whose it is. `n_left`: rows of all prompts that wait."""
        most = self.n_chunk(self.target.pool.placed_end(first.request.id))
        return self.run_cost.n_chunk_rows(n_left, self.target.pipeline.n_stages, most) if self.run_cost else most

    def _can_dispatch(self, parts: Sequence[RequestSlice]) -> bool:
        if not self.run_cost:
            return True
        n_roots, n_inflight = sum(part.has_root for part in parts), self.target.n_useful_flights
        certain = any(part.committed for part in parts)
        # exact blocks are read on CPUs, which take so long for each that there is nothing to cover
        covers = self.max_delay_s == math.inf and not self.target.blocks
        reads = covers and any(part.n_context for part in parts)
        return self._budget.can_dispatch(n_roots, certain, n_inflight, reads)

    def _delays_others(self) -> bool:
        """Whether a chunk's time matters: there is a limit, and somebody who has read the prompt."""
        left = self.target.n_context_left
        return self.max_delay_s < math.inf and not all(left(active.request) for active in self.active.values())


def _is_root(part: RequestSlice) -> bool:
    """Whether it is a token that somebody waits for, and no prompt."""
    return part.has_root and not part.n_context
