"""Which requests are opened, when, and which are preempted: by cells, sequences and shared prefixes. Opens none."""

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
"""Tokens beyond its text for which an opened request must have cells: at most, and as a share of all cells. With more,
requests wait that there is room for; with fewer, they are preempted soon."""

RANK = attrgetter("rank")


def ahead_of(n_tokens: int) -> int:
    """Tokens beyond its text for which a request must have room, where there is room for `n_tokens` in all."""
    return min(AHEAD, int(n_tokens * SHARE_AHEAD))


class Admission:
    """`levels`: the target first. `active`: the open requests by id. `n_prompts`: requests that read their prompts in
    blocks at a time, at most. `n_open`: open requests at most. `waiting`: in the order in which they are opened."""

    def __init__(
        self, levels: Sequence[Level], speculator: Speculator, active: Mapping[int, ActiveRequest],
        run_cost: RunCost | None, n_prompts: int,
    ) -> None:  # fmt: skip
        self.levels, self.speculator, self.active, self.run_cost = levels, speculator, active, run_cost
        self.target, self.n_prompts, self.n_open = levels[0], n_prompts, 1 << 30
        self.ahead = ahead_of(self.target.pool.n_cells)
        self.prefixes = Prefixes(self.target, active)
        self.waiting: list[ActiveRequest] = []
        self._n_arrived = 0

    # -- who waits

    def wait(self, active: ActiveRequest) -> None:
        """Queue a request by priority, then arrival; a preempted one keeps its place."""
        if not active.arrival:
            self._n_arrived += 1
            active.arrival = self._n_arrived
        insort(self.waiting, active, key=RANK)

    def would_pass(self, priority: int) -> bool:
        """Whether a request of this priority would be opened before one that waits."""
        return bool(self.waiting) and priority < self.waiting[-1].request.priority

    def withdraw(self, request: Request) -> ActiveRequest | None:
        """Remove the request from those that wait; None if it is not one of them."""
        active = next((active for active in self.waiting if active.request is request), None)
        if active:
            self.waiting.remove(active)
            for level in self.levels:
                level.end(request)
        return active

    def ready(self) -> Iterator[ActiveRequest]:
        """Dequeue requests for which there is room; each is opened before the next is asked for. Requests that are to
        share what another one is about to evaluate are passed over."""
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
        """Whether the request's root should stay back while requests wait that start with its prompt."""
        return bool(self.waiting) and self.prefixes.is_awaited(request, [active.request for active in self.waiting])

    @property
    def n_reserved(self) -> int:
        """Cells of the target that open and waiting requests need soon."""
        waiting = sum(active.request.n_soon(self.ahead) for active in self.waiting)
        return waiting + self.target.n_reserved(self._open, {}, self.ahead)

    def _is_worth_waiting(self, n_rows: int) -> bool:
        """Whether so many rows take the slowest stage longer than one row takes all stages, which is about how long a
        request waits for rows that another one evaluates."""
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
        """Free what the oldest finished request, other than the source of `but`, has retained; False if there is
        none."""
        if request := self.prefixes.pop_oldest(but):
            self.speculator.forget(request)
            for level in self.levels:
                level.pool.close(request.id)
        return request is not None

    def next_to_preempt(self) -> ActiveRequest | None:
        """The open request of the lowest rank, while others have no cells for their next tokens; never the only one.
        What finished requests have retained is freed first."""
        pool = self.target.pool
        while len(self.active) > 1 or self.prefixes.retained():
            retained = {each.id: each.n_retained for each in self.prefixes.retained()}
            if self.target.n_reserved(self._open, retained, self.ahead) <= pool.n_cells:
                break
            if not self.forget_oldest():
                return max(self.active.values(), key=RANK)
        return None

    def _make_room(self, request: Request) -> bool:
        """Set the request's `prefix_hit` and free retained cells until there is room; False if there is none. In the
        end its own prefix moves."""
        while self.speculator.has_heard:
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
