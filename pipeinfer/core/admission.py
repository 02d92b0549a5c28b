"""Which requests are opened, when, with which cached tokens of other requests, and which are preempted. Opens none. The
output does not depend on shared tokens: where prompts are evaluated in blocks, only rows that the request would
evaluate in the same way are shared."""

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from pipeinfer.core.blocks import common, n_alike
from pipeinfer.core.levels import InFlightRun, Level
from pipeinfer.core.policy import Active, ActiveRequest
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import BlockKey
from pipeinfer.core.speculator import Speculator
from pipeinfer.core.stored_blocks import Room, StoredBlocks

AHEAD, SHARE_AHEAD = 64, 1 / 16
"""Tokens beyond its text for which an opened request must have cells: at most, and as a share of all cells. With more,
requests wait that there is room for; with fewer, they are preempted soon."""

RANK = attrgetter("rank")


def ahead_of(n_tokens: int) -> int:
    """Tokens beyond its text for which a request must have room, where there is room for `n_tokens` in all."""
    return min(AHEAD, int(n_tokens * SHARE_AHEAD))


class Prefixes:
    """Of open requests and of finished ones that are retained. Where sequences of the `target` do not rewind, what is
    retained can only move, as a whole."""

    def __init__(self, target: Level, active: Active) -> None:
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
        oldest = next((id for id, each in self._retained.items() if not but or each is not but.source), None)
        return None if oldest is None else self._retained.pop(oldest)

    def best(self, request: Request) -> Prefix | None:
        """The longest prefix for the request. It moves if all that is retained is used and retained again later."""
        there = [(each, each.n_retained) for each in self._retained.values()]
        there += [(each, self._target.n_settled(each)) for each in self._sources]
        prefixes = [Prefix(each, self._n_usable(each, request, n)) for each, n in there]
        prefixes = [prefix for prefix in prefixes if self._pool.can_retain(prefix.source.id, prefix.n_tokens)]
        best = max(prefixes, key=lambda prefix: prefix.n_tokens, default=None)
        if best is None or not best.n_tokens:
            return None
        is_whole = best.source.id in self._retained and best.n_tokens == best.source.n_retained
        return best._replace(moves=is_whole and (request.keep or not self._pool.rewinds))

    def n_cached(self, request: Request) -> int:
        """How many tokens the request need not evaluate, if it waits until open ones have."""
        best = self.best(request)
        return (best.n_tokens if best else 0) + self.n_saved(request)

    def n_saved(self, request: Request) -> int:
        """How many tokens more the request need not evaluate if it waits until an open one has."""
        reading = (each for each in self._sources if not each.n_generated)
        n_most = max((self._n_to_come(each, request) for each in reading), default=0)
        best = self.best(request) if n_most else None
        return max(0, n_most - (best.n_tokens if best else 0))

    def is_awaited(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether one of the others starts with the request's whole prompt, possible only until its root is sent."""
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
        if request.is_scored or source.adapters != request.adapters:
            return 0
        n = min(common(source.tokens, request.tokens), n_there, len(request.tokens) - 1)
        return n_alike(source.spans or (), request.spans or (), n) if self._target.blocks else n


class OpenLimits(NamedTuple):
    """`ahead`: tokens beyond its text for which an opened request must have cells; None: by the cells of the target."""

    n_open: int = 1 << 30  # open requests
    n_prompts: int = 1 << 30  # of these, requests that read their prompts in blocks
    ahead: int | None = None


UNLIMITED = OpenLimits()


class Admission:
    """`levels`: the target first. `waiting`: in the order in which they are opened. `stored`: None where none is."""

    def __init__(
        self,
        levels: Sequence[Level],
        speculator: Speculator,
        active: Active,
        run_cost: RunCost | None,
        limits: OpenLimits,
    ) -> None:
        self.levels, self.speculator, self.active, self.run_cost = levels, speculator, active, run_cost
        self.target, (self.n_open, self.n_prompts, ahead) = levels[0], limits
        self.ahead = ahead_of(self.target.pool.n_cells) if ahead is None else ahead
        self.prefixes = Prefixes(self.target, active)
        self.stored: StoredBlocks | None = None
        self.waiting: list[ActiveRequest] = []
        self._n_arrived = 0

    def store(
        self, keys: Collection[BlockKey], room: Room, on_full: Callable[[int], object], read_only: bool = False
    ) -> None:
        """Let the stages keep cells of texts. `keys`: of blocks that all have. The rest: see StoredBlocks."""
        prefixes = self.prefixes.n_cached, self.retain, self.forget_oldest
        self.stored = StoredBlocks(self.levels, self.speculator, keys, *prefixes, room, on_full, read_only)

    # -- who waits

    def wait(self, active: ActiveRequest) -> None:
        """Queue a request by priority, then arrival; a preempted one keeps its place."""
        if not active.arrival:
            self._n_arrived += 1
            active.arrival = self._n_arrived
        insort(self.waiting, active, key=RANK)
        if self.stored:
            self.stored.request(active.request)

    def sent(self, flight: InFlightRun) -> None:
        """Called after a run was sent to the target."""
        if self.stored:
            self.stored.sent(flight)

    def closes(self, request: Request) -> None:
        """Called before the levels close an open request."""
        if self.stored:
            self.stored.end(request)

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
        share what another one is about to evaluate, or what stages are reading, are passed over, and so are those that
        would be scored beside another one."""
        for active in list(self.waiting):
            if len(self.active) >= self.n_open:
                break
            if self.stored and self.stored.is_awaited(active.request):
                continue
            if (n_rows := self.prefixes.n_saved(active.request)) and self._is_worth_waiting(n_rows):
                continue
            if self._is_scoring_beside(active.request):
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

    def _is_scoring_beside(self, request: Request) -> bool:
        """Whether this is a prompt to be scored in blocks, and another one is being read: the last stage would hold the
        logits of a block for each, and one keeps all stages busy."""
        if not (request.is_scored and self.target.blocks and request.spans):
            return False
        return any(other.is_scored and self.target.reads_blocks(other) for other in self._open)

    # -- room

    @property
    def _open(self) -> list[Request]:
        return [active.request for active in self.active.values()]

    def retain(self, request: Request) -> None:
        """A finished request's first `n_retained` tokens stay. With drafts half of the sequences is left for trees."""
        self.prefixes.retain(request)
        while self.speculator.n_drafts and len(self.prefixes.retained()) > max(1, self.target.pool.n_seq // 2):
            self.forget_oldest()

    def forget_oldest(self, but: Prefix | None = None) -> bool:
        """Free what the oldest finished request but the source of `but` has retained; False if there is none."""
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
