"""The small engine, where to begin, sends the same runs as the engine and has the same text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import FlowSpec, Iterative, PipeDec, PipeInfer, Speculative, Ssd
from tests.support.small_engine import SmallEngine
from tests.support.toy import N_LAYERS, OracleDrafter, Reference, ToyPipeline, ToyStage, ToyWaiter

N_PREDICT, N_CELLS = 60, 400
POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "iterative": lambda rng: Iterative(),
    "speculative": lambda rng: Speculative(n_draft=rng.randint(1, 8), width=rng.randint(1, 4)),
    "pipeinfer": lambda rng: PipeInfer(
        rng.randint(1, 4), rng.randint(0, 6), rng.randint(1, 4), best_first=rng.random() < 0.5
    ),
    "pipedec": lambda rng: PipeDec(children=rng.randint(1, 4), layer_width=rng.randint(1, 8)),
    "flowspec": lambda rng: FlowSpec(rng.randint(1, 4), rng.randint(1, 20), rng.randint(1, 4), rng.randint(1, 8)),
    "ssd": lambda rng: Ssd(rng.randint(1, 8), rng.randint(1, 4), ranked=rng.random() < 0.5),
}


class QuietPipeline(ToyPipeline):
    """Works only while the engine waits, so at most one verdict has come. `sent`: its runs, as in `SmallEngine`."""

    sent: list[list[tuple[int, int]]]

    def poll(self) -> Any:
        return self.decode(self.queues[-1].popleft()) if self.queues[-1] else None

    def submit(self, run: Run) -> None:
        if run.rows:
            self.sent.append([(row.token, row.position) for row in run.rows])
        super().submit(run)


@pytest.mark.parametrize("name", POLICIES)
def test_both_engines_send_the_same_runs(name: str) -> None:
    n_guesses = sum(run_both(name, seed) for seed in range(8))
    assert (n_guesses > 0) == (name != "iterative")


def run_both(name: str, seed: int) -> int:
    """Compare both on one text. Returns how many guesses were sent."""
    rng, reference = random.Random(seed), Reference(N_LAYERS)
    n_stages, acceptance = rng.randint(1, N_LAYERS), rng.choice([0.2, 0.6, 0.9])
    sampling = SamplingParams(seed=seed, temp=rng.choice([0.0, 0.8]))
    whole, small = (Request(0, [5], N_PREDICT, sampling, 200) for _ in range(2))
    cuts = [0, *sorted(rng.sample(range(1, N_LAYERS), n_stages - 1)), N_LAYERS]
    stages = [ToyStage(first, last, last == N_LAYERS, N_CELLS, False) for first, last in pairwise(cuts)]
    pipeline = QuietPipeline(stages, random.Random(seed))
    pipeline.sent = []
    engine = Engine(
        Level(pipeline, SequencePool(64, N_CELLS)), OracleDrafter(reference, acceptance), ToyWaiter(rng), lambda: 0.0
    )
    metrics = RequestMetrics()
    engine.add(whole, POLICIES[name](random.Random(seed)), metrics)
    engine.complete()
    twin = SmallEngine(
        small, POLICIES[name](random.Random(seed)), OracleDrafter(reference, acceptance), reference, n_stages
    )
    twin.complete()
    assert whole.tokens == small.tokens == [5, *reference.generate([5], N_PREDICT, sampling)]
    assert whole.finish is small.finish
    assert pipeline.sent == twin.sent
    return metrics.n_sent
