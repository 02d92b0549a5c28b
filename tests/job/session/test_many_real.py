"""Eight requests at once on real models, exact: each text is, to the bit, that of the request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.policies import Iterative, PipeInfer, Speculative
from tests.core.test_engine import toy_engine
from tests.support.audit import audit_engine
from tests.support.shipped import N_CELLS, N_SEQ, load
from tests.support.toy import ToyPipeline

N_CTX, N_PREDICT = 160, 40


def make_requests() -> list[Request]:
    rng = random.Random(7)
    requests = []
    for request_id, length in enumerate((1, 5, 30, 64, 65, 90, 110, 12)):
        prompt = [rng.randrange(300, 3000) for _ in range(length)]
        params = SamplingParams(
            seed=request_id, temp=0.8 * (request_id % 2), repeat_penalty=1.0 + 0.1 * (request_id % 3)
        )
        requests.append(Request(request_id, prompt, N_PREDICT, params, N_CTX))
    return requests


def make_policy(request_id: int) -> Policy:
    policies: list[Policy] = [PipeInfer(microbatch=3), Iterative(), Speculative(n_draft=6, width=3)]
    return policies[request_id % 3]


def generate(stages: Sequence[LlamaStage], draft: LlamaStage, requests: Sequence[Request], seed: int) -> int:
    """Run them all at once; how often parked cells were won back."""
    for stage in (*stages, draft):
        stage.clear()
    pipeline = ToyPipeline(stages, random.Random(seed))
    pool = SequencePool(N_SEQ, N_CELLS, parked=True)
    n_compactions, compact = 0, pool.compact

    def count() -> None:
        nonlocal n_compactions
        n_compactions += 1
        compact()

    pool.compact = count  # type: ignore[method-assign]
    drafter = ModelDrafter(draft, SequencePool(N_SEQ, N_CELLS), 32)
    engine = toy_engine(pipeline, pool, drafter, n_chunk=128, n_rows=32, blocks=True)
    for request in requests:
        engine.add(request, make_policy(request.id))
    engine.complete()
    audit_engine(engine)
    return n_compactions


@pytest.fixture(scope="module")
def solo(draft: LlamaStage) -> list[list[int]]:
    (stage,) = stages = load(())
    texts = []
    for request in make_requests():
        generate(stages, draft, [request], seed=request.id)
        texts.append(request.tokens)
    stage.close()
    return texts


@pytest.mark.parametrize("cuts", [(), (3, 6), (1, 3, 5, 7)])
def test_each_text_is_that_of_the_request_alone(
    cuts: tuple[int, ...], draft: LlamaStage, solo: list[list[int]]
) -> None:
    stages, requests = load(cuts), make_requests()
    n_compactions = generate(stages, draft, requests, seed=len(cuts))
    for stage in stages:
        stage.close()
    assert [request.tokens for request in requests] == solo
    assert n_compactions > 0 or cuts, "nothing was ever won back"
