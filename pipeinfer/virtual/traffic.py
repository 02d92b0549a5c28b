"""Many requests in virtual time: the real engine and scheduler, arrivals, what becomes of them. Knows no file."""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeinfer.cluster.timing.costs import Profile
from pipeinfer.core.engine import Engine
from pipeinfer.core.kv.blocks import BLOCK
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.observe.ledger import TimeUse, stage_time
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.throughput import NOT_OFFERED, Throughput, offered_and_served
from pipeinfer.virtual.choices import Choices, SyntheticChoices, n_predicted
from pipeinfer.virtual.drafts import SimDrafter
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from pipeinfer.virtual.simulation import N_CELLS_SPARE, N_CHUNK, run_cost


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with prompts and texts of so many tokens, `parallel` of them open at a time at most. They come at
    random, `rate` a second in the mean (a Poisson process), or all at once; or, where there is a `concurrency`, from so
    many clients, each of whom asks for the next text when it has one. `max_delay_s`: as in `core.batch_planner`."""

    n_requests: int
    prompt_tokens: int
    predict: int
    parallel: int
    rate: float = math.inf
    seed: int = 0
    concurrency: int = 0
    max_delay_s: float = math.inf

    @property
    def n_open(self) -> int:
        """Requests that are open at a time at most."""
        return self.concurrency or self.parallel


def arrivals_s(n_requests: int, rate: float, seed: int) -> list[float]:
    """When requests come, from the first one on: the same for the same seed."""
    if math.isinf(rate):
        return [0.0] * n_requests
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, n_requests)
    return [float(when_s) for when_s in np.cumsum(gaps_s) - gaps_s[0]]


class LoadWaiter(SimWaiter):
    """Waits no longer than until the next request comes."""

    next_s = math.inf

    def wait(self, pipelines: Sequence[SimPipeline], timeout_s: float | None = None) -> None:
        left_s = max(0.0, self.next_s - self.clock.now)
        super().wait(pipelines, left_s if timeout_s is None else min(timeout_s, left_s))


def synthetic_texts(load: Load, by_rank: Sequence[float], ageing: Sequence[float] = ()) -> list[SyntheticChoices]:
    """A text of its own for every request. `by_rank`, `ageing`: as SyntheticChoices has them."""
    seeds = range(load.seed * load.n_requests, (load.seed + 1) * load.n_requests)
    return [SyntheticChoices(by_rank, seed, load.prompt_tokens, ageing=ageing) for seed in seeds]


def simulate_load(profile: Profile, policy: Policy, load: Load, choices: Sequence[Choices]) -> dict[str, Any]:
    """Throughput, latencies and how busy the stages were. `choices`: each request's; texts end after `load.predict`
    tokens, or where they do.

    `busy`: each stage's share of the time between the first and the last token in which it was not idle; `evaluating`:
    without what its host does before and after. `notice`: why the load's limit of delays cannot be held, if so.
    """
    clock = VirtualClock()
    n_ctx = max(len(each.prompt) + n_predicted(each, load.predict) for each in choices)
    pipeline = SimPipeline(profile, choices, clock)
    n_seq = policy.n_sequences + load.n_open - 1
    n_cells = load.n_open * n_ctx + N_CELLS_SPARE
    pool = SequencePool(n_seq, n_cells, parked=profile.parked)
    coming_s, waiter = deque(arrivals_s(load.n_requests, load.rate, load.seed)), LoadWaiter(clock)
    chunk_s = max(stage.seconds(BLOCK, 0) for stage in profile.stages)
    drafter = SimDrafter(profile, choices, (pipeline,), policy.n_rows) if profile.drafts else None
    engine = Engine(
        Level(pipeline, pool, n_chunk=N_CHUNK, n_rows=max(policy.n_rows, load.n_open), blocks=profile.blocks),
        drafter, waiter, clock, run_cost=run_cost(profile, n_cells, (BLOCK, chunk_s)),
        max_delay_s=load.max_delay_s,
    )  # fmt: skip
    if drafter:
        drafter.timeout_s = engine.timeout_s
    metrics = [RequestMetrics() for _ in choices]
    number = n_open = 0
    while engine.busy or coming_s:
        if not engine.busy:
            clock.now = max(clock.now, coming_s[0])
        while coming_s and coming_s[0] <= clock.now and n_open < load.n_open:
            text = choices[number]
            n_predict = n_predicted(text, load.predict)
            request = Request(number, text.prompt, n_predict, SamplingParams(temp=0.0), n_ctx)
            engine.add(request, policy.begin(), metrics[number])
            came_s = coming_s.popleft()
            if not load.concurrency:  # else it comes when its client has the text before it: now
                metrics[number].submitted_s = came_s
            number, n_open = number + 1, n_open + 1
        waiter.next_s = coming_s[0] if coming_s and n_open < load.n_open else math.inf
        emission = engine.step()
        n_open -= emission is not None and emission.request.finish is not None
    notice = engine.batches.too_short
    return _figures(load, pipeline, metrics) | ({"notice": notice} if notice else {})


def _figures(load: Load, pipeline: SimPipeline, metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    throughput = Throughput(itl_s=array("d"))
    for each in metrics:
        throughput.add(each)
    first_s, last_s = min(each.token_s[0] for each in metrics), max(each.token_s[-1] for each in metrics)
    start_s = min(each.submitted_s for each in metrics)
    one_by_one = not load.concurrency and math.isfinite(load.rate)
    rates = offered_and_served(metrics) if one_by_one else NOT_OFFERED
    return (
        throughput.figures(last_s - start_s, load.n_requests)
        | rates
        | {
            "busy": [_share(stage_time(stage.ledger.moved(0.0), {}, (first_s, last_s))) for stage in pipeline.stages],
            "evaluating": [stage.evaluated_s / (last_s - start_s) for stage in pipeline.stages],
        }
    )


def _share(use: TimeUse) -> float:
    """How much of the time was spent on runs, cancelled ones too."""
    return (use.busy_s + use.cancelled_s) / use.wall_s if use.wall_s > 0 else math.nan
