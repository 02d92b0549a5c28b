"""Requests that begin alike, at once on real models, exact: each text is, to the bit, that of the request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.core.requests import Request
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Iterative
from tests.core.test_engine import toy_engine
from tests.job.session.test_many_real import make_policy
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.audit import audit_engine, emitted
from tests.support.jobs import finish
from tests.support.shipped import N_CELLS, N_SEQ, load
from tests.support.toy import ToyPipeline

N_CTX, N_PREDICT = 330, 24
SYSTEM = random.Random(1).choices(range(300, 3000), k=200)


def make_requests() -> list[Request]:
    """Three texts of one prompt, a short one and questions of several lengths behind one system prompt, and one that
    begins with all that another one asks."""
    rng, requests = random.Random(7), list[Request]()
    short = [rng.randrange(300, 3000) for _ in range(20)]
    questions = [SYSTEM, SYSTEM, SYSTEM, short, short]
    questions += [[*SYSTEM, *(rng.randrange(300, 3000) for _ in range(n))] for n in (3, 50, 100)]
    questions += [[*questions[-1], 5, 6, 7]]
    for number, prompt in enumerate(questions):
        params = SamplingParams(seed=number, temp=0.8 * (number % 2), repeat_penalty=1.1)
        requests.append(Request(number, prompt, N_PREDICT, params, N_CTX, keep=number % 2 == 0))
    return requests


def generate(
    stages: Sequence[LlamaStage], draft: LlamaStage, requests: Sequence[Request], seed: int
) -> tuple[int, list[KvOp]]:
    """Run them all at once: how many tokens of prompts were others', and the operations that the stages were given."""
    for stage in (*stages, draft):
        stage.clear()
    pipeline, ops = ToyPipeline(stages, random.Random(seed)), list[KvOp]()
    pool = SequencePool(N_SEQ, N_CELLS, parked=True)
    take = pool.take_pending

    def note() -> list[KvOp]:
        found = take()
        ops.extend(found)
        return found

    pool.take_pending = note  # type: ignore[method-assign]
    drafter = ModelDrafter(draft, SequencePool(N_SEQ, N_CELLS), 32)
    engine = toy_engine(pipeline, pool, drafter, n_chunk=128, n_rows=32, blocks=True)
    metrics = [RequestMetrics() for _ in requests]
    for request, observer in zip(requests, metrics, strict=True):
        engine.add(request, make_policy(request.id), observer)
    for _ in emitted(engine):
        audit_engine(engine)
    return sum(each.n_kept for each in metrics), ops


@pytest.fixture(scope="module")
def solo(draft: LlamaStage) -> list[list[int]]:
    (stage,) = stages = load(())
    texts = []
    for request in make_requests():
        n_shared, _ = generate(stages, draft, [request], seed=request.id)
        assert not n_shared
        texts.append(request.tokens)
    stage.close()
    return texts


@pytest.mark.parametrize("cuts", [(), (3, 6)])
def test_texts_that_begin_alike_are_those_of_each_alone(
    cuts: tuple[int, ...], draft: LlamaStage, solo: list[list[int]]
) -> None:
    stages, requests = load(cuts), make_requests()
    n_shared, ops = generate(stages, draft, requests, seed=len(cuts))
    for stage in stages:
        stage.close()
    assert [request.tokens for request in requests] == solo
    assert n_shared >= 2 * 199 + 19 + 3 * 128, "prompts were evaluated again"
    assert {OpKind.SHARED, OpKind.COMPACT} <= {op.kind for op in ops} or cuts, "nothing that was shared was packed"


def test_a_longer_prompt_takes_over_one_that_was_stopped_while_it_was_read() -> None:
    """Stages read a prompt in a cache of its own size, which the longer one must not get."""
    more, params = random.Random(2).choices(range(300, 3000), k=400), SamplingParams(seed=1, temp=0.0)
    stages, texts = load(()), list[list[int]]()
    for stops in (False, True):
        pool = SequencePool(N_SEQ, N_CELLS, parked=True)
        engine = toy_engine(ToyPipeline(stages, random.Random(3)), pool, None, n_chunk=64, n_rows=32, blocks=True)
        stopped = Request(0, SYSTEM, N_PREDICT, params, 700, keep=True)
        if stops:
            engine.add(stopped, Iterative())
            while stopped.id not in engine._active or pool.placed_end(0) < 64 or engine.target.n_inflight(stopped):
                engine.step()
            engine.stop(stopped)
            assert 64 <= stopped.n_retained < 200
        request, metrics = Request(1, [*SYSTEM, *more], N_PREDICT, params, 700, keep=True), RequestMetrics()
        engine.add(request, Iterative(), metrics)
        engine.complete()
        texts.append(request.tokens)
        assert not any(stage._prefills.by_seq for stage in stages), "caches of prompts are left"
        for stage in stages:
            stage.clear()
    for stage in stages:
        stage.close()
    assert texts[0] == texts[1] and metrics.n_kept == stopped.n_retained


def test_a_batch_on_layers_with_windows(tmp_path: Path) -> None:
    """Begun by others, packed, preempted: with a window of 8 most of what is shared is out of sight."""
    target = write_random_model(tmp_path / "target.gguf", replace(MODELS["gemma3"], with_vocab=True))
    prompts = ["the model", "a token " * 30, "the layer of the rank " * 10, "the layer of the rank " * 4, "a token"]
    lines = [
        json.dumps({"prompt": prompts[at % 5], "max_tokens": 20 + 50 * (at % 3), "seed": at, "ignore_eos": True})
        for at in range(24)
    ]
    asked, texts = tmp_path / "asked.jsonl", []
    asked.write_text("\n".join(lines))
    for n_parallel in (1, 6):
        answers = tmp_path / f"{n_parallel}.jsonl"
        words = ["batch", str(asked), "-o", str(answers), "-m", str(target), "-md", "none", "-c", "500", "-t", "1"]
        done = finish(1, [*words, "--parallel", str(n_parallel)])
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in answers.read_text().splitlines()]
        texts.append({each["index"]: each["text"] for each in found})
    assert texts[0] == texts[1] and len(texts[0]) == 24
