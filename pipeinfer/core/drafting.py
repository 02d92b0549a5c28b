"""Expand tree nodes with a draft model. Knows the tree and a StageModel; knows no policy and no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import Allowed, Batch, Constraint, ConstraintFailed, FloatArray, StageModel
from pipeinfer.core.kv.paths import Placement
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams, adjust, largest, perturbed
from pipeinfer.core.tree import Node


def likeliest(logits: FloatArray, width: int) -> list[Guess]:
    """The `width` most likely tokens of one row of logits (n_vocab,), most likely first."""
    ids = largest(logits, width) if width < len(logits) else np.arange(len(logits))
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    weights = np.exp(logits - logits[ids[0]])
    total = float(weights.sum())
    return [Guess(int(token), float(weights[token]) / total) for token in ids]


def coupled(logits: FloatArray, width: int, params: SamplingParams, position: int) -> list[Guess]:
    """The `width` tokens that the target would sample first if its logits (n_vocab,) were these, with its own noise.

    The target keys its noise by (seed, position), so draft and target share it (Gumbel-max coupling): they agree far
    more often than two independent samples. The gap between the perturbed scores says how surely.
    """
    ids, scores = perturbed(logits, params, position)
    weights = np.exp(scores - scores.max())
    order = np.argsort(-scores, kind="stable")[:width]
    return [Guess(int(ids[index]), float(weights[index] / weights.sum())) for index in order]


def guess_next(
    logits: FloatArray, params: SamplingParams, position: int, history: Sequence[int], width: int, couple: bool,
    allowed: Allowed | None = None,
) -> list[Guess]:  # fmt: skip
    """A draft's guesses for the token at `position`, from its logits (n_vocab,) and the newest tokens before it, as the
    target chooses.

    The logits are changed in place.
    """
    adjust(logits, params, history)
    guesses = _guesses(logits, params, position, width, couple)
    if allowed is None:
        return guesses
    if allowed.has(guesses[0].token):
        return guesses[:1] + [guess for guess in guesses[1:] if allowed.has(guess.token)]
    allowed.restrict(logits)
    return [guess for guess in _guesses(logits, params, position, width, couple) if guess.probability > 0]


def _guesses(logits: FloatArray, params: SamplingParams, position: int, width: int, couple: bool) -> list[Guess]:
    if params.temp > 0 and couple:
        return coupled(logits, width, params, position)
    return likeliest(logits, width)


def to_the_end(interrupted: Callable[[], bool]) -> Callable[[], bool]:
    """Asks as often, so that what comes meanwhile is heard, and goes on whatever the answer is."""
    return lambda: interrupted() and False


def newest_tokens(request: Request, node: Node, n: int) -> list[int]:
    """The last `n` tokens of the path that ends with `node`."""
    below: list[int] = []
    step: Node | None = node
    while step is not None and step.parent is not None and len(below) < n:
        below.append(step.token)
        step = step.parent
    return [*request.tokens[max(0, len(request.tokens) - n + len(below)) :], *below[::-1]] if n else []


class ModelDrafter:
    """A Drafter on a whole draft model with a KV cache of its own.

    The draft's cache lags behind the output: before a root is expanded, the committed tokens that it lacks (the prompt,
    or tokens it had not guessed) are evaluated as context. `couple`: sampled guesses share the target's noise.
    `constrain`: makes a Constraint of a request's grammar; without it guesses are made as if there was none.
    """

    def __init__(
        self,
        model: StageModel,
        pool: SequencePool,
        n_batch: int,
        n_vocab: int,
        couple: bool = True,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self.constrain = constrain
        self._constraints: dict[int, Constraint] = {}  # by request
        self.model, self.pool, self.n_batch, self.n_vocab, self.couple = model, pool, n_batch, n_vocab, couple

    @property
    def can_open(self) -> bool:
        return self.pool.n_free > 0

    def open(self, request: Request) -> None:
        self.pool.open(request.id, request.prefix_hit)
        if request.sampling.grammar and self.constrain:
            self._constraints[request.id] = self.constrain(request.sampling.grammar)

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        if not self._catch_up(request, interrupted):
            return None
        # among them may be nodes that only a larger draft has expanded, and that are now context here
        fitting = self.pool.fitting(self.pool.unplaced(list(widths))[: self.n_batch])
        placement = self.pool.place(request.id, 0, fitting)
        logits = self._evaluate(placement, [node.token for node in fitting], interrupted)
        if logits is None:
            return None
        return {
            node: self._guess(request, node, row, widths[node])
            for node, row in zip(fitting, logits, strict=True)
            if node in widths
        }

    def _guess(self, request: Request, node: Node, logits: FloatArray, width: int) -> list[Guess]:
        params = request.sampling
        history = newest_tokens(request, node, params.looks_back)
        constraint = self._constraints.get(request.id)
        n_output = node.position + 1 - len(request.prompt)
        allowed = constraint.after(newest_tokens(request, node, n_output)) if constraint else None
        try:
            return guess_next(logits, params, node.position + 1, history, width, self.couple, allowed)
        except ConstraintFailed:  # as it will for the target, if the text comes here
            return []

    def _catch_up(self, request: Request, interrupted: Callable[[], bool]) -> bool:
        """Evaluate the committed tokens below the root that the draft lacks; False when the root moved meanwhile.

        What is certain stays so: a run of it is never given up, or a draft slower than the target would not get on.
        """
        root = request.tree.root
        while not self.pool.is_placed(root) and (end := self.pool.placed_end(request.id)) < root.position:
            tokens = request.tokens[end : min(root.position, end + self.n_batch, end + self.pool.n_free_cells)]
            if not tokens:
                return True  # other requests have taken the cells: there is no room for the nodes either
            placement = self.pool.place(request.id, len(tokens), [])
            self._evaluate(placement, tokens, to_the_end(interrupted))
            if request.tree.root is not root or request.finish:
                return False
        return request.tree.root is root  # nodes below a root that has moved meanwhile are not where they were

    def _evaluate(
        self, placement: Placement, tokens: Sequence[int], interrupted: Callable[[], bool]
    ) -> npt.NDArray[np.float32] | None:
        """Logits of the placement's nodes (n_nodes, n_vocab); None, and the placement undone, when interrupted."""
        start = placement.nodes[0].position if placement.nodes else 0
        if placement.n_context:
            start = self.pool.placed_end(placement.request_id) - placement.n_context
        positions = [node.position for node in placement.nodes] or range(start, start + len(tokens))
        seqs = placement.node_seqs or [(placement.context_seq,)] * len(tokens)
        self.model.apply(placement.ops)
        if not tokens:
            return np.empty((0, self.n_vocab), np.float32)
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            seqs=seqs,
            hidden=None,
            wanted=np.full(len(tokens), bool(placement.nodes)),
        )
        logits = self.model.evaluate(batch, interrupted)
        if logits is None:
            self.pool.undo(placement)
        return logits

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
