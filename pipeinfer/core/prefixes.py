"""What requests begin with that is in the caches already: of others that are open, or have finished. Knows no cells.

A request that begins with another one's cells is as it would be without: with a target that evaluates prompts in
blocks, only rows that it would evaluate in the same way are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.blocks import BLOCK, Span
from pipeinfer.core.requests import Prefix, Request


class Prefixes:
    """`blocks`: whether the target evaluates prompts in blocks. `rewinds`: whether its sequences can lose their newest
    tokens; else what has finished can only move, as a whole. `active`: the open requests by id; `n_settled`: how many
    of one's tokens every stage has evaluated; `can_retain`: whether so many of one's tokens, by its id, can be had
    without those after them; `window`: of a text that is no longer they always can; 0 if of any."""

    def __init__(
        self,
        blocks: bool,
        rewinds: bool,
        active: Mapping[int, ActiveRequest],
        n_settled: Callable[[Request], int],
        can_retain: Callable[[int, int], bool],
        window: int = 0,
    ) -> None:
        self.blocks, self.rewinds, self.window = blocks, rewinds, window
        self._active, self._n_settled, self._can_leave = active, n_settled, can_retain
        self._retained: dict[int, Request] = {}  # those that have finished, the oldest first

    def retained(self, but: Prefix | None = None) -> list[Request]:
        """Finished requests whose cells stay, without the one that moves."""
        return [each for each in self._retained.values() if not but or not but.moves or each is not but.source]

    def n_to_retain(self, request: Request, n_settled: int) -> int:
        """Of the `n_settled` tokens that have cells when a request ends, how many keep them: whole blocks."""
        if not request.keep:
            return 0
        n = min((span.floor(n_settled) for span in request.spans or () if self.blocks), default=n_settled)
        return n if self._can_leave(request.id, n) else 0

    def retain(self, request: Request) -> None:
        """It has finished, and its first `n_retained` tokens stay."""
        self._retained[request.id] = request

    def best(self, request: Request) -> Prefix | None:
        """The one that saves the request most, if one does. What has finished moves where all of it is wanted by one
        that will leave it again."""
        there = [(each, each.n_retained) for each in self._retained.values()]
        there += [(each, self._n_settled(each)) for each in self._sources]
        found = [Prefix(each, self._n_usable(each, request, n)) for each, n in there]
        found = [prefix for prefix in found if self._can_leave(prefix.source.id, prefix.n_tokens)]
        best = max(found, key=lambda prefix: prefix.n_tokens, default=None)
        if best is None or not best.n_tokens:
            return None
        source = best.source
        moves = (
            source.id in self._retained and best.n_tokens == source.n_retained and (request.keep or not self.rewinds)
        )
        return best._replace(moves=moves)

    def waits(self, request: Request, is_worth: Callable[[int], bool]) -> bool:
        """Whether an open request has yet to evaluate so many tokens that this one begins with too, that it better
        waits for them."""
        reading = (each for each in self._sources if not each.n_generated)
        n_most = max((self._n_to_come(each, request) for each in reading), default=0)
        best = self.best(request) if n_most else None
        n_saved = n_most - (best.n_tokens if best else 0)
        return n_saved > 0 and is_worth(n_saved)

    def _n_to_come(self, source: Request, request: Request) -> int:
        """How many tokens the request can have of one that reads its prompt, once that is read."""
        n_read = len(source.prompt) - 1
        n = self._n_usable(source, request, n_read)
        return n if not self.window or n == n_read or n_read < self.window else 0

    def take(self, prefix: Prefix) -> None:
        """What moves is no longer retained."""
        if prefix.moves:
            del self._retained[prefix.source.id]

    def oldest(self, but: Prefix | None = None) -> Request | None:
        """The one to be given up next, other than `but`; it is no longer retained."""
        found = next((id for id, each in self._retained.items() if not but or each is not but.source), None)
        return None if found is None else self._retained.pop(found)

    def is_awaited(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether one of the others begins with all of the request's prompt but its root, where it can do so only until
        that is sent."""
        if self.rewinds or request.n_generated:
            return False
        return any(self._n_usable(request, each, len(request.prompt) - 1) for each in others)

    @property
    def _sources(self) -> list[Request]:
        """Open requests that others may begin with: where sequences cannot go back, those that have a prompt alone."""
        opened = [active.request for active in self._active.values()]
        if self.rewinds:
            return opened
        return [each for each in opened if not each.n_generated and each.tree.root.run_id is None]

    def _n_usable(self, source: Request, request: Request, n_there: int) -> int:
        """How many of a request's tokens need not be evaluated: its root, the last one, always is."""
        if request.sampling.needs_history and not source.sampling.needs_history:
            return 0  # what sampling looks back on was not noted
        n = min(common(source.tokens, request.tokens), n_there, len(request.tokens) - 1)
        return _n_alike(source.spans or (), request.spans or (), n) if self.blocks else n


def _n_alike(there: Sequence[Span], wanted: Sequence[Span], n: int) -> int:
    """How many of a text's first `n` rows are as they would be with the spans that are wanted: in the same blocks, or
    in none. Never a part of a block."""
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
    """How many tokens two texts begin with alike."""
    n = min(len(first), len(second))
    for start in range(0, n, BLOCK):  # a slice at a time is quicker
        if first[start : start + BLOCK] != second[start : start + BLOCK]:
            end = min(n, start + BLOCK)
            at = next((at for at in range(start, end) if first[at] != second[at]), end)
            if at < end:
                return at
    return n


def spans_to_continue(spans: Sequence[Span], n_said: int, n_common: int, n_prompt: int) -> tuple[Span, ...]:
    """Those of a prompt that goes on from a text of `n_said` tokens with these `spans`, whose first `n_common` tokens
    are its own too, so that only what is new has to be evaluated.

    Follows from the texts alone: whether anything is kept does not matter.
    """
    n_known, found = min(n_common, n_said - 1, n_prompt - 1), list[Span]()  # nothing is evaluated after a newest token
    for span in spans:
        if n_known < span.end:
            n_known = span.floor(n_known)
            found += [Span(span.start, n_known)] if n_known > span.start else []
            break
        found.append(span)
    if n_prompt - 1 - n_known >= BLOCK:
        found.append(Span(n_known, n_prompt - 1))
    return tuple(found)
