"""Drafts in virtual time: guesses from recorded or synthetic choices, durations from a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeinfer.choices import MAX_WIDTH, Choices
from pipeinfer.cluster.costs import Profile
from pipeinfer.cluster.simulate import SimPipeline
from pipeinfer.drafting import to_the_end
from pipeinfer.interfaces import Guess
from pipeinfer.refining import PipelineRefiner
from pipeinfer.requests import Request
from pipeinfer.runs import Verdict
from pipeinfer.sequences import SequencePool
from pipeinfer.tree import Node, State, with_ancestors


class SimDrafter:
    """A Drafter that takes its guesses from `choices` and the time a draft model would need from the profile."""

    def __init__(self, profile: Profile, choices: Choices, pipeline: SimPipeline, n_batch: int = 32) -> None:
        assert profile.drafts, f"{profile.name} has no draft"
        self.cost, self.choices, self.pipeline, self.n_batch = profile.drafts[0], choices, pipeline, n_batch
        self.clock, self.settle_s = pipeline.clock, profile.head.draft_s
        self.n_rows = 0
        self._n_rows_before = 0
        self._end = 0  # certain tokens that the draft's cache holds
        self._placed: set[Node] = set()

    def expand(
        self, request: Request, nodes: Sequence[Node], width: int, interrupted: Callable[[], bool]
    ) -> list[list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        fitting = with_ancestors(nodes, self._placed)[: self.n_batch]
        if not self._compute(len(fitting), fitting[0].position, interrupted):
            return None
        self._placed.update(fitting)
        self.clock.advance(self.settle_s)
        return [guesses_after(node, self.choices, width) if node in self._placed else [] for node in nodes]

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        """Evaluate the certain tokens below the root that the draft has not seen; False when the root moved meanwhile.

        As ModelDrafter does it, to the end of each run.
        """
        root = request.tree.root
        while root not in self._placed and self._end < root.position:
            n_rows = min(self.n_batch, root.position - self._end)
            self._compute(n_rows, self._end, to_the_end(interrupted))
            self._end += n_rows
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _compute(self, n_rows: int, context: int, interrupted: Callable[[], bool]) -> bool:
        """Let the time of one evaluation pass; verdicts that come meanwhile are seen between layers."""
        self.n_rows += n_rows
        cost, clock = self.cost, self.clock
        self.pipeline.drafting = True
        slower = self.pipeline.crowding()
        layer_s = slower * cost.layer.at(n_rows, context)
        reshapes, self._n_rows_before = n_rows != self._n_rows_before, n_rows
        begun_s = clock.now + slower * cost.before_layers_s(reshapes)
        end_s = clock.now + slower * cost.seconds(n_rows, context, reshapes)
        while (verdict_s := self.pipeline.until_verdict(end_s)) < end_s:
            n_layers = max(1, math.ceil((verdict_s - begun_s) / layer_s)) if layer_s else cost.layers
            clock.now = max(clock.now, min(begun_s + n_layers * layer_s, end_s))
            asked_s = clock.now
            if interrupted():
                self.pipeline.drafting = False
                return False
            # settling and sending took the head some time, in which the draft stood still
            begun_s, end_s = begun_s + clock.now - asked_s, end_s + clock.now - asked_s
        clock.now = end_s
        self.pipeline.drafting = False
        return True

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        for node in path:
            if node in self._placed:
                self._end = node.position + (node.state is State.RETIRED)
        self._placed = {node for node in self._placed if node.live}

    def close(self, request: Request) -> None:
        self._end = 0
        self._placed.clear()


class SimRefiner(PipelineRefiner):
    """A larger draft whose guesses come from `choices`; its pipeline gives the time."""

    def __init__(self, pipeline: SimPipeline, choices: Choices, pool: SequencePool, n_rows: int, n_chunk: int) -> None:
        super().__init__(pipeline, pool, n_rows, n_chunk)
        self.alone, self.choices = pipeline, choices

    def read(self, nodes: Sequence[Node], verdict: Verdict) -> list[list[Guess]]:
        return [guesses_after(node, self.choices, MAX_WIDTH) if node.live else [] for node in nodes]


def guesses_after(node: Node, choices: Choices, width: int) -> list[Guess]:
    start, branch = fork(node, choices)
    return choices.guesses(start, branch, width)


def fork(node: Node, choices: Choices) -> tuple[int, tuple[int, ...]]:
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
