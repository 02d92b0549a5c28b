"""The engine against a toy target: every policy, split, arrival order and cancellation gives the target's own text."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pipeinfer.drafting import ModelDrafter
from pipeinfer.engine import Engine
from pipeinfer.interfaces import Drafter
from pipeinfer.policies import Iterative, PipeInfer, Policy, Speculative
from pipeinfer.requests import Finish, Request
from pipeinfer.sampling import SamplingParams
from pipeinfer.sequences import SequencePool
from tests.toy import N_VOCAB, NoisyStage, OracleDrafter, RandomPolicy, Reference, ToyPipeline, ToyStage

N_LAYERS = 4


def toy_pipeline(rng: random.Random, n_stages: int, n_cells: int, parked: bool) -> ToyPipeline:
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), n_stages - 1)), N_LAYERS]
    models = [ToyStage(first, last, last == N_LAYERS, n_cells, parked) for first, last in pairwise(cuts)]
    return ToyPipeline(models, rng, late=rng.choice([0.0, 0.5, 0.95]))


def random_policy(rng: random.Random) -> Policy:
    choices: list[Policy] = [
        Iterative(),
        Speculative(n_draft=rng.randint(1, 8), width=rng.randint(1, 4)),
        PipeInfer(rng.randint(1, 4), rng.randint(0, 9), rng.randint(1, 4), split_cutoff=rng.random() / 2),
        RandomPolicy(rng, rng.randint(1, 4), rng.randint(4, 40), rng.randint(1, 12)),
        RandomPolicy(rng, rng.randint(1, 4), rng.randint(4, 40), rng.randint(1, 12)),
    ]
    return rng.choice(choices)


def random_drafter(rng: random.Random, reference: Reference, n_ctx: int, seed: int) -> Drafter:
    if rng.random() < 0.5:
        return OracleDrafter(reference, rng.random(), seed)
    model = NoisyStage(N_LAYERS, rng.random(), n_cells=n_ctx + 64)
    return ModelDrafter(model, SequencePool(rng.choice([3, 16]), n_ctx + 64), rng.choice([4, 16]), N_VOCAB)


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
    engine = Engine(
        pipeline, pool, drafter, lambda: 0.0, n_chunk=rng.choice([3, 64]), cancel=rng.random() < 0.9,
        n_rows_max=rng.choice([3, 32]),
    )  # fmt: skip
    penalty = rng.choice([1.0, 1.0, 1.3])
    params = SamplingParams(seed=seed, temp=rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
    n_trees = 0
    for request_id in range(rng.choice([1, 1, 2])):
        prompt = [rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 30]))]
        request = Request(request_id, prompt, n_predict, params, n_ctx)
        engine.add(request, random_policy(rng))
        emitted: list[int] = []
        while engine.busy:
            emission = engine.step()
            engine.audit()
            if emission:
                n_trees += 1
                emitted += emission.tokens
        n_expected = min(n_predict, n_ctx - len(prompt))
        assert emitted == reference.generate(prompt, n_expected, params), f"seed {seed}"
        assert request.tokens == [*prompt, *emitted]
        assert request.finish is (Finish.LENGTH if n_predict <= n_ctx - len(prompt) else Finish.CONTEXT)
    assert not any(pipeline.queues), "a run was forgotten"
    assert pool.n_free == n_seq
    return n_trees


@pytest.mark.parametrize("block", range(10))
def test_any_tree_split_order_and_cancellation_gives_the_targets_text(block: int) -> None:
    n_trees = sum(run_case(seed) for seed in range(block * 100, block * 100 + 100))
    assert n_trees > 1000


@pytest.mark.parametrize("parked", [False, True])
def test_a_long_generation_leaks_nothing(parked: bool) -> None:
    """2 000 tokens with few cells to spare: removed cells are won back again and again, and all ends in order."""
    rng, reference, params = random.Random(3), Reference(N_LAYERS), SamplingParams(temp=0.0)
    pipeline = toy_pipeline(rng, 3, 2_100, parked)
    pool = SequencePool(8, 2_100, parked)
    engine = Engine(pipeline, pool, OracleDrafter(reference, 0.6), lambda: 0.0)
    request = Request(0, [5], 20_000, params, 2_001)
    engine.add(request, PipeInfer(microbatch=2))
    n_nodes = 0
    for _ in engine.generate():
        n_nodes = max(n_nodes, len(request.tree.nodes))
    assert request.finish is Finish.CONTEXT and request.n_generated == 2_000
    assert request.tokens[-50:] == reference.generate([5], 2_000, params)[-50:]
    assert pool.n_free == 8 and n_nodes < 100 and not any(pipeline.queues)


def test_concurrent_requests_do_not_mix() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        reference = Reference(N_LAYERS)
        pipeline = toy_pipeline(rng, 3, 10_000, parked=False)
        engine = Engine(pipeline, SequencePool(64, 10_000), OracleDrafter(reference, 0.7), lambda: 0.0)
        requests = []
        for request_id in range(4):
            params = SamplingParams(seed=request_id, temp=0.8 * (request_id % 2))
            prompt = [rng.randrange(N_VOCAB) for _ in range(rng.randint(1, 20))]
            requests.append(Request(request_id, prompt, 30, params, 200))
            engine.add(requests[-1], random_policy(rng))
        for _ in engine.generate():
            engine.audit()
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
        engine = Engine(
            toy_pipeline(rng, 3, 500, False), SequencePool(16, 500), OracleDrafter(reference, 0.8), lambda: 0.0
        )
        request = Request(0, [1, 2], 60, params, 200, frozenset({end}))
        engine.add(request, random_policy(rng))
        for _ in engine.generate():
            pass
        assert request.finish is Finish.END
        assert request.tokens[2:] == text[: text.index(end) + 1]


def test_stopping_keeps_what_was_emitted_and_drains() -> None:
    reference = Reference(N_LAYERS)
    params = SamplingParams(temp=0.0)
    for seed in range(40):
        rng = random.Random(seed)
        pipeline = toy_pipeline(rng, 3, 500, False)
        pool = SequencePool(16, 500)
        engine = Engine(pipeline, pool, OracleDrafter(reference, 0.8), lambda: 0.0)
        request = Request(0, [3], 60, params, 200)
        engine.add(request, random_policy(rng))
        for _ in range(rng.randint(0, 60)):
            engine.step()
        engine.stop(request)
        for _ in engine.generate():
            raise AssertionError("a stopped request emitted")
        assert request.tokens[1:] == reference.generate([3], 60, params)[: request.n_generated]
        assert pool.n_free == 16


def test_good_guesses_are_sent_and_judged_once() -> None:
    """With a perfect draft most tokens come from a guess, and no node travels twice."""
    reference = Reference(N_LAYERS)
    pipeline = toy_pipeline(random.Random(1), 3, 500, False)
    engine = Engine(pipeline, SequencePool(16, 500), OracleDrafter(reference, 1.0), lambda: 0.0)
    metrics = engine.add(Request(0, [1], 100, SamplingParams(temp=0.0), 200), PipeInfer(width=1))
    for _ in engine.generate():
        pass
    assert metrics.n_matched >= 50
    assert metrics.n_rows <= 101 + 5
    assert pipeline.n_messages == 3 * metrics.n_runs, "one message a run and hop"
