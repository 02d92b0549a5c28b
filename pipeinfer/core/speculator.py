"""How trees grow: steps of the smallest draft, answers of larger ones. Sends nothing to the target."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeinfer.core.interfaces import Drafter, FeatureDrafter, InstantDrafter
from pipeinfer.core.levels import Level, RequestSlice
from pipeinfer.core.policy import Active, ActiveRequest
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import LOOKED_UP, Node
from pipeinfer.core.types import Clock, FloatArray, RoundRobin

MAX_INFLIGHT = 2  # runs in flight at a larger draft at most: one is evaluated, the next one is there when it is done
N_TIMED = 9  # steps of the smallest draft whose median is what a step takes: some read tokens first, or are interrupted
OLD_S = 10.0  # time without a step after which those before say nothing: the host may have been busy


class _Step(NamedTuple):
    """A step of the smallest draft: which nodes it expands since when, with how many runs of the target in flight."""

    request: Request
    nodes: Mapping[Node, int]
    n_inflight: int
    start_s: float


class Speculator:
    """Drafts are numbered by size. Draft 0, the `drafter`, proposes children of nodes, one step at a time: a Drafter in
    this process, or a Level where another rank has it. The larger `drafts` refine what smaller ones proposed.
    `version`: the engine's. `grown`: is told which request's tree has changed. `draft_s`: seconds of a step until the
    first one has been timed; 0: unknown."""

    def __init__(
        self,
        drafter: Drafter | Level | None,
        drafts: Sequence[Level],
        clock: Clock,
        active: Active,
        version: Callable[[], int],
        grown: Callable[[ActiveRequest], None],
        draft_s: float = 0.0,
    ) -> None:
        self.drafter = None if isinstance(drafter, Level) else drafter
        self.remote = drafter if isinstance(drafter, Level) else None
        self._reader = drafter if isinstance(drafter, FeatureDrafter) else None  # asking a Protocol takes a while
        self._lookup = drafter if isinstance(drafter, InstantDrafter) else None
        self.drafts, self.n_drafts = tuple(drafts), (drafter is not None) + len(drafts)
        self._levels = [*([(0, self.remote)] if self.remote else []), *enumerate(self.drafts, start=1)]
        self.clock, self._active, self._version, self._grown = clock, active, version, grown
        self._turns = [RoundRobin[ActiveRequest]() for _ in range(1 + len(self.drafts))]  # of each draft
        self._step: _Step | None = None
        self._deferred: list[Callable[[], None]] = []  # what the drafter hears after its step
        self._n_ending = 0  # of these, requests that end
        self._past_prompt = set[int]()  # requests whose prompts the drafter has read; steps before are not timed
        self._steps_s: deque[float] = deque([draft_s] if draft_s else [], maxlen=N_TIMED)
        self._timed_s = clock()

    # -- requests

    @property
    def can_open(self) -> bool:
        return self.drafter is None or self.drafter.can_open

    @property
    def has_heard(self) -> bool:
        """Whether the drafter knows of all requests that have ended: until then it has no more room than before."""
        return not self._n_ending

    def open(self, request: Request) -> None:
        if self.drafter:
            self.drafter.open(request)

    def hold(self, request: Request) -> None:
        """The request has finished without the drafter, which only holds its place until `forget`."""
        if self.drafter:
            self.drafter.open(request)
            self._end(self.drafter.close, request)

    def add(self, active: ActiveRequest) -> None:
        """The request is open: its policy is asked for nodes from now on."""
        if active.policy.drafts:
            for turns in self._turns:
                turns.add(active)
            self.look_up(active)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        """The root moved."""
        if self.drafter:
            self._tell(partial(self.drafter.settle, request, path))

    def read(self, part: RequestSlice, features: FloatArray) -> None:
        """The target has evaluated this part of a run. `features`: (n_rows, n) of the run's rows."""
        if self._reader:
            rows = features[part.first - part.n_context : part.first + len(part.nodes)]
            self._tell(partial(self._reader.read, part.request, part.start, part.nodes, rows))

    def close(self, active: ActiveRequest) -> None:
        for turns in self._turns:
            turns.discard(active)
        self._past_prompt.discard(active.request.id)
        if self.drafter:
            self._end(self.drafter.close, active.request)

    def forget(self, request: Request) -> None:
        if self.drafter:
            self._end(self.drafter.forget, request)

    def _end(self, end: Callable[[Request], None], request: Request) -> None:
        self._n_ending += self._step is not None
        self._tell(partial(end, request))

    def _tell(self, act: Callable[[], None]) -> None:
        """Tell the drafter, after its step if it is in one."""
        self._deferred.append(act)
        self._flush()

    def _flush(self) -> None:
        if self._step is None:
            deferred, self._deferred, self._n_ending = self._deferred, [], 0
            for act in deferred:
                act()

    # -- steps of the smallest draft

    def draft(self, meanwhile: Callable[[], None]) -> bool:
        """A step of the drafter for the request whose turn it is; `meanwhile` is called between its layers."""
        drafter = self.drafter
        return drafter is not None and any(self._draft_for(drafter, each, meanwhile) for each in self._turns[0])

    def _draft_for(self, drafter: Drafter, active: ActiveRequest, meanwhile: Callable[[], None]) -> bool:
        request, nodes = active.request, self._to_draft(active)
        if self._lookup and any(not node.looked_up for node in nodes):  # a run that was sent has made room for them
            self.look_up(active)
            nodes = self._to_draft(active)
        if not nodes:
            return False

        def interrupted() -> bool:
            meanwhile()
            return not any(node.live for node in nodes)

        self._turns[0].rotate(active)
        step = self._step = _Step(request, nodes, active.context.n_inflight, self.clock())
        try:
            guesses = drafter.expand(request, nodes, interrupted)
        finally:
            self._step = None
        end_s, is_open, has_ended = self.clock(), request.id in self._active, self._n_ending > 0
        steps = not is_open or guesses is None or self._take(active, nodes, guesses)
        if steps:
            self._note(active, step, end_s, len(nodes), guesses is None, is_timed=request.id in self._past_prompt)
            if is_open and guesses is not None:
                self._past_prompt.add(request.id)
        self._flush()
        return steps or has_ended

    def _note(
        self, active: ActiveRequest, step: _Step, end_s: float, n_nodes: int, lost: bool, is_timed: bool = True
    ) -> None:
        if is_timed:
            if end_s - self._timed_s > OLD_S:
                self._steps_s.clear()
            self._timed_s = end_s
            self._steps_s.append(end_s - step.start_s)
        active.observer.draft_stepped(step.start_s, end_s, n_nodes, step.n_inflight, lost)

    @property
    def step_s(self) -> float:
        """Seconds of a step of the smallest draft; 0 before the first one."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def at_work(self, request: Request) -> tuple[Collection[Node], float]:
        """The request's nodes that the smallest draft is expanding, and the seconds that its step still takes."""
        if self._step is None or self._step.request is not request:
            return (), 0.0
        return self._step.nodes, max(0.0, self._step.start_s + self.step_s - self.clock())

    def prefer(self, active: ActiveRequest) -> bool:
        """Let the smallest draft step for the request next. Returns whether any draft has something to do for it."""
        steps = active.context.drafting[0] or (self.n_drafts > len(self.drafts) and self._to_draft(active))
        has_work = bool(steps) or any(
            level.n_inflight(active.request) or active.policy.refine(active.context, draft)
            for draft, level in enumerate(self.drafts, start=1)
        )
        if has_work:
            self._turns[0].prefer(active)
        return has_work

    # -- drafts that are asked by runs

    def ask(self) -> bool:
        """Send one run to a draft: tokens that it lacks, else nodes."""
        return bool(self._levels) and any(
            level.n_flights < (MAX_INFLIGHT if draft else 1) and self._ask_about(active, draft, level)
            for draft, level in self._levels
            for active in self._turns[draft]
        )

    def _to_draft(self, active: ActiveRequest) -> Mapping[Node, int]:
        """The answer of the policy's `draft`, which is asked once until the next event."""
        if active.drafts_at != self._version():
            active.to_draft, active.drafts_at = active.policy.draft(active.context), self._version()
        return active.to_draft

    def _ask_about(self, active: ActiveRequest, draft: int, level: Level) -> bool:
        request = active.request
        widths = active.policy.refine(active.context, draft) if draft else self._to_draft(active)
        if not widths and not draft:
            return False  # a larger draft reads on all the same
        n_left = level.n_context_left(request)
        n_context = min(n_left, level.n_chunk, level.pool.n_free_cells)
        nodes = [] if n_left else level.pool.unplaced(list(widths))[: level.n_rows]
        # ancestors of these nodes may be missing here: a larger draft evaluates them anyway, so it answers too
        width = max(widths.values(), default=0) if draft else 0
        row_widths = {node: widths.get(node, width) for node in nodes}
        n_inflight = active.context.n_inflight
        if not level.submit([RequestSlice(request, n_context, nodes, request.tree.root in nodes, widths=row_widths)]):
            return self._pass_over(active, widths, draft, level) if draft else self._take(active, widths, {})
        self._turns[draft].rotate(active)
        if not draft:
            self._step = _Step(request, widths, n_inflight, self.clock())
        return True

    @staticmethod
    def _pass_over(active: ActiveRequest, nodes: Collection[Node], draft: int, level: Level) -> bool:
        """There is no room for the nodes, nor will there be before the root moves, unless a run is in flight."""
        if level.n_inflight(active.request):
            return False
        unplaced = [node for node in nodes if not level.pool.is_placed(node)]
        for node in unplaced:
            node.passed_over = draft
        return bool(unplaced)

    def hear(self) -> bool:
        """Take the next answer into the trees, if one has come."""
        return bool(self._levels) and any(self._hear_from(draft, level) for draft, level in self._levels)

    def _hear_from(self, draft: int, level: Level) -> bool:
        landed = level.poll()
        if landed is None:
            return False
        flight, verdict = landed
        step = None
        if not draft:
            step, self._step = self._step, None
        for part in flight.parts:
            active, guesses = self._active[part.request.id], _answers(part, verdict)
            if step:
                if part.nodes:
                    self._note(active, step, self.clock(), len(part.nodes), verdict.cancelled)
                if any(node in guesses for node in step.nodes):
                    self._take(active, step.nodes, guesses)
            for node in guesses if draft else ():
                if node.refined < draft:
                    chosen = active.policy.keep(node, guesses[node], draft)
                    active.observer.refined()
                    active.observer.grown(len(active.request.tree.refine(node, chosen, _log_probs(chosen), draft)))
                    self._grown(active)
        return True

    # -- guesses

    def look_up(self, active: ActiveRequest) -> None:
        """Grow the request's tree by the guesses that take no time, where its policy wants them."""
        while self._lookup and (nodes := active.policy.look_up(active.context)):
            active.drafts_at = -1
            for node in nodes:
                self._look_up(self._lookup, active, node)
            self._grown(active)

    def _look_up(self, lookup: InstantDrafter, active: ActiveRequest, node: Node) -> None:
        was_expanded = node.expanded
        guess, is_all = lookup.look_up(active.request, node)
        chosen = active.policy.keep(node, [guess], LOOKED_UP) if guess else []
        active.observer.grown(len(active.request.tree.grow(node, chosen, _log_probs(chosen), LOOKED_UP)))
        node.looked_up, node.expanded = True, was_expanded or is_all

    def _take(self, active: ActiveRequest, nodes: Collection[Node], guesses: Mapping[Node, list[Guess]]) -> bool:
        """Add children to nodes of which there are guesses; whether anything changed."""
        for node in nodes:
            if node in guesses and node.live and not node.expanded:
                chosen = active.policy.keep(node, guesses[node])
                active.observer.grown(len(active.request.tree.grow(node, chosen, _log_probs(chosen))))
        if not guesses:  # there was no room, and only verdicts make some
            if active.context.n_inflight:
                return False
            for node in nodes:
                node.expanded = True
        self.look_up(active)
        self._grown(active)
        return True


def _answers(part: RequestSlice, verdict: Any) -> dict[Node, list[Guess]]:
    """The guesses after each live node that was asked about."""
    nodes = [] if verdict.cancelled else enumerate(part.nodes, part.first)
    return {node: list(verdict.guesses[row]) for row, node in nodes if part.n_wanted(node) and node.live}


def _log_probs(guesses: Sequence[Guess]) -> list[float]:
    return [math.log(max(guess.probability, 1e-30)) for guess in guesses]
