"""Which requests' rows make the next run of a level. Pure: knows numbers of rows; no tree, sequences or clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Want:
    """What one request would send now: a chunk of its certain tokens, or nodes, of which the first may be its root."""

    request_id: int
    n_context: int
    n_nodes: int
    has_root: bool
    in_blocks: bool = False
    """Its certain tokens are whole blocks of a prompt, which are never cut and travel by themselves."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a run may carry. `n_roots`: requests whose roots share a run, so that there are as many runs as stages.
    `n_cheap`: rows that cost hardly more than one. `n_rows`, `n_context`: nodes and certain tokens at most."""

    n_roots: int
    n_cheap: int
    n_rows: int
    n_context: int

    @staticmethod
    def for_load(n_open: int, n_stages: int, n_cheap: int, n_rows: int, n_context: int) -> Room:
        """With R requests open and p stages about p runs of R / p roots keep every stage busy."""
        return Room(max(1, -(-n_open // n_stages)), n_cheap, n_rows, n_context)

    @property
    def n_guesses(self) -> int:
        """Guesses that a run has room for beside its roots."""
        return max(0, self.n_cheap - self.n_roots)


@dataclass(frozen=True, slots=True)
class Share:
    """How many rows of a want go into the run."""

    request_id: int
    n_context: int
    n_nodes: int


def choose(wants: Sequence[Want], room: Room, alone: bool) -> list[Share]:
    """The next run's shares; the wants come in the order in which requests are due.

    The request that is due decides whether the run carries prompts or nodes: a run of both would make every root in it
    wait for a whole chunk. Of nodes roots come first, guesses fill what is left of the rows that cost little; `alone`:
    a single request's policy decides by itself how many guesses pay.
    """
    if not wants:
        return []
    return _prompts(wants, room) if wants[0].n_context else _nodes(wants, room, alone)


def _prompts(wants: Sequence[Want], room: Room) -> list[Share]:
    first = wants[0]
    if first.in_blocks:
        return [Share(first.request_id, first.n_context, 0)]
    shares, left = [], room.n_context
    for want in wants:
        if want.in_blocks:
            continue
        n_context = min(want.n_context, left)
        if n_context:
            shares.append(Share(want.request_id, n_context, want.n_nodes if n_context == want.n_context else 0))
            left -= n_context
    return shares


def _nodes(wants: Sequence[Want], room: Room, alone: bool) -> list[Share]:
    roots = [want for want in wants if want.has_root and not want.n_context][: room.n_roots]
    guessers = [want for want in wants if not want.has_root and not want.n_context]
    left = room.n_rows if alone else max(len(roots), min(room.n_cheap, room.n_rows))
    shares = []
    for n_left_for, want in zip(range(len(roots) - 1, -1, -1), roots, strict=True):
        n_nodes = max(1, min(want.n_nodes, left - n_left_for))
        shares.append(Share(want.request_id, 0, n_nodes))
        left -= n_nodes
    for want in guessers:
        n_nodes = min(want.n_nodes, left)
        if n_nodes:
            shares.append(Share(want.request_id, 0, n_nodes))
            left -= n_nodes
    return shares
