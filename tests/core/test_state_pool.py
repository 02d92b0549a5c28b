"""Sequences of a model whose layers keep states: a stage has one state for each, behind its newest row, and goes back
to none. Whatever trees grow, a row finds the state of the row before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node
from pipeinfer.job.options.options import Speculation
from pipeinfer.policies import Speculative
from tests.support.audit import audit_pool
from tests.support.cases import cases

N_TOKENS, N_CELLS, N_PREDICT = 5, 400, 30


class States:
    """Of each of `n` sequences the tokens that its state is of."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.paths: dict[int, list[int]] = {}

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            path = self.paths.get(op.src, [])
            assert 0 <= op.src < self.n and 0 <= op.dst < self.n, f"{op}: there are {self.n} states"
            if op.kind is OpKind.COPY:
                assert op.last == len(path) and not self.paths.get(op.dst), f"{op}: {path}, {self.paths.get(op.dst)}"
                self.paths[op.dst] = list(path)
            elif op.kind is OpKind.REMOVE:
                assert op.first == 0, f"{op}: {path}"
                self.paths[op.src] = []
            else:
                assert op.kind is OpKind.COMPACT

    def evaluate(self, text: Sequence[int], seqs: Sequence[int]) -> None:
        """The last token of the text, in the first of `seqs`, whose state the others get."""
        before = self.paths.get(seqs[0], [])
        assert before == list(text[:-1]), f"of {text} sequence {seqs[0]} has {before}"
        for seq in seqs:
            self.paths[seq] = list(text)


class Case:
    """Requests that are opened, read, guess, settle and end in any order; a stage follows at once."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        speculation, n_open = Speculation(policy=Speculative()), rng.choice([1, 2, 3, 4, 9])
        n_seq, n_guesses = speculation.n_target_seq(n_open, False), speculation.n_target_guesses(n_open, False)
        self.pool = SequencePool(n_seq, N_CELLS, rng.random() < 0.5, False, n_guesses)
        self.stage, self.n_open, self.n_known = States(n_seq), n_open, 0
        self.open: dict[int, Request] = {}
        self.left: dict[int, Request] = {}
        self.most_guesses = 0

    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            act = self.rng.choices([self.begin, self.send, self.settle, self.end, self.pack], [2, 9, 6, 0.3, 1])[0]
            act()
            audit_pool(self.pool, {id: each.tree.nodes for id, each in self.open.items()})
            self.most_guesses = max(self.most_guesses, len(self.pool._paths) - len(self.pool._texts))

    def begin(self) -> None:
        if len(self.open) == self.n_open:
            return
        if not self.pool.n_free or self.pool.n_free_cells < 100:
            self._give_up(self.left.popitem()[1] if self.left else self.rng.choice([*self.open.values()]))
            return
        self.n_known += 1
        prompt = [self.rng.randrange(N_TOKENS) for _ in range(self.rng.choice([1, 2, 20, 40]))]
        prefix, there = None, [*self.open.values(), *self.left.values()]
        if there and self.rng.random() < 0.7:
            source = self.rng.choice(there)
            n_shared = self.pool.placed_end(source.id)
            prompt = [*source.tokens[:n_shared], *prompt]
            prefix = Prefix(source, n_shared, source.id in self.left and self.rng.random() < 0.5)
            if prefix.moves:
                del self.left[source.id]
        request = Request(self.n_known, prompt, N_PREDICT, SamplingParams(), N_CELLS)
        self.open[request.id] = request
        self.pool.open(request.id, prefix)

    def send(self) -> None:
        if not self.open:
            return
        request, pool, rng = self.rng.choice([*self.open.values()]), self.pool, self.rng
        tree, start = request.tree, pool.placed_end(request.id)
        n_left = tree.root.position - start
        n_context = rng.randint(1, n_left) if n_left else 0
        nodes = [tree.root] if n_context == n_left and rng.random() < 0.5 else []
        if not n_left:
            for node in rng.sample(tree.nodes, min(2, len(tree.nodes))):
                guesses = [Guess(rng.randrange(N_TOKENS), 0.5) for _ in range(rng.randint(1, 3))]
                tree.grow(node, guesses, [-1.0] * len(guesses))
            unsent = [node for node in tree.nodes if not pool.is_placed(node)]
            nodes = pool.fitting(pool.unplaced(rng.sample(unsent, rng.randint(1, len(unsent))) if unsent else []))
        if not n_context + len(nodes) or n_context + len(nodes) > pool.n_free_cells:
            return
        placement = pool.place(request.id, n_context, nodes)
        self.stage.apply(pool.take_pending())
        texts = [request.tokens[:end] for end in range(start + 1, start + n_context + 1)]
        for text, seqs in zip([*texts, *(text_to(request, node) for node in nodes)], placement.seqs, strict=True):
            self.stage.evaluate(text, seqs)

    def settle(self) -> None:
        """Verdicts on some of the nodes that are placed, which may be right of any."""
        for request in list(self.open.values()):
            nodes = [node for node in request.tree.nodes if self.pool.is_placed(node) and node.verdict is None]
            some = nodes[: self.rng.randint(0, len(nodes))]
            request.tree.answer(some, [self.rng.randrange(N_TOKENS) for _ in some])
            settled = request.tree.settle()
            if settled.tokens:
                request.take(settled.tokens)
                self.pool.settle(request.id, settled.path)
            if request.finish:
                self._end(request)

    def end(self) -> None:
        if self.open:
            self._end(self.rng.choice([*self.open.values()]))

    def _end(self, request: Request) -> None:
        if self.rng.random() < 0.5:
            self._give_up(self.open.pop(request.id))
        else:
            self.left[request.id] = self.open.pop(request.id)
            self.pool.retain(request.id, self.pool.placed_end(request.id))

    def _give_up(self, request: Request) -> None:
        self.open.pop(request.id, None)
        self.pool.close(request.id)

    def pack(self) -> None:
        if self.pool.can_compact:
            self.pool.compact()


def text_to(request: Request, node: Node) -> list[int]:
    """All tokens up to the node's."""
    below: list[int] = []
    step: Node | None = node
    while step is not None and step is not request.tree.root:
        below.append(step.token)
        step = step.parent
    return [*request.tokens, *reversed(below)]


@pytest.mark.parametrize("block", cases(1, 4))
def test_a_row_finds_the_state_of_the_row_before_it(block: int) -> None:
    cases = [Case(seed) for seed in range(500 * block, 500 * block + 500)]
    for case in cases:
        case.run(60)
        for request in [*case.open.values(), *case.left.values()]:
            case.pool.close(request.id)
        case.stage.apply(case.pool.take_pending())
        assert case.pool.n_free == case.pool.n_seq and not any(case.stage.paths.values())
    assert max(case.most_guesses for case in cases) == 16, "never as many as there may be"
