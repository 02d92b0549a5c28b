"""A deterministic toy target with a strict model of llama.cpp's KV rules, toy drafts, and a pipeline of random timing.

A row's result depends on the whole path it sees, layer by layer, so any wrong cell, order or copy changes the text.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.stages.runs import LocalPrunings
from pipeinfer.cluster.stages.stage import DraftWorker, StageWorker, room_for
from pipeinfer.cluster.verdicts import decode_guess_verdict, decode_verdict, encode_verdict
from pipeinfer.cluster.wire import WireType, encode
from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.policy import NOTHING, Answer, Policy, PolicyView, Send
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, KvOp, OpKind, Run
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.tree import Node
from pipeinfer.core.types import FloatArray

N_VOCAB = 24
N_EMBD = 4
N_LAYERS = 4
MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of a few integers, order included (splitmix64's finisher)."""
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = (h ^ value) * 0xBF58476D1CE4E5B9 & MASK
        h = (h ^ h >> 27) * 0x94D049BB133111EB & MASK
        h ^= h >> 31
    return h


def mix_tokens(h: int) -> npt.NDArray[np.uint64]:
    """`mix(h, token)` of every token."""
    found = (np.uint64(mix(h)) ^ np.arange(N_VOCAB, dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ found >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return found ^ found >> np.uint64(31)


def toy_logits(h: int) -> FloatArray:
    return ((mix_tokens(h) & np.uint64(0xFFFF)) / 8192.0).astype(np.float32)


def pack(h: int) -> list[float]:
    return [float(h >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def toy_features(h: int) -> list[float]:
    """What bf16 holds."""
    return [float(h >> shift & 0xFF) for shift in (0, 8, 16, 24)]


def unpack(row: FloatArray) -> int:
    return sum(int(value) << shift for value, shift in zip(row, (0, 16, 32, 48), strict=True))


class ToyStage:
    """StageModel of layers [first, last) of the toy. `n_cells` and the sequence rules are enforced as libllama does."""

    def __init__(
        self,
        first: int,
        last: int,
        is_last: bool,
        n_cells: int = 10_000,
        parked: bool = False,
        read: Sequence[int] = (),
    ) -> None:
        """`read`: layers whose outputs a draft reads, as `toy_features`."""
        self.read, self.n_features, self.features = read, len(read), np.empty((len(read), 0, N_EMBD), np.float32)
        self.first, self.last, self.is_last = first, last, is_last
        self.n_embd, self.n_cells, self.parked, self.has_states = N_EMBD, n_cells, parked, False
        self.seqs: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}  # seq -> position -> (cell id, layer values)
        self.holders = Counter[int]()  # of each cell, how many sequences
        self.next_cell, self.n_parked, self.n_shared = 0, 0, 0

    def cells(self) -> set[int]:
        return set(self.holders)

    def _give_up(self, path: dict[int, tuple[int, tuple[int, ...]]], position: int) -> None:
        cell, _ = path.pop(position)
        self.holders[cell] -= 1
        if not self.holders[cell]:
            del self.holders[cell]

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            before = len(self.holders)
            if op.kind is OpKind.COMPACT:
                n_apart = sum(map(len, self.seqs.values())) - self.n_shared
                assert n_apart == before, f"{n_apart} cells to be packed, of which there are {before}"
                self.n_parked = self.n_shared = 0
                continue
            path = self.seqs.setdefault(op.src, {})
            # positions ascend; those of a whole path are known without a look at each
            found = range(op.first, min(op.last, len(path))) if _last(path) + 1 == len(path) else path
            span = {position: path[position] for position in found if op.first <= position < op.last}
            if op.kind is OpKind.SHARED:
                shorter = (len(path), op.src) < (len(self.seqs[op.dst]), op.dst)
                assert span.items() <= self.seqs[op.dst].items() and shorter, f"{op}: these are others"
                self.n_shared += len(span)
            elif op.kind is OpKind.COPY:
                target = self.seqs.setdefault(op.dst, {})
                assert not target, f"copy into sequence {op.dst}, which is not empty"
                target.update(span)
                self.holders.update(cell for cell, _ in span.values())
            else:
                assert op.kind is OpKind.REMOVE
                for position in span:
                    self._give_up(path, position)
                self.n_parked += before - len(self.holders) if self.parked else 0

    def next_position(self, seq: int) -> int:
        return _last(self.seqs.get(seq, {})) + 1

    def save_cells(self, seq: int, first: int, end: int) -> npt.NDArray[np.uint8]:
        values = [self.seqs[seq][position][1] for position in range(first, end)]
        return np.frombuffer(bytearray(pickle.dumps((first, values))), np.uint8)

    def load_cells(self, seq: int, cells: npt.NDArray[np.uint8]) -> None:
        path, (first, values) = self.seqs.setdefault(seq, {}), pickle.loads(cells.tobytes())
        assert len(path) == first == _last(path) + 1, f"cells at {first} follow those at {_last(path)}"
        assert len(self.holders) + self.n_parked + len(values) <= self.n_cells, "no KV slot"
        for position, value in enumerate(values, first):
            path[position] = self.next_cell, value
            self.holders[self.next_cell] += 1
            self.next_cell += 1

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        n_rows = len(batch.tokens)
        check_blocks(batch)
        assert len(self.holders) + self.n_parked + n_rows <= self.n_cells, "no KV slot"
        added: list[tuple[int, int]] = []
        hidden, features = [], []
        for index in range(n_rows):
            position, owners = int(batch.positions[index]), batch.seqs[index]
            assert len(set(owners)) == len(owners)
            seen = self.seqs.setdefault(owners[0], {})
            assert len(seen) == position == _last(seen) + 1, f"row at {position} sees {sorted(seen)}"
            for owner in owners[1:]:
                assert self.seqs.setdefault(owner, {}) == seen, "coupled sequences differ"
            h = int(batch.tokens[index]) if batch.hidden is None else unpack(batch.hidden[index])
            values, read = [], []
            for layer in range(self.first, self.last):
                before = seen[position - 1][1][layer - self.first] if position else 0
                values.append(mix(h, before, layer))
                h = mix(h, values[-1])
                read += [toy_features(h)] if layer in self.read else []
            features.append(read)
            cell = (self.next_cell, tuple(values))
            self.next_cell += 1
            for owner in owners:
                self.seqs[owner][position] = cell
                self.holders[cell[0]] += 1
                added.append((owner, position))
            hidden.append(h)
        for _ in range(self.first, self.last):
            if stop():
                for owner, position in added:
                    self._give_up(self.seqs[owner], position)
                return None
        if self.read:
            self.features = np.array(features, np.float32).swapaxes(0, 1)
        if self.is_last:
            return np.array([toy_logits(h) for h, wanted in zip(hidden, batch.wanted, strict=True) if wanted]).reshape(
                -1, N_VOCAB
            )
        return np.array([pack(h) for h in hidden], np.float32)


def _last(path: dict[int, Any]) -> int:
    """The last position of a sequence, whose positions ascend; -1 if it is empty."""
    return next(reversed(path), -1)


def check_blocks(batch: Batch) -> None:
    """A prompt in blocks has whole blocks, in one sequence; none is wanted, or all are where it is scored."""
    if batch.span:
        ends = {int(batch.positions[0]), int(batch.positions[-1]) + 1}
        assert ends <= set(batch.span.edges), f"{batch.positions} cut blocks"
        assert len(set(batch.seqs)) == 1 and batch.wanted.any() == batch.wanted.all()


class Reference:
    """The toy target by itself, without sequences, slices or runs."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.known: dict[tuple[int, ...], tuple[int, list[int]]] = {(): (0, [0] * n_layers)}

    def hash_after(self, path: tuple[int, ...]) -> int:
        todo = []
        while path not in self.known:
            todo.append(path)
            path = path[:-1]
        for path in reversed(todo):
            below = self.known[path[:-1]][1]
            h, values = path[-1], []
            for layer in range(self.n_layers):
                values.append(mix(h, below[layer], layer))
                h = mix(h, values[-1])
            self.known[path] = (h, values)
        return self.known[path][0] if path in self.known else 0

    def next_token(self, path: Sequence[int], params: SamplingParams) -> int:
        history = path[max(0, len(path) - params.looks_back) :] if params.looks_back else ()
        return choose(toy_logits(self.hash_after(tuple(path))), params, len(path), history)

    def generate(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[int]:
        tokens = list(prompt)
        for _ in range(n):
            tokens.append(self.next_token(tokens, params))
        return tokens[len(prompt) :]


def path_to(request: Request, node: Node) -> list[int]:
    """All tokens from the prompt's first to the node's."""
    below = []
    step: Node | None = node
    while step is not None and step is not request.tree.root:
        below.append(step.token)
        step = step.parent
    return request.tokens + below[::-1]


class OracleDrafter:
    """Knows the target, and is right with the given probability, by a hash of the path."""

    can_open = True

    def open(self, request: Request) -> None:
        pass

    def __init__(self, reference: Reference, acceptance: float, seed: int = 0) -> None:
        self.reference, self.acceptance, self.seed = reference, acceptance, seed

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        paths = {node: path_to(request, node) for node in widths}
        return None if interrupted() else {node: self._guess(request, paths[node], widths[node]) for node in widths}

    def _guess(self, request: Request, path: list[int], width: int) -> list[Guess]:
        h = mix(self.seed, self.reference.hash_after(tuple(path)))
        right = self.reference.next_token(path, request.sampling)
        others = [token for token in np.argsort(mix_tokens(h)).tolist() if token != right]
        tokens = others[:width]
        if h % 1000 < 1000 * self.acceptance:
            tokens = [right, *others[: width - 1]]
        elif h % 7 == 0:
            tokens = [*others[: width - 1], right]
        return [Guess(token, 0.6 * 0.5**rank) for rank, token in enumerate(tokens[:width])]

    def settle(self, request: Request, path: Sequence[Node]) -> None:
        pass

    def close(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


class NoisyStage(ToyStage):
    """A slice of a toy model whose logits are the target's but for some positions: a draft of middling acceptance."""

    def __init__(self, first: int, last: int, right: float, n_cells: int) -> None:
        super().__init__(first, last, last == N_LAYERS, n_cells)
        self.right = right

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        logits = super().evaluate(batch, stop)
        if logits is not None and self.is_last:
            for row in logits:
                if mix(*row.astype(np.int64).tolist()) % 1000 >= 1000 * self.right:
                    row[:] = row[::-1].copy()
        return logits


class LatePrunings:
    """What one stage hears of the head's prunings: late, by a coin."""

    def __init__(self, rng: random.Random, late: float) -> None:
        self.rng, self.late = rng, late
        self.known, self.undelivered = LocalPrunings(), LocalPrunings()

    def is_cancelled(self, run_id: int) -> bool:
        if self.rng.random() >= self.late:
            self.known.cancel(self.undelivered.cancelled)
            self.known.prune(self.undelivered.pruned)
            self.undelivered = LocalPrunings()
        return self.known.is_cancelled(run_id)

    def rows(self, run_id: int) -> Sequence[int]:
        return self.known.rows(run_id)


class ToyPipeline:
    """Stages joined by queues; at every look a random number of them take a step. Prunings arrive late."""

    def __init__(
        self, models: Sequence[StageModel], rng: random.Random, late: float = 0.5, wire_type: WireType = WireType.F32
    ) -> None:
        self.wire_type = wire_type
        self.n_stages, self.rng, self.n_embd, self.is_at_head = len(models), rng, models[0].n_embd, False
        self.prunings = [LatePrunings(rng, late) for _ in models]
        self.workers = [self._worker(index, model) for index, model in enumerate(models)]
        self.queues: list[deque[np.ndarray]] = [deque() for _ in range(self.n_stages + 1)]
        self.n_messages = 0

    def _worker(self, index: int, model: StageModel) -> StageWorker:
        return StageWorker(model, lambda: 0.0, is_first=index == 0)

    def decode(self, message: np.ndarray) -> Any:
        return decode_verdict(message)

    def submit(self, run: Run) -> None:
        self.queues[0].append(encode(run))

    def poll(self) -> Any:
        for _ in range(self.rng.randrange(3)):
            self.advance()
        return self.decode(self.queues[-1].popleft()) if self.queues[-1] else None

    def advance(self) -> None:
        ready = [index for index in range(self.n_stages) if self.queues[index]]
        if not ready:
            return
        index = self.rng.choice(ready)
        message = self.queues[index].popleft()
        transaction = room_for(message, self.n_embd, self.wire_type, self.workers[index].n_features)
        verdict = self.workers[index].process(transaction, self.prunings[index])
        self.n_messages += 1
        if index + 1 == self.n_stages:
            assert verdict
            self.queues[-1].append(encode_verdict(verdict))
        else:
            self.queues[index + 1].append(transaction.message.copy())

    def cancel(self, run_ids: Sequence[int]) -> None:
        for pruning in self.prunings:
            pruning.undelivered.cancel(run_ids)

    def prune(self, rows: Mapping[int, Sequence[int]]) -> None:
        for pruning in self.prunings:
            pruning.undelivered.prune(rows)


class ToyDraftPipeline(ToyPipeline):
    """A larger draft by itself, over one or several stages."""

    def _worker(self, index: int, model: StageModel) -> StageWorker:
        return DraftWorker(model, lambda: 0.0, is_first=index == 0, couple=True)

    def decode(self, message: np.ndarray) -> Any:
        return decode_guess_verdict(message)


class ToyWaiter:
    """Lets pipelines take steps until one has a verdict; fails where the engine would wait for ever."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def wait(self, pipelines: Sequence[ToyPipeline], timeout_s: float | None = None) -> None:
        flying = [pipeline for pipeline in pipelines if any(pipeline.queues)]
        assert flying, "the engine waits, but nothing is in flight"
        while not any(pipeline.queues[-1] for pipeline in flying):
            self.rng.choice(flying).advance()


class RandomPolicy(Policy):
    """Sends and expands whatever a coin says: any tree shape, any order that keeps parents first."""

    def __init__(self, rng: random.Random, width: int, n_nodes: int, inflight: int) -> None:
        self.rng, self.width, self.n_nodes, self.inflight = rng, width, n_nodes, inflight

    def send(self, view: PolicyView) -> Answer:
        if view.tree.root.run_id is None and (self.rng.random() < 0.7 or not view.n_inflight):
            return Send([view.tree.root, *self._some(view, {view.tree.root})])
        return Send(self._some(view, set())) if view.n_inflight < self.inflight else NOTHING

    def _some(self, view: PolicyView, taken: set[Node]) -> list[Node]:
        chosen: list[Node] = []
        for node in view.tree.unsent():
            parent = node.parent
            if parent is None or not view.in_reach([node]) or self.rng.random() < 0.4:
                continue
            if parent.run_id is not None or parent in taken:
                chosen.append(node)
                taken.add(node)
        return chosen

    name = "random"

    def draft(self, view: PolicyView) -> dict[Node, int]:
        open_nodes = [node for node in view.tree.nodes if not node.expanded and view.may_branch(node)]
        if not open_nodes or len(view.tree.nodes) >= self.n_nodes or self.rng.random() < 0.2:
            return {}
        return self._widths(self.rng.sample(open_nodes, self.rng.randint(1, min(3, len(open_nodes)))))

    def _widths(self, nodes: Sequence[Node]) -> dict[Node, int]:
        return {node: self.rng.randint(1, self.width) for node in nodes}

    def look_up(self, view: PolicyView) -> list[Node]:
        nodes = [node for node in view.tree.nodes if not node.looked_up and view.may_branch(node)]
        return nodes if len(view.tree.nodes) < self.n_nodes and self.rng.random() < 0.7 else []

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        return [guess for guess in guesses if self.rng.random() < 0.9]

    def refine(self, view: PolicyView, draft: int) -> dict[Node, int]:
        nodes = [node for node in view.tree.nodes if node.is_open(draft) and self.rng.random() < 0.5]
        return self._widths(self.rng.sample(nodes, len(nodes)))
