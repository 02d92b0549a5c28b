"""Ask a larger draft, on a pipeline of its own, what follows the nodes of a tree. Knows runs; no MPI and no policy.

The larger draft is to the smaller one what the target is to both: it evaluates whole paths of guesses in one run, and
what it says of them comes back while the smaller one works on (PipeInfer, section IV-A: several draft models; PipeSpec,
section 3). Its runs are placed, cancelled and settled as the target's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeinfer.interfaces import Guess, Pipeline
from pipeinfer.requests import Request
from pipeinfer.runs import NO_TOKEN, Row, Run, Verdict
from pipeinfer.sequences import SequencePool
from pipeinfer.tree import Node, State

N_AHEAD = 2
"""Questions on their way at most: one is worked on, one is there when it is done."""


@dataclass(slots=True)
class _Question:
    request: Request
    nodes: list[Node]
    n_context: int
    cancelled: bool = False

    @property
    def is_void(self) -> bool:
        """Whether nobody needs the cells or the answer. What was accepted since is context of all that follows."""
        return not self.n_context and all(node.state is State.DEAD for node in self.nodes)


class PipelineRefiner:
    """A Refiner whose draft is behind `pipeline`, with a KV cache that `pool` describes.

    `n_rows`: nodes a question at most. `n_chunk`: prompt rows a run.
    """

    def __init__(self, pipeline: Pipeline, pool: SequencePool, n_rows: int, n_chunk: int) -> None:
        self.pipeline, self.pool, self.n_rows, self.n_chunk = pipeline, pool, n_rows, n_chunk
        self._questions: dict[int, _Question] = {}
        self._refused: list[tuple[Request, Node]] = []
        self._open: set[int] = set()
        self._next_run_id = 1

    @property
    def has_room(self) -> bool:
        return len(self._questions) < N_AHEAD and not self._refused

    @property
    def busy(self) -> bool:
        return bool(self._questions or self._refused)

    # -- asking

    def ask(self, request: Request, nodes: Sequence[Node]) -> bool:
        opens = {} if request.id in self._open else {request.id: request.sampling}
        if opens:
            self.pool.open(request.id)
            self._open.add(request.id)
        start, root = self.pool.placed_end(request.id), request.tree.root
        n_context = 0 if self.pool.is_placed(root) else min(root.position - start, self.n_chunk)
        n_context = min(n_context, self.pool.n_free_cells)
        chosen = [] if n_context else self.pool.fitting(self.pool.unplaced(nodes)[: self.n_rows])
        if not n_context and not chosen:
            # all of them are being answered, or there is no room for any: nobody shall wait for those
            self._refused = [(request, node) for node in nodes if not self.pool.is_placed(node)]
            return bool(self._refused)
        placement = self.pool.place(request.id, n_context, chosen)
        rows = [
            Row(request.id, request.tokens[position], position, (placement.context_seq,), wanted=False)
            for position in range(start, start + n_context)
        ]
        for node, seqs in zip(chosen, placement.node_seqs, strict=True):
            rows.append(Row(request.id, node.token, node.position, seqs))
        run_id, self._next_run_id = self._next_run_id, self._next_run_id + 1
        self._questions[run_id] = _Question(request, chosen, n_context)
        self.pipeline.submit(Run(run_id, rows, placement.ops, opens))
        return True

    # -- answers

    def poll(self) -> list[tuple[Request, Node, list[Guess] | None]] | None:
        if self._refused:
            refused, self._refused = self._refused, []
            return [(request, node, None) for request, node in refused if node.live]
        verdict = self.pipeline.poll()
        if verdict is None:
            return None
        question = self._questions.pop(verdict.run_id)
        if verdict.cancelled or not question.nodes:
            return []
        answers = zip(question.nodes, self.read(question.nodes, verdict), strict=True)
        return [(question.request, node, guesses) for node, guesses in answers if node.live]

    def read(self, nodes: Sequence[Node], verdict: Verdict) -> list[list[Guess]]:
        """Each node's guesses, from what came back."""
        return decode_guesses(verdict.tokens, len(nodes))

    # -- settling

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        if request.id in self._open:
            self.pool.settle(request.id, path)
            self._cancel_void()

    def close(self, request: Request) -> None:
        if request.id in self._open:
            self._open.discard(request.id)
            self.pool.close(request.id)
            self._cancel_void()

    def _cancel_void(self) -> None:
        void = [
            run_id
            for run_id, question in self._questions.items()
            if not question.cancelled and (question.request.id not in self._open or question.is_void)
        ]
        for run_id in void:
            self._questions[run_id].cancelled = True
        if void:
            self.pipeline.cancel(void)

    def audit(self, live: Mapping[int, Sequence[Node]]) -> None:
        self.pool.audit({request_id: nodes for request_id, nodes in live.items() if request_id in self._open})


def encode_guesses(guesses: Sequence[Guess], width: int) -> list[int]:
    """The guesses after one row as 2 `width` words of 32 bits: a token and the bits of its probability each."""
    padded = [*guesses[:width], *[Guess(NO_TOKEN, 0.0)] * (width - len(guesses))]
    bits = np.array([guess.probability for guess in padded], np.float32).view(np.int32).tolist()
    return [word for guess, word in zip(padded, bits, strict=True) for word in (guess.token, word)]


def decode_guesses(words: Sequence[int], n_rows: int) -> list[list[Guess]]:
    """The guesses after each of `n_rows` rows, from their words."""
    pairs = np.array(words, np.int32).reshape(n_rows, -1, 2)
    probabilities = np.ascontiguousarray(pairs[:, :, 1]).view(np.float32)
    return [
        [Guess(token, share) for token, share in zip(tokens, shares, strict=True) if token != NO_TOKEN]
        for tokens, shares in zip(pairs[:, :, 0].tolist(), probabilities.tolist(), strict=True)
    ]
