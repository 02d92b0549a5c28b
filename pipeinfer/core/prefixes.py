"""What finished requests have left in the caches, for requests that begin with the same tokens. Knows tokens; no cells.

A request that takes such a prefix over is as it would be without: with a target that evaluates prompts in blocks, only
rows that it would evaluate in the same way are taken over.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.core.blocks import BLOCK, block_edges
from pipeinfer.core.requests import Prefix, Request


class KeptPrefixes:
    """Of requests that have finished, the oldest first. `blocks`: whether the target evaluates prompts in blocks."""

    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks
        self._kept: dict[int, Request] = {}

    def n_cells(self, but: Prefix | None = None) -> int:
        """What they hold, other than `but`."""
        return sum(request.n_left for id, request in self._kept.items() if not but or id != but.request_id)

    def keep(self, request: Request) -> None:
        """It has finished, and its first `n_left` tokens stay."""
        self._kept[request.id] = request

    def best(self, request: Request) -> Prefix | None:
        """The one that saves the request most, if one does."""
        found = [Prefix(id, self._n_usable(kept, request)) for id, kept in self._kept.items()]
        best = max(found, key=lambda prefix: prefix.n_tokens, default=None)
        return best if best and best.n_tokens else None

    def take(self, request: Request) -> Prefix | None:
        """The same, which is no longer kept."""
        prefix = self.best(request)
        if prefix:
            del self._kept[prefix.request_id]
        return prefix

    def oldest(self, but: Prefix | None = None) -> Request | None:
        """The one to be given up next, other than `but`; it is no longer kept."""
        found = next((id for id in self._kept if not but or id != but.request_id), None)
        return None if found is None else self._kept.pop(found)

    def _n_usable(self, kept: Request, request: Request) -> int:
        """How many of a request's tokens need not be evaluated: its root, the last of its prompt, always is."""
        if request.sampling.looks_back and not kept.sampling.looks_back:
            return 0  # what sampling looks back on was not noted
        n = min(common(kept.tokens, request.prompt), kept.n_left, len(request.prompt) - 1)
        if not self.blocks:
            return n
        own, theirs = request.n_in_blocks, kept.n_in_blocks
        if own > n or own not in (theirs, *(block_edges(theirs) if theirs >= BLOCK else ())):
            return 0
        return n if own == theirs else own


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(first), len(second))
    return next((at for at in range(n) if first[at] != second[at]), n)


def blocks_to_continue(n_in_blocks: int, n_common: int, n_prompt: int) -> int:
    """Of how many rows a prompt shall be evaluated in blocks that goes on from a text with `n_in_blocks` of them, whose
    first `n_common` tokens are its own too, so that little has to be evaluated again; -1: as its length alone says.

    Follows from the texts alone: whether anything is kept does not matter.
    """
    whole = max((edge for edge in block_edges(n_in_blocks) if edge <= n_common), default=0) if n_in_blocks else 0
    n_known = n_common if whole == n_in_blocks else whole
    return whole if 2 * n_known >= n_prompt else -1
