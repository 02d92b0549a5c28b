"""Which requests may begin, when, and which of them wait again: cells, sequences, what they begin with. Opens none."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from pipeinfer.core.active_request import ActiveRequest
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.scheduling.prefixes import Prefixes
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.core.speculator import Speculator

AHEAD, SHARE_AHEAD = 64, 1 / 16
"""Tokens beyond its text so far for which a request must have cells to begin, at most, and as a share of what all have.
With more, requests wait that could have been done; with fewer, they are preempted soon."""

RANK = attrgetter("rank")


def ahead_of(n_tokens: int) -> int:
    """Tokens beyond its text so far for which a request must have room, where all have so many together."""
    return min(AHEAD, int(n_tokens * SHARE_AHEAD))


class Admission:
    """`levels`: the target first. `active`: the open requests by id. `n_prompts`: of requests that read blocks at a
    time, at most. `n_open`: of all requests. `waiting`: in the order in which they are to be opened."""

    def __init__(
        self,
        levels: Sequence[Level],
        speculator: Speculator,
        active: Mapping[int, ActiveRequest],
        run_cost: RunCost | None,
        n_prompts: int,
    ) -> None:
        self.levels, self.speculator, self.active, self.run_cost, self.target = (
            levels,
            speculator,
            active,
            run_cost,
            levels[0],
        )
        self.n_prompts, self.n_open, self.ahead = n_prompts, 1 << 30, ahead_of(self.target.pool.n_cells)
        pool = self.target.pool
        self.prefixes = Prefixes(
            self.target.blocks, pool.rewinds, active, self.target.n_settled, pool.can_retain, pool.window.size
        )
        self.waiting: list[ActiveRequest] = []
        self._n_arrived = 0

    # -- who waits

    def wait(self, active: ActiveRequest) -> None:
        """It is to be opened, for the first time or again: of one priority before those that have come after it."""
        if not active.arrival:
            self._n_arrived += 1
            active.arrival = self._n_arrived
        insort(self.waiting, active, key=RANK)

    def would_pass(self, priority: int) -> bool:
        """Whether a request of this priority is to be opened before one that waits."""
        return bool(self.waiting) and priority < self.waiting[-1].request.priority

    def give_up(self, request: Request) -> ActiveRequest | None:
        """Nobody wants it any more; the one that has waited, if it is one of those."""
        active = next((active for active in self.waiting if active.request is request), None)
        if active:
            self.waiting.remove(active)
            for level in self.levels:
                level.end(request)
        return active

    def ready(self) -> Iterator[ActiveRequest]:
        """Those that may begin now, each to be opened before the next is asked for: the first that wait, while there is
        room; passed over are those that better wait until another one has evaluated what they begin with."""
        for active in list(self.waiting):
            if len(self.active) >= self.n_open:
                break
            if self.prefixes.waits(active.request, self._is_worth_waiting):
                continue
            if self._reads_enough(active.request) or not self._make_room(active.request):
                break
            self.waiting.remove(active)
            yield active

    def is_awaited(self, request: Request) -> bool:
        """Whether its root better stays back until its prompt is evaluated, as others are to begin where it stands."""
        return bool(self.waiting) and self.prefixes.is_awaited(request, [active.request for active in self.waiting])

    @property
    def n_reserved(self) -> int:
        """Cells of the target that the requests that are open or wait need soon."""
        waiting = sum(active.request.n_soon(self.ahead) for active in self.waiting)
        return waiting + self.target.n_reserved(self._open, {}, self.ahead)

    def _is_worth_waiting(self, n_rows: int) -> bool:
        """Whether evaluating so many rows again takes the slowest stage longer than all stages take for one: about so
        long a request waits for what another one evaluates."""
        cost = self.run_cost
        return not cost or cost.seconds(n_rows, 0) > self.target.pipeline.n_stages * cost.seconds(1, 0)

    def _reads_enough(self, request: Request) -> bool:
        """Whether this is a prompt in blocks and as many are read as may be, or have together as many rows as the cache
        has cells: each has a cache of its own meanwhile."""
        if not (self.target.blocks and request.spans):
            return False
        read = [other.spans[-1].end for other in self._open if other.spans and self.target.reads_blocks(other)]
        is_full = sum(read) + request.spans[-1].end > self.target.pool.n_cells
        return len(read) >= self.n_prompts or (bool(read) and is_full)

    # -- room

    @property
    def _open(self) -> list[Request]:
        return [active.request for active in self.active.values()]

    def forget_oldest(self, but: Prefix | None = None) -> bool:
        """Give up what the first of the finished requests has left; whether there was one, other than `but`."""
        if request := self.prefixes.oldest(but):
            self.speculator.forget(request)
            for level in self.levels:
                level.pool.close(request.id)
        return request is not None

    def to_preempt(self) -> ActiveRequest | None:
        """Who has to give its cells up so that others have enough for their next tokens: of those that are open the
        last by priority, then by when it came, but never all. What finished ones have left is given up before."""
        pool = self.target.pool
        while len(self.active) > 1 or self.prefixes.retained():
            left = {each.id: each.n_retained for each in self.prefixes.retained()}
            if self.target.n_reserved(self._open, left, self.ahead) <= pool.n_cells:
                break
            if not self.forget_oldest():
                return max(self.active.values(), key=RANK)
        return None

    def _make_room(self, request: Request) -> bool:
        """Make room for the request and give it its `prefix_hit`, if that is possible: what finished ones have left is
        given up for it, at last by moving there."""
        while self.speculator.has_heard:  # else it will have when its step is done
            prefix = self.prefixes.best(request)
            if self._has_room(request, prefix):
                request.prefix_hit = prefix
                return True
            if not self.forget_oldest(but=prefix):
                request.prefix_hit = prefix and prefix._replace(moves=prefix.source.id not in self.active)
                return request.prefix_hit != prefix and self._has_room(request, request.prefix_hit)
        return False

    def _has_room(self, request: Request, prefix: Prefix | None) -> bool:
        opened, retained = self._open, self.prefixes.retained(but=prefix)
        if (opened or retained) and not all(
            level.has_room(request, prefix, opened, retained, self.ahead) for level in self.levels
        ):
            return False
        return bool(prefix and prefix.moves) or (
            all(level.pool.n_free for level in self.levels) and self.speculator.can_open
        )
