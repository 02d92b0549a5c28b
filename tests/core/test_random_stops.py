"""Many requests in virtual time, with clocks that run and known costs: whoever comes, leaves or is preempted, nobody
else is forgotten, and nobody waits for room that there is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import POLICIES
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work, run_cost
from pipeinfer.virtual.drafts import SimDrafter, SimDraftLevel
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from tests.support.audit import audit_engine

N_CASES = 20
"""Cases of a block; `tests/long` runs thousands."""


def random_profile(rng: random.Random) -> Profile:
    """Stages from alike to uneven, drafts from quick to slow, links from fast to slow."""
    row_s = 10 ** rng.uniform(-4, -1.5)
    growth = rng.choice([0.02, 0.1, 0.2, 0.3, 1.0])
    rows = (1.0, 2.0, 8.0, 32.0)
    stages = []
    for index in range(rng.randint(1, 4)):
        slower = row_s * rng.uniform(0.7, 1.5)
        stages.append(ModelCost(f"s{index}", 4, Work(rows, tuple(slower * (1 + growth * (n - 1)) / 4 for n in rows))))
    draft_s = row_s * 10 ** rng.choice([rng.uniform(-3, -1), rng.uniform(-1, 0.5)])
    draft = ModelCost("draft", 2, Work((1.0, 8.0), (draft_s / 2, draft_s * rng.uniform(0.5, 2.0))))
    link = LinkCost(10 ** rng.uniform(-6, -2), 10 ** rng.uniform(7, 10))
    head = HeadCost(*(10 ** rng.uniform(-6, -4) for _ in range(3)))
    profile = Profile("random", 256, tuple(stages), (draft,), link, head)
    return replace(profile, head_is_first=rng.random() < 0.5, parked=rng.random() < 0.5)


class AuditingWaiter(SimWaiter):
    """Waits no longer than until something comes from outside. Each time nobody may be waiting for room there is."""

    next_s = math.inf
    engine: Engine

    def wait(self, pipelines: Sequence[SimPipeline], timeout_s: float | None = None) -> None:
        admission = self.engine.admission
        starved = next(admission.ready(), None) if admission.waiting else None
        assert starved is None, f"request {starved.request.id} waits, and there is room for it"
        left_s = max(0.0, self.next_s - self.clock.now)
        super().wait(pipelines, left_s if timeout_s is None else min(timeout_s, left_s))


def run_case(seed: int, kind: type[Policy] | None = None) -> tuple[int, int]:
    """One random load. Returns how many requests were stopped and how often one was preempted."""
    rng = random.Random(seed)
    kind = kind or rng.choice(list(POLICIES.values()))
    profile, clock = random_profile(rng), VirtualClock()
    n_requests, n_prompt, n_predict = rng.randint(2, 8), rng.choice([1, 5, 40]), rng.choice([3, 30, 80])
    acceptance = rng.choice([0.05, 0.5, 0.8, 0.95, 0.95])
    choices = [
        SyntheticChoices((acceptance, 0.3 * (1 - acceptance)), seed * 100 + number, n_prompt)
        for number in range(n_requests)
    ]
    n_ctx = n_prompt + n_predict
    n_cells = rng.choice([n_ctx + 8, 2 * n_ctx + 8, n_requests * n_ctx + 200])
    n_seq = rng.choice([1, 2, 3, 8, 40])
    pipeline = SimPipeline(profile, choices, clock)
    waiter, pipelines = AuditingWaiter(clock), [pipeline]
    drafter: SimDrafter | SimDraftLevel
    if rng.random() < 0.4:
        own = SimPipeline(replace(profile, stages=profile.drafts, drafts=(), head_is_first=False), choices, clock)
        drafter = SimDraftLevel(own, choices, SequencePool(rng.choice([n_seq, 8]), n_cells + 64), 32)
        pipelines.append(own)
    else:
        drafter = SimDrafter(profile, choices, (pipeline,))
    for each in pipelines:
        each.neighbours = tuple(pipelines)
    engine = Engine(
        Level(pipeline, SequencePool(n_seq, n_cells, parked=profile.parked), n_chunk=rng.choice([8, 128]), n_rows=32),
        drafter,
        waiter,
        clock,
        run_cost=run_cost(profile, n_cells) if rng.random() < 0.9 else None,
        max_delay_s=rng.choice([math.inf, math.inf, 5 * profile.stages[0].seconds(1, 0)]),
    )
    waiter.engine = engine
    if isinstance(drafter, SimDrafter):
        drafter.timeout_s = engine.timeout_s
    token_s = sum(stage.seconds(1, 0) + profile.link.latency_s for stage in profile.stages)
    span_s = rng.choice([0.0, 0.3, 2.0]) * n_predict * token_s
    requests = [
        Request(number, each.prompt, n_predict, SamplingParams(temp=0.0), n_ctx) for number, each in enumerate(choices)
    ]
    metrics = [RequestMetrics() for _ in requests]
    events = [(rng.uniform(0, span_s), request, True) for request in requests]
    n_stopped = 0
    for when_s, request, _ in list(events):
        if rng.random() < 0.5:
            events.append((when_s + rng.uniform(0, n_predict * token_s), request, False))
    events.sort(key=lambda event: (event[0], not event[2]))
    while events or engine.busy:
        while events and (events[0][0] <= clock.now or not engine.busy):
            when_s, request, comes = events.pop(0)
            clock.now = max(clock.now, when_s)
            if comes:
                request.priority = rng.choice([0, 0, 1])
                engine.add(request, kind().begin(), metrics[request.id])
            elif request.finish is None:
                engine.stop(request)
                n_stopped += 1
        waiter.next_s = events[0][0] if events else math.inf
        if engine.busy:
            engine.step()
        if rng.random() < 0.1:
            audit_engine(engine)
    for request, choice in zip(requests, choices, strict=True):
        said = request.tokens[n_prompt:]
        assert said == [choice.target(n_prompt + at) for at in range(len(said))], f"request {request.id}"
        assert len(said) == n_predict or request.finish
    return n_stopped, sum(each.n_preempted for each in metrics)


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_is_forgotten_or_starved_when_others_come_and_go(name: str) -> None:
    n_cases = 8 if name == "flowspec" else N_CASES  # some of its cases take seconds
    found = [run_case(seed, POLICIES[name]) for seed in range(n_cases)]
    assert sum(n_stopped for n_stopped, _ in found) > n_cases
    assert any(n_preempted for _, n_preempted in found)
