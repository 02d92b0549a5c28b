"""What finished requests have left in the caches, for requests that begin with the same tokens. Knows tokens; no cells.

A request that takes such a prefix over is as it would be without: with a target that evaluates prompts in blocks, only
rows that it would evaluate in the same way are taken over.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.core.blocks import BLOCK, Span
from pipeinfer.core.requests import Prefix, Request


class KeptPrefixes:
    """Of requests that have finished, the oldest first. `blocks`: whether the target evaluates prompts in blocks;
    `rewinds`: whether its sequences can lose their newest tokens."""

    def __init__(self, blocks: bool, rewinds: bool = True) -> None:
        self.blocks, self.rewinds = blocks, rewinds
        self._kept: dict[int, Request] = {}

    def n_cells(self, but: Prefix | None = None) -> int:
        """What they hold, other than `but`."""
        return sum(request.n_left for id, request in self._kept.items() if not but or id != but.request_id)

    def n_to_leave(self, request: Request, n_settled: int) -> int:
        """Of the `n_settled` tokens that have cells when a request ends, how many keep them: up to a span that is not
        whole."""
        if not request.keep:
            return 0
        broken = (span for span in request.spans or () if self.blocks and span.start < n_settled < span.end)
        span = next(broken, None)
        return n_settled if span is None else span.start if self.rewinds else 0

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
        if request.sampling.needs_history and not kept.sampling.needs_history:
            return 0  # what sampling looks back on was not noted
        n = min(common(kept.tokens, request.prompt), kept.n_left, len(request.prompt) - 1)
        n = _n_alike(kept.spans or (), request.spans or (), n) if self.blocks else n
        return n if self.rewinds or n == kept.n_left else 0


def _n_alike(kept: Sequence[Span], wanted: Sequence[Span], n: int) -> int:
    """How many of a text's first `n` rows are as they would be with the spans that are wanted. Never within one of
    these: its blocks follow each other in a cache of their own."""
    for index, span in enumerate(wanted):
        there = kept[index] if index < len(kept) else None
        if there is None or there.start != span.start or span.end not in there.edges:
            return min(n, span.start, there.start if there else n)
        if n < span.end:
            return min(n, span.start)
        if span.end < there.end:
            return span.end
    return min([n, *(span.start for span in kept[len(wanted) :])])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = min(len(first), len(second))
    return next((at for at in range(n) if first[at] != second[at]), n)


def spans_to_continue(spans: Sequence[Span], n_said: int, n_common: int, n_prompt: int) -> tuple[Span, ...]:
    """Those of a prompt that goes on from a text of `n_said` tokens with these `spans`, whose first `n_common` tokens
    are its own too, so that only what is new has to be evaluated.

    Follows from the texts alone: whether anything is kept does not matter.
    """
    n_known, found = min(n_common, n_said - 1, n_prompt - 1), list[Span]()  # nothing is evaluated after a newest token
    for span in spans:
        if n_known < span.end:
            edge = max(edge for edge in (0, *span.edges) if edge <= n_known)
            n_known = edge if edge > span.start else min(n_known, span.start)
            found += [Span(span.start, edge)] if edge > span.start else []
            break
        found.append(span)
    if n_prompt - 1 - n_known >= BLOCK:
        found.append(Span(n_known, n_prompt - 1))
    return tuple(found)
