"""Many requests on stages in this process, whose layers are on devices of RPC servers and on the CPU.

Run as `python -m tests.support.device_requests PLACES ENDPOINT...`: a stage of the shipped target for each of PLACES, a
device's name or `cpu`, separated by commas. `alone` behind PLACES: one request after the other. In a process of its
own, because libllama's devices stay for as long as it lives.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeinfer.core.requests import Request
from pipeinfer.core.runs import KvOp
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.demo import TARGET
from pipeinfer.models.drafts.model_drafter import ModelDrafter
from pipeinfer.models.gguf.layers import CacheTypes
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.rpc import connect
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import PipeInfer
from pipeinfer.policies.pipedec import PipeDec
from pipeinfer.policies.pipespec import PipeSpec
from tests.core.test_engine import toy_engine
from tests.job.run.test_rpc_devices import TYPES
from tests.support.audit import audit_engine, emitted
from tests.support.shipped import N_LAYER, N_SEQ, load_draft
from tests.support.toy import ToyPipeline

N_CELLS, AT_ONCE = 768, 3
"""Too few cells for all requests; rows that a device computes with the bits of single ones."""

N_REQUESTS, N_PREDICT, N_CTX = 6, 100, 400
POLICIES = (PipeDec(), PipeInfer(), PipeSpec())


def make_requests() -> list[Request]:
    """Half of them begin alike; greedy and sampled so hot that most guesses are wrong."""
    rng = random.Random(3)
    common = [rng.randrange(300, 3000) for _ in range(150)]
    requests = []
    for number in range(N_REQUESTS):
        own = [rng.randrange(300, 3000) for _ in range(10 + 30 * (number % 3))]
        params = SamplingParams(seed=number, temp=1.2 * (number % 3 > 0), repeat_penalty=1.1)
        prompt = [*common, *own] if number % 2 else own
        requests.append(Request(number, prompt, N_PREDICT, params, N_CTX, keep=number % 2 == 1))
    return requests


def load(places: Sequence[str]) -> list[LlamaStage]:
    info, cache = read_model_info(TARGET), CacheTypes(TYPES[1], TYPES[3])
    cuts = [N_LAYER * index // len(places) for index in range(len(places) + 1)]
    stages = []
    for place, (first, last) in zip(places, pairwise(cuts), strict=True):
        devices, n_layers = ((), 0) if place == "cpu" else ((place,), -1)
        params = LlamaParams(
            N_CELLS, N_SEQ + 1, 129, 33, n_gpu_layers=n_layers, devices=devices, cache=cache, at_once=AT_ONCE
        )
        stages.append(LlamaStage(open_slice(info, first, last), params))
    return stages


def generate(stages: Sequence[LlamaStage], draft: LlamaStage, requests: Sequence[Request]) -> Counter[str]:
    """Their texts, all at once. Returns how often what happened."""
    for stage in (*stages, draft):
        stage.clear()
    pipeline = ToyPipeline(stages, random.Random(len(stages)), late=0.5)
    pool, ops = SequencePool(N_SEQ, N_CELLS, parked=True), Counter[str]()
    take = pool.take_pending

    def note() -> list[KvOp]:
        found = take()
        ops.update(op.kind.name for op in found)
        return found

    pool.take_pending = note  # type: ignore[method-assign]
    drafter = ModelDrafter(draft, SequencePool(N_SEQ, N_CELLS), 32)
    engine = toy_engine(pipeline, pool, drafter, n_chunk=128, n_rows=32)
    metrics = [RequestMetrics() for _ in requests]
    for request, observer in zip(requests, metrics, strict=True):
        engine.add(request, replace(POLICIES[request.id % 3]), observer)
    for _ in emitted(engine):
        audit_engine(engine)
    stats = [worker.stats for worker in pipeline.workers]
    counts = {"kept": sum(each.n_kept for each in metrics), "preempted": sum(each.n_preempted for each in metrics)}
    counts |= {"skipped": sum(each.n_skipped for each in stats), "stopped": sum(each.n_stopped for each in stats)}
    return ops + Counter(counts)


def main(places: str, *others: str) -> None:
    is_alone = others[:1] == ("alone",)
    connect(others[is_alone:])
    stages, draft, requests = load(places.split(",")), load_draft(), make_requests()
    groups = [[request] for request in requests] if is_alone else [requests]
    counts = sum((generate(stages, draft, group) for group in groups), Counter[str]())
    print(json.dumps({"texts": [request.tokens for request in requests], "counts": counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
