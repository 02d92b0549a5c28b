"""The engine against a toy target: every policy, split, arrival order and cancellation gives the target's own text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Batch, Drafter
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Emission, Finish, Request
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.samplers import breakers_text
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.types import FloatArray
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import POLICIES, Auto, FlowSpec, Iterative, PipeDec, PipeInfer, PipeSpec, Speculative, Ssd
from tests.support.audit import audit_engine, audit_pool, emitted
from tests.support.cases import cases, in_long
from tests.support.toy import (
    N_LAYERS,
    N_VOCAB,
    NoisyStage,
    OracleDrafter,
    RandomPolicy,
    Reference,
    ToyDraftPipeline,
    ToyPipeline,
    ToyStage,
    ToyWaiter,
    mix,
    pack,
    toy_logits,
    unpack,
)


def toy_pipeline(rng: random.Random, n_stages: int, n_cells: int, parked: bool) -> ToyPipeline:
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), n_stages - 1)), N_LAYERS]
    models = [ToyStage(first, last, last == N_LAYERS, n_cells, parked) for first, last in pairwise(cuts)]
    return ToyPipeline(models, rng, late=rng.choice([0.0, 0.5, 0.95]))


def toy_engine(
    pipeline: ToyPipeline,
    pool: SequencePool,
    drafter: Drafter | Level | None,
    drafts: Sequence[Level] = (),
    **options: Any,
) -> Engine:
    target = Level(pipeline, pool, **options)
    return Engine(target, drafter, ToyWaiter(pipeline.rng), lambda: 0.0, drafts=drafts)


def random_policy(rng: random.Random) -> Policy:
    choices: list[Policy] = [
        Iterative(),
        Speculative(n_draft=rng.randint(1, 8), width=rng.randint(1, 4)),
        PipeInfer(rng.randint(1, 4), rng.randint(0, 9), rng.randint(1, 4), split_cutoff=rng.random() / 2),
        RandomPolicy(rng, rng.randint(1, 4), rng.randint(4, 40), rng.randint(1, 12)),
        RandomPolicy(rng, rng.randint(1, 4), rng.randint(4, 40), rng.randint(1, 12)),
        PipeDec(children=rng.randint(1, 4), layer_width=rng.randint(1, 8), group=rng.randint(1, 3)),
        FlowSpec(
            rng.randint(1, 4),
            rng.randint(1, 40),
            rng.randint(1, 4),
            rng.randint(1, 8),
            rng.randint(0, 3),
            rng.randint(1, 20),
            rng.random() < 0.7,
            rng.random() < 0.7,
        ),
        PipeSpec(rng.choice([0, 1, 5]), rng.random() < 0.2),
        Ssd(rng.randint(1, 8), rng.randint(1, 4), rng.choice(["draft", "none"]), rng.random() < 0.5),
        Auto(),
    ]
    return rng.choice(choices)


def test_random_cases_have_every_policy() -> None:
    assert {type(random_policy(random.Random(seed))) for seed in range(500)} >= set(POLICIES.values())


def random_drafter(rng: random.Random, reference: Reference, n_ctx: int, seed: int) -> Drafter:
    share, is_looked_up = rng.random(), rng.random() < 0.3
    if share < 0.05:
        return LookupDrafter()
    if share < 0.5:
        drafter: Drafter = OracleDrafter(reference, rng.random(), seed)
    else:
        model = NoisyStage(0, N_LAYERS, rng.random(), n_cells=n_ctx + 64)
        drafter = ModelDrafter(model, SequencePool(rng.choice([3, 16]), n_ctx + 64), rng.choice([4, 16]))
    return LookupDrafter(drafter) if is_looked_up else drafter


def run_case(seed: int, n_predict: int = 40) -> int:
    """One random configuration, audited after every step. Returns how many trees (settles) it went through."""
    rng = random.Random(seed)
    reference = Reference(N_LAYERS)
    parked = rng.random() < 0.5
    n_ctx = rng.choice([48, 64, 200])
    n_cells = n_ctx + rng.randint(8, 80)
    n_seq = rng.choice([1, 2, 3, 8, 64])
    pipeline = toy_pipeline(rng, rng.randint(1, N_LAYERS), n_cells, parked)
    pool = SequencePool(n_seq, n_cells, parked)
    drafter = random_drafter(rng, reference, n_ctx, seed)
    target = Level(pipeline, pool, n_chunk=rng.choice([3, 64]), cancel=rng.random() < 0.9, n_rows=rng.choice([3, 32]))
    engine = Engine(target, drafter, ToyWaiter(rng), lambda: 0.0)
    penalty = rng.choice([1.0, 1.0, 1.3])
    params = SamplingParams(seed=seed, temp=rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
    n_trees = 0
    for request_id in range(rng.choice([1, 1, 2])):
        prompt = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 30]))]
        request = Request(request_id, prompt, n_predict, params, n_ctx)
        engine.add(request, random_policy(rng))
        output: list[int] = []
        emissions: list[Emission] = []
        engine.on_tokens = emissions.extend
        while engine.busy:
            engine.step()
            audit_engine(engine)
            output += [token for emission in emissions for token in emission.tokens]
            n_trees += len(emissions)
            emissions.clear()
        n_expected = min(n_predict, n_ctx - len(prompt))
        assert output == reference.generate(prompt, n_expected, params), f"seed {seed}"
        assert request.tokens == [*prompt, *output]
        assert request.finish is (Finish.LENGTH if n_predict <= n_ctx - len(prompt) else Finish.CONTEXT)
    assert not any(pipeline.queues), "a run was forgotten"
    assert pool.n_free == n_seq
    return n_trees


@pytest.mark.parametrize("block", cases(1, 10))
def test_any_tree_split_order_and_cancellation_gives_the_targets_text(block: int) -> None:
    n_trees = sum(run_case(seed) for seed in range(block * 100, block * 100 + 100))
    assert n_trees > 1000


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_samplers_that_look_back_or_toss_a_coin_give_one_text(n_stages: int, temp: float) -> None:
    """DRY, XTC and typical-p, alike under every policy and split, whatever is guessed."""
    repeats = breakers_text([(3,), (5, 7)])
    dry = SamplingParams(4, temp, top_k=0, min_p=0.0, dry_multiplier=2.0, dry_allowed_length=1, dry_breakers=repeats)
    params = replace(dry, xtc_probability=0.5, xtc_threshold=0.02, typical_p=0.9, top_n_sigma=3.0, dynatemp_range=0.3)
    reference, prompt = Reference(N_LAYERS), [1, 2, 1, 2, 3, 1, 2]
    expected = reference.generate(prompt, 60, params)
    plain = replace(params, dry_multiplier=0.0), replace(params, xtc_probability=0.0), replace(params, typical_p=1.0)
    assert all(reference.generate(prompt, 60, without) != expected for without in plain), "one of them has no effect"
    for policy in (Auto(), Iterative(), PipeInfer()):
        rng = random.Random(n_stages)
        pipeline, pool = toy_pipeline(rng, n_stages, 200, False), SequencePool(16, 200)
        model = NoisyStage(0, N_LAYERS, 0.3, n_cells=200)
        drafter = ModelDrafter(model, SequencePool(16, 200), 16)
        engine = Engine(Level(pipeline, pool, n_chunk=16, n_rows=32), drafter, ToyWaiter(rng), lambda: 0.0)
        request = Request(0, prompt, 60, params, 100)
        engine.add(request, policy)
        engine.complete()
        assert request.tokens == [*prompt, *expected], policy


@pytest.mark.parametrize("seed", cases(10, 40))
def test_prompts_in_blocks(seed: int) -> None:
    """Long and short prompts, two at a time, in chunks of any size: the toy stage looks at every block."""
    rng = random.Random(seed)
    reference = Reference(N_LAYERS)
    pipeline = toy_pipeline(rng, rng.randint(1, N_LAYERS), 700, True)
    pool = SequencePool(8, 700, True)
    heard: dict[int, list[int]] = {0: [], 1: []}
    drafter = random_drafter(rng, reference, 300, seed)
    engine = toy_engine(pipeline, pool, drafter, n_chunk=rng.choice([3, 64, 128, 999]), blocks=True)
    lengths = [rng.choice([1, 40, 64, 65, 66, 129, 200, 260]) for _ in heard]
    prompts = [[rng.randrange(N_VOCAB) for _ in range(length)] for length in lengths]
    requests = [Request(i, prompt, 12, SamplingParams(temp=0.0), 300) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request, random_policy(rng), RequestMetrics(on_prompt=heard[request.id].append))
    given_up = requests[1] if rng.random() < 0.3 else None
    for _ in range(10_000):
        if not engine.busy:
            break
        engine.step()
        audit_engine(engine)
        if given_up and rng.random() < 0.1:
            engine.stop(given_up)
    for request, prompt in zip(requests, prompts, strict=True):
        expected = reference.generate(prompt, 12, SamplingParams(temp=0.0))
        assert request.tokens[len(prompt) :] == expected[: request.n_generated]
        if request is not given_up:
            assert request.n_generated == 12
            assert heard[request.id][-1:] == ([len(prompt) - 1] if len(prompt) > 1 else [])
    assert pool.n_free == 8


@pytest.mark.parametrize("n", [600, in_long(2_000)])
@pytest.mark.parametrize("parked", [False, True])
def test_a_long_generation_leaks_nothing(parked: bool, n: int) -> None:
    """So many tokens with few cells to spare: removed cells are won back again and again, and all ends in order."""
    rng, reference, params = random.Random(3), Reference(N_LAYERS), SamplingParams(temp=0.0)
    pipeline = toy_pipeline(rng, 3, n + 100, parked)
    pool = SequencePool(8, n + 100, parked)
    engine = toy_engine(pipeline, pool, OracleDrafter(reference, 0.6))
    request = Request(0, [5], 20_000, params, n + 1)
    engine.add(request, PipeInfer(microbatch=2))
    n_nodes = 0
    for _ in emitted(engine):
        n_nodes = max(n_nodes, len(request.tree.nodes))
    assert request.finish is Finish.CONTEXT and request.n_generated == n
    assert request.tokens[-50:] == reference.generate([5], n, params)[-50:]
    assert pool.n_free == 8 and n_nodes < 100 and not any(pipeline.queues)


@dataclass(slots=True, eq=False)
class _Cell:
    """A KV cell with the path below it, so that a sequence is its tip. `n_held`: tips and cells that need it."""

    position: int
    values: tuple[int, ...]
    below: _Cell | None
    n_held: int = 0


class QuickStage(ToyStage):
    """A toy stage as strict as the others in which no operation takes longer in a longer context. Asks `stop` once."""

    def __init__(self, first: int, last: int, n_cells: int, parked: bool, right: float = 1.0) -> None:
        super().__init__(first, last, last == N_LAYERS, n_cells, parked)
        self.right = right  # share of the contexts with the target's logits, as a draft has them
        self.tips: dict[int, _Cell | None] = {}
        self.n_used = self.n_packed = 0

    def apply(self, ops: Sequence[KvOp]) -> None:
        for op in ops:
            tip = self.tips.get(op.src)
            if op.kind is OpKind.COPY:
                assert self.tips.get(op.dst) is None, f"copy into sequence {op.dst}, which is not empty"
                self._hold(op.dst, self._up_to(tip, op.last))
            elif op.kind is OpKind.SHARED:
                assert self._up_to(self.tips[op.dst], op.last) is self._up_to(tip, op.last), f"{op}: these are others"
            elif op.kind is OpKind.REMOVE:
                self._hold(op.src, self._up_to(tip, op.first))
            else:
                assert op.kind is OpKind.COMPACT
                self.n_parked = 0
                self.n_packed += 1

    def next_position(self, seq: int) -> int:
        tip = self.tips.get(seq)
        return tip.position + 1 if tip else 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        n_rows = len(batch.tokens)
        assert self.n_used + self.n_parked + n_rows <= self.n_cells, "no KV slot"
        before = {seq: self.tips.get(seq) for owners in batch.seqs for seq in owners}
        hidden = [self._row(batch, index) for index in range(n_rows)]
        if stop():
            parked, self.parked = self.parked, False
            for seq, tip in before.items():
                self._hold(seq, tip)
            self.parked = parked
            return None
        if not self.is_last:
            return np.array([pack(h) for h in hidden], np.float32)
        wanted = [h for h, is_wanted in zip(hidden, batch.wanted, strict=True) if is_wanted]
        rows = [toy_logits(h) if mix(h) % 1000 < 1000 * self.right else toy_logits(h)[::-1] for h in wanted]
        return np.array(rows, np.float32).reshape(-1, N_VOCAB)

    def _row(self, batch: Batch, index: int) -> int:
        """Evaluate one row and give its cell to all of its sequences."""
        position, owners = int(batch.positions[index]), batch.seqs[index]
        below = self.tips.get(owners[0])
        assert self.next_position(owners[0]) == position, f"row at {position}, sequence {owners[0]} is another place"
        assert all(self.tips.get(owner) is below for owner in owners), "coupled sequences differ"
        h = int(batch.tokens[index]) if batch.hidden is None else unpack(batch.hidden[index])
        values = []
        for layer in range(self.first, self.last):
            values.append(mix(h, below.values[layer - self.first] if below else 0, layer))
            h = mix(h, values[-1])
        cell = _Cell(position, tuple(values), below)
        self.n_used += 1
        if below:
            below.n_held += 1
        for owner in owners:
            self._hold(owner, cell)
        return h

    def _up_to(self, tip: _Cell | None, end: int) -> _Cell | None:
        if end == 0:
            return None  # not cell by cell: a released sequence may be long
        while tip and tip.position >= end:
            tip = tip.below
        return tip

    def _hold(self, seq: int, tip: _Cell | None) -> None:
        """The sequence ends with this cell from now on; cells that nothing needs any more are free, or parked."""
        gone, self.tips[seq] = self.tips.get(seq), tip
        if tip:
            tip.n_held += 1
        while gone:
            gone.n_held -= 1
            if gone.n_held:
                return
            self.n_used, self.n_parked = self.n_used - 1, self.n_parked + self.parked
            gone = gone.below


def plain_toy(token: int, n: int) -> list[int]:
    """What the toy says greedily after one token: nothing but its layers, one token at a time."""
    tokens, below = [token], [0] * N_LAYERS
    for _ in range(n):
        h = tokens[-1]
        for layer in range(N_LAYERS):
            below[layer] = mix(h, below[layer], layer)
            h = mix(h, below[layer])
        tokens.append(int(np.argmax(toy_logits(h))))
    return tokens[1:]


@pytest.mark.parametrize("n", [2_000, in_long(10_000)])
@pytest.mark.parametrize(("parked", "n_spare"), [(False, 0), (True, 6)])
def test_thousands_of_tokens_end_with_the_context_and_leak_nothing(parked: bool, n_spare: int, n: int) -> None:
    """Five sequences and no or few cells more than context, for the target and for the draft, a model too."""
    n_ctx, n_seq, rng = n + 1, 5, random.Random(3)
    n_cells = n_ctx + n_spare
    stages = [QuickStage(first, last, n_cells, parked) for first, last in ((0, 1), (1, 3), (3, N_LAYERS))]
    pipeline = ToyPipeline(stages, rng)
    pool, draft_pool = SequencePool(n_seq, n_cells, parked), SequencePool(n_seq, n_cells)
    drafter = ModelDrafter(QuickStage(0, N_LAYERS, n_cells, False, right=0.7), draft_pool, 16)
    engine = toy_engine(pipeline, pool, drafter)
    request = Request(0, [5], 20_000, SamplingParams(temp=0.0), n_ctx)
    metrics = RequestMetrics()
    engine.add(request, PipeInfer(microbatch=2, width=3), metrics)
    n_nodes = 0
    for index, _ in enumerate(emitted(engine)):
        n_nodes = max(n_nodes, len(request.tree.nodes))
        if index % 100 == 0:
            audit_engine(engine)
    assert request.finish is Finish.CONTEXT and request.n_generated == n
    assert request.tokens == [5, *plain_toy(5, n)]
    assert metrics.n_matched > n / 5 and metrics.n_cancelled > n / 10, "hardly any speculation"
    assert n_nodes < 100
    assert stages[0].n_packed > n // 2_000 or not parked, "the parked cells were never won back"
    audit_engine(engine)
    for every in (pool, draft_pool):
        audit_pool(every, {})
        assert every.n_free == n_seq and all_cells_come_back(every)
    assert not any(pipeline.queues)


def all_cells_come_back(pool: SequencePool) -> bool:
    """Whether a pool without requests has every cell free once the parked ones are won back."""
    pool.open(99)
    if pool.can_compact:
        pool.compact()
    return pool.n_free_cells == pool.n_cells


def test_the_root_may_move_while_the_draft_catches_up() -> None:
    """A larger draft's guesses give children to a root that the smallest has not seen, and verdicts pass it by."""
    for seed in range(15):
        rng = random.Random(seed)
        pipeline = ToyPipeline([ToyStage(layer, layer + 1, layer + 1 == N_LAYERS) for layer in range(N_LAYERS)], rng)
        larger = ToyDraftPipeline([NoisyStage(0, N_LAYERS, 0.9, 10_000)], rng)
        level = Level(larger, SequencePool(16, 500), n_rows=4, n_chunk=64)
        small = QuickStage(0, N_LAYERS, 500, False, right=0.4)
        drafter = ModelDrafter(small, SequencePool(16, 500), rng.choice([2, 16]))
        engine = toy_engine(pipeline, SequencePool(16, 500), drafter, [level])
        request = Request(0, [5], 60, SamplingParams(temp=0.0), 200)
        engine.add(request, PipeInfer(microbatch=rng.choice([1, 4]), width=4))
        for _ in emitted(engine):
            audit_engine(engine)
        assert request.tokens == [5, *plain_toy(5, 60)]


@pytest.mark.parametrize("block", cases(1, 4))
def test_concurrent_requests_do_not_mix(block: int) -> None:
    for seed in range(15 * block, 15 * block + 15):
        rng = random.Random(seed)
        reference = Reference(N_LAYERS)
        pipeline = toy_pipeline(rng, 3, 10_000, parked=False)
        engine = toy_engine(pipeline, SequencePool(64, 10_000), OracleDrafter(reference, 0.7))
        requests = []
        for request_id in range(4):
            params = SamplingParams(seed=request_id, temp=0.8 * (request_id % 2))
            prompt = [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 20))]
            requests.append(Request(request_id, prompt, 30, params, 200))
            engine.add(requests[-1], random_policy(rng))
        for _ in emitted(engine):
            audit_engine(engine)
        for request in requests:
            expected = reference.generate(request.prompt, 30, request.sampling)
            assert request.tokens[len(request.prompt) :] == expected


def test_end_token_ends_the_request() -> None:
    reference = Reference(N_LAYERS)
    params = SamplingParams(temp=0.0)
    text = reference.generate([1, 2], 60, params)
    end = text[17]
    for seed in range(40):
        rng = random.Random(seed)
        engine = toy_engine(toy_pipeline(rng, 3, 500, False), SequencePool(16, 500), OracleDrafter(reference, 0.8))
        request = Request(0, [1, 2], 60, params, 200, frozenset({end}))
        engine.add(request, random_policy(rng))
        engine.complete()
        assert request.finish is Finish.END
        assert request.tokens[2:] == text[: text.index(end) + 1]


def test_stopping_keeps_what_was_emitted_and_drains() -> None:
    reference = Reference(N_LAYERS)
    params = SamplingParams(temp=0.0)
    for seed in range(40):
        rng = random.Random(seed)
        pipeline = toy_pipeline(rng, 3, 500, False)
        pool = SequencePool(16, 500)
        engine = toy_engine(pipeline, pool, OracleDrafter(reference, 0.8))
        request = Request(0, [3], 60, params, 200)
        engine.add(request, random_policy(rng))
        for _ in range(rng.randint(0, 60)):
            engine.step()
        engine.stop(request)
        for _ in emitted(engine):
            raise AssertionError("a stopped request emitted")
        assert request.tokens[1:] == reference.generate([3], 60, params)[: request.n_generated]
        assert pool.n_free == 16


def test_good_guesses_are_sent_and_judged_once() -> None:
    """With a perfect draft most tokens come from a guess, and no node travels twice."""
    reference = Reference(N_LAYERS)
    pipeline = toy_pipeline(random.Random(1), 3, 500, False)
    engine = toy_engine(pipeline, SequencePool(16, 500), OracleDrafter(reference, 1.0))
    metrics = RequestMetrics()
    engine.add(Request(0, [1], 100, SamplingParams(temp=0.0), 200), PipeInfer(width=1), metrics)
    engine.complete()
    assert metrics.n_matched >= 50
    assert metrics.n_rows <= 101 + 5
    assert pipeline.n_messages == 3 * metrics.n_runs, "one message a run and hop"
