"""A draft model in this process, which expands nodes of trees. Knows no policy and no pipeline."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipeinfer.core.drafting import guess_next, to_the_end
from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node
from pipeinfer.core.types import Constraint, ConstraintFailed, FloatArray

Constrain = Callable[[SamplingParams], Constraint] | None
Seqs = list[tuple[int, ...]]


def newest_tokens(request: Request, node: Node, n: int) -> list[int]:
    """The last `n` tokens of the path that ends with `node`."""
    below: list[int] = []
    step: Node | None = node
    while step is not None and step.parent is not None and len(below) < n:
        below.append(step.token)
        step = step.parent
    return [*request.tokens[max(0, len(request.tokens) - n + len(below)) :], *below[::-1]] if n else []


class ModelDrafter:
    """A Drafter on a whole draft model with its own KV cache.

    Committed tokens that the cache lacks (the prompt, or tokens that the draft had not guessed) are evaluated before
    nodes. `couple`: sampled guesses share the target's noise. `constrain`: makes a Constraint of a request's
    parameters; without it constraints are ignored."""

    def __init__(
        self, model: StageModel, pool: SequencePool, n_batch: int, couple: bool = True, constrain: Constrain = None
    ) -> None:
        self.model, self.pool, self.n_batch, self.couple, self.constrain = model, pool, n_batch, couple, constrain
        self._constraints: dict[int, Constraint] = {}  # by request

    @property
    def can_open(self) -> bool:
        return self.pool.n_free > 0

    def open(self, request: Request) -> None:
        self.pool.open(request.id, request.prefix_hit)
        if request.sampling.is_constrained and self.constrain:
            self._constraints[request.id] = self.constrain(request.sampling)

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        # nodes that only a larger draft has expanded are evaluated as context
        nodes = self.pool.fitting(self.pool.unplaced(list(widths))[: self.n_batch])
        if not nodes:
            return {}
        placement = self.pool.place(request.id, 0, nodes)
        tokens, positions = [node.token for node in nodes], [node.position for node in nodes]
        logits = self._evaluate(tokens, positions, placement.seqs, True, interrupted)
        if logits is None:
            self.pool.undo(nodes, placement)
            return None
        rows = [(node, row) for node, row in zip(nodes, logits, strict=True) if node in widths]
        return {node: self._guess(request, node, row, widths[node]) for node, row in rows}

    def _guess(self, request: Request, node: Node, logits: FloatArray, width: int) -> list[Guess]:
        params = request.sampling
        history = newest_tokens(request, node, params.looks_back)
        constraint = self._constraints.get(request.id)
        n_output = node.position + 1 - len(request.prompt)
        allowed = constraint.after(newest_tokens(request, node, n_output)) if constraint else None
        try:
            return guess_next(logits, params, node.position + 1, history, width, self.couple, allowed)
        except ConstraintFailed:  # the target will fail too if the text comes here
            return []

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        """Evaluate the committed tokens before the root that are missing; False if the root moves meanwhile. These runs
        are never interrupted: a draft slower than the target would make no progress."""
        root = request.tree.root
        while not self.pool.is_placed(root) and (start := self.pool.placed_end(request.id)) < root.position:
            end = min(root.position, start + self.n_batch, start + self.pool.n_free_cells)
            if end == start:
                return True  # other requests hold the cells, so there is none for nodes either
            placement = self.pool.place(request.id, end - start, [])
            tokens = request.tokens[start:end]
            self._evaluate(tokens, range(start, end), placement.seqs, False, to_the_end(interrupted))
            if request.tree.root is not root or request.finish:
                return False
        return True

    def _evaluate(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Seqs, has_logits: bool, stop: Callable[[], bool]
    ) -> FloatArray | None:
        """Logits (n_rows, n_vocab) if `has_logits`; None when interrupted."""
        self.model.apply(self.pool.take_pending())
        flags = np.full(len(tokens), has_logits)
        batch = Batch(np.array(tokens, np.int32), np.array(positions, np.int32), seqs, None, flags)
        return self.model.evaluate(batch, stop)

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        self.pool.settle(request.id, path)

    def close(self, request: Request) -> None:
        self._constraints.pop(request.id, None)
        if request.n_retained:
            self.pool.retain(request.id, request.n_retained)
        else:
            self.pool.close(request.id)

    def forget(self, request: Request) -> None:
        self.pool.close(request.id)
