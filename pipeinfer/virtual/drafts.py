"""Drafts in virtual time: guesses from recorded or synthetic choices, durations from a profile."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeinfer.core.drafting import to_the_end
from pipeinfer.core.levels import InFlightRun, Level
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, GuessVerdict
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, State, with_ancestors
from pipeinfer.virtual.choices import Choices
from pipeinfer.virtual.costs import Profile
from pipeinfer.virtual.pipeline import SimPipeline, soonest_s

N_CHUNK = 32  # committed tokens in a run of a larger draft


@dataclass(slots=True)
class _Cache:
    """The draft's cache of one request: `end` committed tokens, and nodes."""

    end: int = 0
    nodes: set[Node] = field(default_factory=set)


class SimDrafter:
    """A Drafter with guesses of `choices`, by request id, and a profile's times. Verdicts of `pipelines` stop it."""

    def __init__(
        self, profile: Profile, choices: Sequence[Choices], pipelines: Sequence[SimPipeline], n_batch: int = 32
    ) -> None:
        assert profile.drafts, f"{profile.name} has no draft"
        self.cost, self.choices, self.pipelines, self.n_batch = profile.drafts[0], choices, pipelines, n_batch
        self.pipeline = pipelines[0]
        self.clock, self.settle_s = self.pipeline.clock, profile.head.draft_s
        self.timeout_s: Callable[[], float | None] = lambda: None  # the engine's: time until it will send something
        self.n_rows = 0
        self._n_rows_before = 0
        self._caches: dict[int, _Cache] = {}

    can_open = True

    def open(self, request: Request) -> None:
        cache, prefix = _Cache(), request.prefix_hit
        if prefix:
            cache.end = min(self._caches[prefix.source.id].end, prefix.n_tokens)
        if prefix and prefix.moves:
            del self._caches[prefix.source.id]
        self._caches[request.id] = cache

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        cache, choices = self._caches[request.id], self.choices[request.id]
        if not self._catch_up(request, cache, interrupted):
            return None
        fitting = with_ancestors(list(widths), cache.nodes)[: self.n_batch]
        if not self._compute(len(fitting), fitting[0].position, interrupted):
            return None
        cache.nodes.update(fitting)
        self.clock.advance(self.settle_s)
        placed, root = {node: n for node, n in widths.items() if node in cache.nodes}, request.tree.root
        return {node: guesses_after(node, root, choices, width) for node, width in placed.items()}

    def _catch_up(self, request: Request, cache: _Cache, interrupted: Callable[[], bool]) -> bool:
        """Evaluate the committed tokens that the draft lacks. False if the root moves meanwhile."""
        root = request.tree.root
        while root not in cache.nodes and cache.end < root.position:
            n_rows = min(self.n_batch, root.position - cache.end)
            self._compute(n_rows, cache.end, to_the_end(interrupted))
            cache.end += n_rows
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _compute(self, n_rows: int, context: int, interrupted: Callable[[], bool]) -> bool:
        """Let the time of an evaluation pass; the engine may act between layers. False if interrupted."""
        self.n_rows += n_rows
        cost, clock = self.cost, self.clock
        self.pipeline.drafting = True
        slowdown = self.pipeline.slowdown_at(n_rows)
        layer_s = slowdown * cost.layer_s(n_rows, context)
        reshapes, self._n_rows_before = n_rows != self._n_rows_before, n_rows
        begin_s = clock.now + slowdown * cost.before_layers_s(reshapes)
        end_s = clock.now + slowdown * cost.seconds(n_rows, context, reshapes)
        while (next_s := self._next_s(end_s)) < end_s:
            n_layers = max(1, math.ceil((next_s - begin_s) / layer_s)) if layer_s else cost.layers
            clock.now = max(clock.now, min(begin_s + n_layers * layer_s, end_s))
            stop_s = clock.now
            if interrupted():
                self.pipeline.drafting = False
                return False
            # the draft stood still while the head settled and sent runs
            begin_s, end_s = begin_s + clock.now - stop_s, end_s + clock.now - stop_s
        clock.now = end_s
        self.pipeline.drafting = False
        return True

    def _next_s(self, end_s: float) -> float:
        timeout_s = self.timeout_s()
        if timeout_s is not None:
            end_s = min(end_s, self.clock.now + timeout_s)
        return max(soonest_s(self.pipelines, end_s), min(end_s, self.clock.now))

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        cache = self._caches[request.id]
        for node in path:
            if node in cache.nodes:
                cache.end = node.position + (node.state is State.RETIRED)
        cache.nodes = {node for node in cache.nodes if node.live}

    def close(self, request: Request) -> None:
        cache = self._caches[request.id]
        cache.end, cache.nodes = min(cache.end, request.n_retained), set()
        if not request.n_retained:
            self.forget(request)

    def forget(self, request: Request) -> None:
        del self._caches[request.id]


class SimDraftLevel(Level):
    """A larger draft with the guesses of `choices`, by request id, and the times of its pipeline."""

    def __init__(self, pipeline: SimPipeline, choices: Sequence[Choices], pool: SequencePool, n_rows: int) -> None:
        super().__init__(pipeline, pool, n_chunk=N_CHUNK, n_rows=n_rows)
        self.sim_pipeline, self.choices = pipeline, choices

    def poll(self) -> tuple[InFlightRun, GuessVerdict] | None:
        landed = super().poll()
        if landed is None:
            return None
        flight, verdict = landed
        return flight, GuessVerdict(verdict.run_id, tuple(self._guesses(flight)), verdict.cancelled, verdict.slowest_s)

    def _guesses(self, flight: InFlightRun) -> Iterator[list[Guess]]:
        for part in flight.parts:
            yield from ([] for _ in range(part.n_context))
            choices, root = self.choices[part.request.id], part.request.tree.root
            for node in part.nodes:
                yield guesses_after(node, root, choices, part.n_wanted(node)) if node.live else []


def guesses_after(node: Node, root: Node, choices: Choices, width: int) -> list[Guess]:
    start, branch = branch_of(node, choices)
    return choices.guesses(start, branch, width, node.position - root.position)


def branch_of(node: Node, choices: Choices) -> tuple[int, tuple[int, ...]]:
    """(position of the last right token on the node's path, the wrong tokens after it)."""
    path: list[Node] = []
    step: Node | None = node
    while step is not None and step.parent is not None:
        path.append(step)
        step = step.parent
    for depth in range(len(path) - 1, -1, -1):
        if path[depth].token != choices.target(path[depth].position):
            return path[depth].position - 1, tuple(below.token for below in path[depth::-1])
    return node.position, ()
