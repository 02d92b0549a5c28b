"""A draft that reads features, which come with verdicts: its cells are made of them, and texts are the target's."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Drafter
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.lookup import LookupDrafter
from tests.core.test_engine import random_policy
from tests.support.audit import audit_engine
from tests.support.cases import cases, in_long
from tests.support.toy import (
    N_LAYERS,
    N_VOCAB,
    NoisyStage,
    OracleDrafter,
    Reference,
    ToyDraftPipeline,
    ToyPipeline,
    ToyStage,
    ToyWaiter,
)
from tests.support.toy_head import READ, ToyHeadDrafter


def run_case(seed: int, shift: int) -> ToyHeadDrafter:
    """Some requests at once, some of which begin alike, with few cells: they are preempted, kept and shared."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    n_stages, parked, n_cells = rng.randint(1, N_LAYERS), rng.random() < 0.5, rng.choice([90, 130, 600])
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), n_stages - 1)), N_LAYERS]
    models = [
        ToyStage(first, last, last == N_LAYERS, n_cells, parked, [layer for layer in READ if first <= layer < last])
        for first, last in pairwise(cuts)
    ]
    pipeline = ToyPipeline(models, rng, late=rng.choice([0.0, 0.5, 0.95]))
    pool, own = SequencePool(rng.choice([4, 30]), n_cells, parked), SequencePool(rng.choice([8, 64]), n_cells)
    head = ToyHeadDrafter(OracleDrafter(reference, rng.random(), seed), own, rng.choice([4, 16]), shift)
    drafter: Drafter = LookupDrafter(head) if rng.random() < 0.2 else head
    target = Level(pipeline, pool, n_chunk=rng.choice([3, 16, 64]), n_rows=rng.choice([3, 32]), blocks=parked)
    larger = []
    if rng.random() < 0.3:  # which expands nodes that the head has not seen
        judge = ToyDraftPipeline([NoisyStage(0, N_LAYERS, rng.random(), 1000)], rng, late=rng.choice([0.0, 0.9]))
        larger = [Level(judge, SequencePool(31, 1000), n_rows=16)]
    engine = Engine(target, drafter, ToyWaiter(rng), lambda: 0.0, drafts=larger)
    penalty, n_predict = rng.choice([1.0, 1.3]), 24
    params = SamplingParams(seed=seed, temp=rng.choice([0.0, 0.8]), repeat_last_n=9, repeat_penalty=penalty)
    shared = [rng.randrange(N_VOCAB) for _ in range(20)]
    requests = []
    for number in range(rng.choice([1, 2, 5])):
        prompt = [*shared[: rng.choice([0, 7, 20])], *(rng.randrange(N_VOCAB) for _ in range(rng.choice([1, 2, 12])))]
        requests.append(Request(number, prompt, n_predict, params, 80, keep=rng.random() < 0.5))
    waiting = list(requests)
    while waiting or engine.busy:
        if waiting and (not engine.busy or rng.random() < 0.1):
            engine.add(waiting.pop(), random_policy(rng))
        engine.step()
        audit_engine(engine)
    for request in requests:
        assert request.tokens[len(request.prompt) :] == reference.generate(request.prompt, n_predict, params), seed
    engine.forget()
    assert own.n_free == own.n_seq and not head._records, "the draft keeps something"
    return head


@pytest.mark.parametrize("shift", [0, in_long(1)])
@pytest.mark.parametrize("block", cases(1, 4))
def test_cells_of_settled_tokens_are_made_of_features(block: int, shift: int) -> None:
    heads = [run_case(seed, shift) for seed in range(50 * block, 50 * block + 50)]
    n_true, n_blind = sum(head.n_true for head in heads), sum(head.n_blind for head in heads)
    assert n_true > 20_000 and n_blind < n_true / 10
