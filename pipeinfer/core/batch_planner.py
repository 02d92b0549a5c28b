"""What the next run may carry, by the load and by what runs cost: roots, guesses, rows of prompts. Sends nothing. A
token waits in every stage for the chunks of prompts before it. A chunk goes when a stage is about to want it, so chunks
follow each other at a distance, and a token waits for about one chunk in each stage, however many there are."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.levels import Level, RequestSlice
from pipeinfer.core.policy import Active
from pipeinfer.core.run_cost import Pacer, RunCost
from pipeinfer.core.types import Clock

ONE_CHUNK = 0.0  # as `max_delay_s`: the time of one chunk of the largest size

ChunkRows = Callable[[RequestSlice, int], int]  # (first slice, rows of all waiting prompts) -> rows of the next chunk


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What a run may carry. `n_roots`: requests whose roots share a run, so that there are as many runs as stages.
    `n_cheap`: rows that cost hardly more than one. `n_rows`, `n_context`: nodes and committed tokens at most; a run
    with committed tokens has at most `n_context` rows and one root. `n_open`: requests. `n_stages`: of the target."""

    n_roots: int
    n_cheap: int
    n_rows: int
    n_context: int
    n_open: int = 1
    n_stages: int = 1

    @staticmethod
    @lru_cache(maxsize=64)
    def for_load(n_open: int, n_stages: int, n_cheap: int, n_rows: int, n_context: int) -> "BatchBudget":
        """With R open requests and p stages about p runs of R / p roots keep every stage busy."""
        return BatchBudget(max(1, min(n_rows, -(-n_open // n_stages))), n_cheap, n_rows, n_context, n_open, n_stages)

    def beside_chunks(self, n_chunks: int, n_chunk_rows: int) -> "BatchBudget":
        """The budget while `n_chunks` chunks of prompts, of at most `n_chunk_rows` rows, are in flight. Each keeps a
        stage busy, so fewer runs have more roots, whose rows cost less. No run is larger than a chunk: later stages
        would wait for it, and more answers would come together."""
        n_roots = min(-(-self.n_open // max(1, self.n_stages - n_chunks)), n_chunk_rows, self.n_rows)
        return replace(self, n_roots=n_roots) if n_roots > self.n_roots else self

    @property
    def n_guesses(self) -> int:
        """Guesses that a run has room for beside its roots."""
        return max(0, self.n_cheap - self.n_roots)

    def can_dispatch(self, n_roots: int, certain: bool, n_inflight: int, reads: bool = False) -> bool:
        """Whether a run with `n_roots` roots should go now. `certain`: it has roots or prompts; `reads`: prompts.

        With one run in flight for each stage only one more goes, to cover the time of messages and of the head. It
        needs `n_roots` roots: small runs would stay small, as their answers come together again. Prompts have their
        size in any case. Guesses alone take no place that a root will want."""
        n_more = n_inflight - self.n_stages
        if not certain:
            return n_more < 0 and self.n_open < self.n_stages
        return n_more < 0 or (n_more == 0 and (reads or n_roots >= self.n_roots))


class BatchPlanner:
    """When the next run of the target goes, and what it carries. `max_delay_s`: how much later a token may come, in all
    stages together, because other requests' prompts are read."""

    def __init__(
        self, target: Level, run_cost: RunCost | None, clock: Clock, active: Active, max_delay_s: float
    ) -> None:
        self.target, self.run_cost, self.active, self.max_delay_s = target, run_cost, active, max_delay_s
        self.pacer = Pacer(run_cost, clock)
        self._passed: set[int] = set()  # requests whose roots waited when the last chunk was sent

    @property
    def n_open(self) -> int:
        return len(self.active)

    @property
    def _budget(self) -> BatchBudget:
        target, n_open = self.target, max(1, self.n_open)
        n_cheap = self.run_cost.n_cheap_rows(0) if self.run_cost else target.n_rows
        return BatchBudget.for_load(n_open, target.pipeline.n_stages, n_cheap, target.n_rows, target.n_chunk)

    def n_chunk(self, n_before: int) -> int:
        """Committed tokens that a run may carry after `n_before` tokens."""
        most, cost = self.target.n_chunk, self.run_cost
        if cost is None or self.max_delay_s in (ONE_CHUNK, math.inf):
            return most
        if all(self.target.n_context_left(active.request) for active in self.active.values()):
            return most  # no text has begun that could be delayed
        limit_s = self.max_delay_s / self.target.pipeline.n_stages
        n_rows = bisect_right(range(1, most + 1), limit_s, key=lambda n: cost.chunk_seconds(n, n_before))
        return n_rows or min(most, cost.n_cheap_rows(n_before))  # where one row is too long, a few are hardly longer

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

    def n_rows_for_guesses(self, n_before: int) -> int:
        """Rows of a run that cost hardly more than one and are left by other requests' roots."""
        if self.run_cost is None:
            return 1
        return self.run_cost.n_cheap_rows(n_before) if self.n_open == 1 else self._budget.n_guesses

    def choose(self, wants: Sequence[RequestSlice], alone: bool) -> list[RequestSlice]:
        """The next run, from what requests want, in the order in which they are due; nothing if none should go now."""
        if alone:
            return choose(wants, self._budget, True, self._n_chunk_rows)
        limited, budget = self.max_delay_s < math.inf, self._budget
        if chunk_rows := [flight.n_rows for flight in self.target.useful_flights if flight.n_context]:
            budget = budget.beside_chunks(len(chunk_rows), max(chunk_rows))
        # or a root waited when the last chunk was sent, and would wait for a second one now
        if limited and (chunk_rows or any(part.request.id in self._passed for part in wants if _is_root(part))):
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


def _is_root(part: RequestSlice) -> bool:
    """Whether it is a root without context."""
    return part.has_root and not part.n_context


# -- which requests' rows make a run


def choose(
    wants: Sequence[RequestSlice], budget: BatchBudget, alone: bool, chunk_rows: ChunkRows | None = None
) -> list[RequestSlice]:
    """The next run, from what each request wants, in the order in which they are due.

    The first request decides whether the run carries prompts or nodes: with both, every root in it would wait for a
    whole chunk. Requests with other adapters wait for another run. Roots go before guesses, which fill the cheap rows
    that are left. `alone`: there is one request, whose policy decides how many guesses pay. Without `chunk_rows` a
    chunk is as large as the budget allows."""
    if not wants:
        return []
    wants = [want for want in wants if want.request.adapters == wants[0].request.adapters]
    return _prompts(wants, budget, chunk_rows) if wants[0].n_context else _nodes(wants, budget, alone)


def _prompts(wants: Sequence[RequestSlice], budget: BatchBudget, chunk_rows: ChunkRows | None) -> list[RequestSlice]:
    first = wants[0]
    if first.is_single:
        return [first]
    most = (
        chunk_rows(first, sum(want.n_context for want in wants if not want.is_single))
        if chunk_rows
        else budget.n_context
    )
    chosen, room, n_nodes_left = [], most + 1, budget.n_rows
    for want in wants:
        n_context = 0 if want.is_single else min(want.n_context, most, room)
        if n_context:
            room -= n_context
            is_last = n_context == want.n_context and len(want.nodes) <= min(room, n_nodes_left)
            n_nodes = len(want.nodes) if is_last else 0
            chosen.append(want.cut(n_context, n_nodes))
            room, n_nodes_left = room - n_nodes, n_nodes_left - n_nodes
    return chosen


def _nodes(wants: Sequence[RequestSlice], budget: BatchBudget, alone: bool) -> list[RequestSlice]:
    roots = [want for want in wants if want.has_root and not want.n_context][: budget.n_roots]
    room = budget.n_rows if alone else max(len(roots), min(budget.n_cheap, budget.n_rows))
    n_roots_left, chosen = len(roots), []
    for want in roots:
        n_roots_left -= 1
        n_nodes = len(want.nodes)
        if n_nodes > 1:
            n_nodes = max(1, min(n_nodes, room - n_roots_left))
        chosen.append(want.cut(0, n_nodes))
        room -= n_nodes
    if room > 0:
        for want in wants:
            if not want.has_root and not want.n_context and (n_nodes := min(len(want.nodes), room)):
                chosen.append(want.cut(0, n_nodes))
                room -= n_nodes
    return chosen
