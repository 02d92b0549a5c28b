"""Which requests' rows make the next run of a level. Pure: knows numbers of rows; no tree, sequences or clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

from pipeinfer.core.blocks import Span


class Want(Protocol):
    """What one request would send now: a chunk of committed tokens, or nodes, of which the first may be its root."""

    @property
    def n_context(self) -> int: ...

    @property
    def nodes(self) -> Sized: ...

    @property
    def has_root(self) -> bool: ...

    @property
    def span(self) -> Span | None:
        """The committed tokens are whole blocks of it, never cut, and travel by themselves."""
        ...


W = TypeVar("W", bound=Want)


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What a run may carry. `n_roots`: requests whose roots share a run, so that there are as many runs as stages.
    `n_cheap`: rows that cost hardly more than one. `n_rows`, `n_context`: nodes and committed tokens at most; of both
    together, where there are committed tokens, `n_context` and one root."""

    n_roots: int
    n_cheap: int
    n_rows: int
    n_context: int
    n_open: int = 1
    n_stages: int = 1

    @staticmethod
    @lru_cache(maxsize=64)
    def for_load(n_open: int, n_stages: int, n_cheap: int, n_rows: int, n_context: int) -> BatchBudget:
        """With R requests open and p stages about p runs of R / p roots keep every stage busy."""
        return BatchBudget(max(1, min(n_rows, -(-n_open // n_stages))), n_cheap, n_rows, n_context, n_open, n_stages)

    def beside_chunks(self, n_chunks: int, n_chunk_rows: int) -> BatchBudget:
        """The same while so many chunks of prompts, of so many rows at most, are in flight. Each keeps a stage busy, so
        that fewer runs of more roots are left to: a row costs less in them. None is larger than a chunk, for which the
        stages behind would wait, and the requests' answers come together more than they have to."""
        n_roots = min(-(-self.n_open // max(1, self.n_stages - n_chunks)), n_chunk_rows, self.n_rows)
        return replace(self, n_roots=n_roots) if n_roots > self.n_roots else self

    @property
    def n_guesses(self) -> int:
        """Guesses that a run has room for beside its roots."""
        return max(0, self.n_cheap - self.n_roots)

    def can_dispatch(self, n_roots: int, certain: bool, n_inflight: int, reads: bool = False) -> bool:
        """Whether a run of so many roots shall go now; `certain`: it has some, or prompts; `reads`: prompts.

        With one in flight for each stage only one more goes. It covers what messages and the head take of a cycle, but
        must have as many roots as it may: small runs would stay small, as their answers come together again. A chunk
        of a prompt has its size whatever else is on its way. Guesses by themselves take no place that a root will want.
        """
        n_more = n_inflight - self.n_stages
        if not certain:
            return n_more < 0 and self.n_open < self.n_stages
        return n_more < 0 or (n_more == 0 and (reads or n_roots >= self.n_roots))


def choose(
    wants: Sequence[W], budget: BatchBudget, alone: bool, chunk_rows: Callable[[W, int], int] | None = None
) -> list[tuple[W, int, int]]:
    """The next run: wants, and how many of their committed tokens and nodes go. They come in the order in which
    requests are due.

    The request that is due decides whether the run carries prompts or nodes: a run of both would make every root in it
    wait for a whole chunk. Of nodes roots come first, guesses fill what is left of the rows that cost little; `alone`:
    a single request's policy decides by itself how many guesses pay. `chunk_rows`: (who is due, rows of prompts that
    wait) -> of how many the next chunk shall be; without it as many as go.
    """
    if not wants:
        return []
    return _prompts(wants, budget, chunk_rows) if wants[0].n_context else _nodes(wants, budget, alone)


def _prompts(
    wants: Sequence[W], budget: BatchBudget, chunk_rows: Callable[[W, int], int] | None
) -> list[tuple[W, int, int]]:
    first = wants[0]
    if first.span:
        return [(first, first.n_context, 0)]
    n_left = sum(want.n_context for want in wants if not want.span)
    most = chunk_rows(first, n_left) if chunk_rows else budget.n_context
    shares, left, n_nodes_left = [], most + 1, budget.n_rows
    for want in wants:
        n_context = 0 if want.span else min(want.n_context, most, left)
        if n_context:
            left -= n_context
            is_last = n_context == want.n_context and len(want.nodes) <= min(left, n_nodes_left)
            n_nodes = len(want.nodes) if is_last else 0
            shares.append((want, n_context, n_nodes))
            left, n_nodes_left = left - n_nodes, n_nodes_left - n_nodes
    return shares


def _nodes(wants: Sequence[W], budget: BatchBudget, alone: bool) -> list[tuple[W, int, int]]:
    roots = [want for want in wants if want.has_root and not want.n_context][: budget.n_roots]
    left = budget.n_rows if alone else max(len(roots), min(budget.n_cheap, budget.n_rows))
    n_roots_left, shares = len(roots), []
    for want in roots:
        n_roots_left -= 1
        n_nodes = len(want.nodes)
        if n_nodes > 1:
            n_nodes = max(1, min(n_nodes, left - n_roots_left))
        shares.append((want, 0, n_nodes))
        left -= n_nodes
    if left > 0:
        for want in wants:
            if not want.has_root and not want.n_context and (n_nodes := min(len(want.nodes), left)):
                shares.append((want, 0, n_nodes))
                left -= n_nodes
    return shares
