"""Which cached tokens of other requests, open or finished, a request starts with. Knows texts, no cells.

The output does not depend on it: where prompts are evaluated in blocks, only rows that the request would evaluate in
the same way are shared.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.kv.blocks import BLOCK, Span
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Prefix, Request


class Prefixes:
    """Of the requests that are `active`, by id, and of finished ones that are retained. Where sequences of the `target`
    do not rewind, what is retained can only move, as a whole."""

    def __init__(self, target: Level, active: Mapping[int, ActiveRequest]) -> None:
        self._target, self._pool, self._active = target, target.pool, active
        self._retained: dict[int, Request] = {}  # finished requests, the oldest first

    def retained(self, but: Prefix | None = None) -> list[Request]:
        """Finished requests with cells, without the source of `but` if that moves."""
        return [each for each in self._retained.values() if not but or not but.moves or each is not but.source]

    def n_to_retain(self, request: Request, n_settled: int) -> int:
        """How many of a finished request's `n_settled` cached tokens are retained: whole blocks."""
        if not request.keep:
            return 0
        n = min((span.floor(n_settled) for span in request.spans or () if self._target.blocks), default=n_settled)
        return n if self._pool.can_retain(request.id, n) else 0

    def retain(self, request: Request) -> None:
        """Its first `n_retained` tokens stay."""
        self._retained[request.id] = request

    def take(self, prefix: Prefix) -> None:
        """A request starts with it: what moves is no longer retained."""
        if prefix.moves:
            del self._retained[prefix.source.id]

    def pop_oldest(self, but: Prefix | None = None) -> Request | None:
        """Remove and return the request to give up next, other than the source of `but`."""
        found = next((id for id, each in self._retained.items() if not but or each is not but.source), None)
        return None if found is None else self._retained.pop(found)

    def best(self, request: Request) -> Prefix | None:
        """The longest prefix for the request. It moves if all that is retained is used and retained again later."""
        there = [(each, each.n_retained) for each in self._retained.values()]
        there += [(each, self._target.n_settled(each)) for each in self._sources]
        found = [Prefix(each, self._n_usable(each, request, n)) for each, n in there]
        found = [prefix for prefix in found if self._pool.can_retain(prefix.source.id, prefix.n_tokens)]
        best = max(found, key=lambda prefix: prefix.n_tokens, default=None)
        if best is None or not best.n_tokens:
            return None
        is_whole = best.source.id in self._retained and best.n_tokens == best.source.n_retained
        return best._replace(moves=is_whole and (request.keep or not self._pool.rewinds))

    def waits(self, request: Request, is_worth: Callable[[int], bool]) -> bool:
        """Whether the request should wait for tokens that an open one is about to evaluate. `is_worth`: whether so many
        are worth it."""
        reading = (each for each in self._sources if not each.n_generated)
        n_most = max((self._n_to_come(each, request) for each in reading), default=0)
        best = self.best(request) if n_most else None
        n_saved = n_most - (best.n_tokens if best else 0)
        return n_saved > 0 and is_worth(n_saved)

    def is_awaited(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether one of the others starts with all of the request's prompt, which is possible only until its root is
        sent."""
        if self._pool.rewinds or request.n_generated:
            return False
        return any(self._n_usable(request, each, len(request.prompt) - 1) for each in others)

    def _n_to_come(self, source: Request, request: Request) -> int:
        """How many tokens of one that reads its prompt the request can use, once that is read."""
        n_read, window = len(source.prompt) - 1, self._pool.window
        n = self._n_usable(source, request, n_read)
        return n if not window or n == n_read or n_read < window else 0

    @property
    def _sources(self) -> list[Request]:
        """Open requests that others may start with: without `rewinds`, those of which only the prompt is evaluated."""
        opened = [active.request for active in self._active.values()]
        if self._pool.rewinds:
            return opened
        return [each for each in opened if not each.n_generated and each.tree.root.run_id is None]

    def _n_usable(self, source: Request, request: Request, n_there: int) -> int:
        """How many of the request's tokens need not be evaluated; its root, the last one, always is."""
        n = min(common(source.tokens, request.tokens), n_there, len(request.tokens) - 1)
        return _n_alike(source.spans or (), request.spans or (), n) if self._target.blocks else n


def _n_alike(there: Sequence[Span], wanted: Sequence[Span], n: int) -> int:
    """How many of a text's first `n` rows are evaluated alike with both spans: in the same blocks, or in none. Whole
    blocks only."""
    for span, other in zip_longest(wanted, there):
        if span and other and span.start == other.start:
            shorter, longer = sorted((span, other))
            n_same = n if span == other else shorter.floor(longer.floor(shorter.end))
        else:
            n_same = min(each.start for each in (span, other) if each)
        n = min(n, n_same)
        n = span.floor(n) if span else n
        if span != other:
            break
    return n


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the two texts' common prefix."""
    n = min(len(first), len(second))
    for start in range(0, n, BLOCK):  # slices are compared faster
        if first[start : start + BLOCK] != second[start : start + BLOCK]:
            end = min(n, start + BLOCK)
            at = next((at for at in range(start, end) if first[at] != second[at]), end)
            if at < end:
                return at
    return n


def spans_to_continue(spans: Sequence[Span], n_said: int, n_common: int, n_prompt: int) -> tuple[Span, ...]:
    """Spans of a prompt that shares its first `n_common` tokens with a text of `n_said` tokens and these `spans`, so
    that only new tokens have to be evaluated.

    They follow from the texts alone, whether anything is cached or not.
    """
    n_known, found = min(n_common, n_said - 1, n_prompt - 1), list[Span]()  # the last token is not evaluated
    for span in spans:
        if n_known < span.end:
            n_known = span.floor(n_known)
            found += [Span(span.start, n_known)] if n_known > span.start else []
            break
        found.append(span)
    if n_prompt - 1 - n_known >= BLOCK:
        found.append(Span(n_known, n_prompt - 1))
    return tuple(found)
