"""Which requests' rows make the next run. Pure: counts rows; knows no sequences and no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeinfer.core.in_flight import RequestSlice

ChunkRows = Callable[[RequestSlice, int], int]
"""(the first slice, rows of all waiting prompts) -> rows of the next chunk."""


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What a run may carry. `n_roots`: requests whose roots share a run, so that there are as many runs as stages.
    `n_cheap`: rows that cost hardly more than one. `n_rows`, `n_context`: nodes and committed tokens at most; a run
    with committed tokens has at most `n_context` rows and one root."""

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
        size in any case. Guesses alone take no place that a root will want.
        """
        n_more = n_inflight - self.n_stages
        if not certain:
            return n_more < 0 and self.n_open < self.n_stages
        return n_more < 0 or (n_more == 0 and (reads or n_roots >= self.n_roots))


def choose(
    wants: Sequence[RequestSlice], budget: BatchBudget, alone: bool, chunk_rows: ChunkRows | None = None
) -> list[RequestSlice]:
    """The next run, from what each request wants, in the order in which they are due.

    The first request decides whether the run carries prompts or nodes: with both, every root in it would wait for a
    whole chunk. Roots go before guesses, which fill the cheap rows that are left. `alone`: there is one request, whose
    policy decides how many guesses pay. Without `chunk_rows` a chunk is as large as the budget allows.
    """
    if not wants:
        return []
    return _prompts(wants, budget, chunk_rows) if wants[0].n_context else _nodes(wants, budget, alone)


def _prompts(wants: Sequence[RequestSlice], budget: BatchBudget, chunk_rows: ChunkRows | None) -> list[RequestSlice]:
    first = wants[0]
    if first.span:
        return [first.cut(first.n_context, 0)]  # blocks are not cut and travel alone
    most = chunk_rows(first, sum(want.n_context for want in wants if not want.span)) if chunk_rows else budget.n_context
    chosen, left, n_nodes_left = [], most + 1, budget.n_rows
    for want in wants:
        n_context = 0 if want.span else min(want.n_context, most, left)
        if n_context:
            left -= n_context
            is_last = n_context == want.n_context and len(want.nodes) <= min(left, n_nodes_left)
            n_nodes = len(want.nodes) if is_last else 0
            chosen.append(want.cut(n_context, n_nodes))
            left, n_nodes_left = left - n_nodes, n_nodes_left - n_nodes
    return chosen


def _nodes(wants: Sequence[RequestSlice], budget: BatchBudget, alone: bool) -> list[RequestSlice]:
    roots = [want for want in wants if want.has_root and not want.n_context][: budget.n_roots]
    left = budget.n_rows if alone else max(len(roots), min(budget.n_cheap, budget.n_rows))
    n_roots_left, chosen = len(roots), []
    for want in roots:
        n_roots_left -= 1
        n_nodes = len(want.nodes)
        if n_nodes > 1:
            n_nodes = max(1, min(n_nodes, left - n_roots_left))
        chosen.append(want.cut(0, n_nodes))
        left -= n_nodes
    if left > 0:
        for want in wants:
            if not want.has_root and not want.n_context and (n_nodes := min(len(want.nodes), left)):
                chosen.append(want.cut(0, n_nodes))
                left -= n_nodes
    return chosen
