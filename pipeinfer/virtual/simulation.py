"""Generations in virtual time: the real engine on a `SimPipeline`, for one request or for a load of many with their
arrivals, and the results. Opens no file and no model."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pipeinfer.cluster.timed_runs import largest_question
from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import Drafter
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Emission, Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.errors import UserError
from pipeinfer.observe.columns import Record
from pipeinfer.observe.figures import Result, load_figures, make_result
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.observe.trace import Tracer, TraceSpan, Track, stage_time
from pipeinfer.virtual.choices import Choices, SyntheticChoices, n_predicted
from pipeinfer.virtual.costs import Profile, run_cost, stage_rows
from pipeinfer.virtual.drafts import SimDrafter, SimDraftLevel
from pipeinfer.virtual.pipeline import SimPipeline, SimStage, SimWaiter, VirtualClock

N_CHUNK = 128  # as in `pipeinfer run`
N_CELLS_SPARE = 512
NO_RUN = -1  # what a stage waits for at the end
SHOWN = ("policy", "variant", "settings", "seed", "temp", "numerics")  # columns of the experiment in --json


@dataclass(frozen=True, slots=True)
class Simulated:
    """A generation, in virtual seconds."""

    profile: Profile
    request: Request
    metrics: RequestMetrics
    pipeline: SimPipeline
    tracer: Tracer

    def result(self, experiment: Record) -> Result:
        """`experiment`: the columns known before the generation."""
        pipeline, first = self.pipeline, self._first_rank
        ranks = [*[0] * (first > 0), *range(first, first + len(pipeline.stages))]
        links = [pipeline.first_hop] * (first > 0) + [stage.out for stage in pipeline.stages[:-1]]
        hops = [
            {"from": source, "to": dest, "messages": link.n_messages, "bytes": link.n_bytes, "from_device": 0}
            for link, (source, dest) in zip(links, pairwise(ranks), strict=True)
        ]
        models: dict[str, Any] = {
            role: {"name": experiment[role], "bytes": 0, "quantisation": "simulated"} if experiment[role] else None
            for role in ("model", "model_draft")
        }
        more = models | {"profile": self.profile.name}
        wire = {"hops": hops, "cancel_messages": pipeline.ledger.n_cancel_messages}
        return make_result(self.request, self.metrics, experiment, SHOWN, self._tracks(), wire, **more)

    @property
    def _first_rank(self) -> int:
        return 0 if self.profile.head_is_first else max(1, len(self.profile.drafts))

    def _tracks(self) -> list[Track]:
        """The head's, unless it has a stage; those of the remote drafts; those of the stages."""
        profile, main, tracks, end_s = self.profile, self.pipeline, list[Track](), self.tracer.clock()
        if not profile.head_is_first:
            tracks.append(Track(_row(0, "draft" if profile.drafts else "head"), main.ledger, None, self.tracer.spans))
        first_draft, first_rank = (0, len(main.stages)) if profile.drafts_elsewhere else (1, 1)
        for index, draft in enumerate(main.neighbours[1:]):
            row = _row(first_rank + index, f"draft {first_draft + index + 1}")
            tracks.append(_track(row, draft, draft.stages[0], "question", end_s))
        bounds = pairwise([0, *accumulate(cost.layers for cost in profile.stages)])
        for rank, (stage, layers) in enumerate(zip(main.stages, bounds, strict=True), start=self._first_rank):
            heads = () if rank else self.tracer.spans
            tracks.append(_track(_row(rank, stage.cost.name, list(layers)), main, stage, "run", end_s, heads))
        return tracks


def _row(rank: int, role: str, layers: list[int] | None = None) -> dict[str, Any]:
    return {"host": f"node{rank}", "threads": 1, "rank": rank, "role": role, "layers": layers}


def _track(
    row: dict[str, Any],
    pipeline: SimPipeline,
    stage: SimStage,
    unit: str,
    end_s: float,
    heads: Sequence[TraceSpan] = (),
) -> Track:
    """`end_s`: until when the stage waits after its last run. `heads`: what the head did on the same rank."""
    runs = stage.ledger.moved(0.0)
    spans = [
        TraceSpan("cancelled" if cancelled else "evaluate", start_s, end_s - start_s, {unit: run_id})
        for run_id, _, start_s, end_s, cancelled in runs
    ]
    row |= {"runs_skipped": stage.n_skipped, "runs_stopped": stage.n_stopped}
    runs.append((NO_RUN, stage.idle_since_s, end_s, end_s, False))
    return Track(row, pipeline.ledger, runs, [*spans, *heads], unit)


def simulate(
    profile: Profile,
    choices: Choices,
    policy: Policy,
    n_predict: int,
    *,
    cancel: bool = True,
    partitions: bool = True,
    larger: Sequence[Choices] = (),
    lookup: Drafter | None = None,
) -> Simulated:
    """Generate `n_predict` tokens after the choices' prompt. `cancel`, `partitions`: off for ablation studies.
    `larger`: the choices of each larger draft of the profile; `lookup`: guesses in no time where the profile has no
    draft. Raises UserError if the choices end too early."""
    n_prompt = len(choices.prompt)
    if n_prompt + n_predict > choices.n_tokens:
        recorded = f"the {choices.n_tokens - n_prompt} tokens that were recorded"
        raise UserError(f"-n {n_predict} is more than {recorded}; lower it or record more")
    clock = VirtualClock()
    tracer = Tracer(clock)
    n_ctx = n_prompt + n_predict
    n_seq, n_cells = policy.n_sequences if partitions else 1, n_ctx + N_CELLS_SPARE
    target = SimPipeline(profile, [choices], clock)
    n_rows = policy.n_rows
    drafts = [
        _draft_level(profile, number, guesses, clock, n_seq, n_cells, n_rows)
        for number, guesses in enumerate(larger, start=1)
    ]
    # a head that has layers has no draft: another rank has it
    remote = [_draft_level(profile, 0, choices, clock, n_seq, n_cells, n_rows)] if profile.drafts_elsewhere else []
    pipelines = (target, *(level.sim_pipeline for level in (*remote, *drafts)))
    for pipeline in pipelines:
        pipeline.neighbours = pipelines
    local = SimDrafter(profile, [choices], pipelines, n_rows) if profile.drafts and not remote else None
    pool = SequencePool(n_seq, n_cells, parked=profile.parked)
    level = Level(target, pool, n_chunk=N_CHUNK, n_rows=n_rows, cancel=cancel, blocks=profile.blocks)
    drafter = remote[0] if remote else local or lookup
    engine = Engine(level, drafter, SimWaiter(clock), clock, drafts=drafts, run_cost=run_cost(profile, n_cells))
    if local:
        local.timeout_s = engine.timeout_s
    request = Request(0, choices.prompt, n_predict, SamplingParams(temp=0.0), n_ctx)
    metrics = RequestMetrics(tracer)
    engine.add(request, policy, metrics)
    engine.complete()
    return Simulated(profile, request, metrics, target, tracer)


def _draft_level(
    profile: Profile, number: int, choices: Choices, clock: VirtualClock, n_seq: int, n_cells: int, n_rows: int
) -> SimDraftLevel:
    """A draft on a rank of its own, behind one link."""
    cost = profile.drafts[number]
    pipeline = SimPipeline(replace(profile, stages=(cost,), drafts=(), head_is_first=False), [choices], clock)
    return SimDraftLevel(
        pipeline, [choices], SequencePool(n_seq, n_cells), largest_question(stage_rows(cost)) if number else n_rows
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with prompts of `prompt_tokens` and texts of `predict` tokens, at most `parallel` open at a time. They
    arrive as a Poisson process, `rate` a second, or at once if that is infinite; or, with a `concurrency`, from so
    many clients, each of which sends the next when it has its text. `max_delay_s`: as in `core.batch_planner`."""

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
        """The most requests that are open at a time."""
        return self.concurrency or self.parallel


def arrivals_s(n_requests: int, rate: float, seed: int) -> list[float]:
    """Arrival times after the first request, the same for the same seed."""
    if math.isinf(rate):
        return [0.0] * n_requests
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, n_requests)
    return [float(when_s) for when_s in np.cumsum(gaps_s) - gaps_s[0]]


class LoadWaiter(SimWaiter):
    """Waits at most until the next request arrives."""

    next_s = math.inf

    def wait(self, pipelines: Sequence[SimPipeline], timeout_s: float | None = None) -> None:
        arrival_s = max(0.0, self.next_s - self.clock.now)
        super().wait(pipelines, arrival_s if timeout_s is None else min(timeout_s, arrival_s))


def synthetic_texts(load: Load, by_rank: Sequence[float], ageing: Sequence[float] = ()) -> list[SyntheticChoices]:
    """A text for each request. `by_rank`, `ageing`: as in SyntheticChoices."""
    seeds = range(load.seed * load.n_requests, (load.seed + 1) * load.n_requests)
    return [SyntheticChoices(by_rank, seed, load.prompt_tokens, ageing=ageing) for seed in seeds]


def simulate_load(profile: Profile, policy: Policy, load: Load, choices: Sequence[Choices]) -> dict[str, Any]:
    """Throughput, latencies and how busy the stages were. `choices`: for each request; texts end after `load.predict`
    tokens, or with their choices. `busy`: the share of the time between the first and the last token that each stage
    worked; `evaluating`: without the work of its host. `notice`: why the load's limit of delays cannot be held, if
    so."""
    clock = VirtualClock()
    n_ctx = max(len(each.prompt) + n_predicted(each, load.predict) for each in choices)
    pipeline = SimPipeline(profile, choices, clock)
    n_seq = policy.n_sequences + load.n_open - 1
    n_cells = load.n_open * n_ctx + N_CELLS_SPARE
    pool = SequencePool(n_seq, n_cells, parked=profile.parked)
    arriving_s, waiter = deque(arrivals_s(load.n_requests, load.rate, load.seed)), LoadWaiter(clock)
    chunk_s = max(stage.seconds(BLOCK, 0) for stage in profile.stages)
    drafter = SimDrafter(profile, choices, (pipeline,), policy.n_rows) if profile.drafts else None
    emissions: list[Emission] = []
    level = Level(pipeline, pool, n_chunk=N_CHUNK, n_rows=max(policy.n_rows, load.n_open), blocks=profile.blocks)
    cost, max_delay_s = run_cost(profile, n_cells, (BLOCK, chunk_s)), load.max_delay_s
    engine = Engine(level, drafter, waiter, clock, emissions.extend, run_cost=cost, max_delay_s=max_delay_s)
    if drafter:
        drafter.timeout_s = engine.timeout_s
    metrics = [RequestMetrics() for _ in choices]
    number = n_open = 0
    while engine.busy or arriving_s:
        if not engine.busy:
            clock.now = max(clock.now, arriving_s[0])
        while arriving_s and arriving_s[0] <= clock.now and n_open < load.n_open:
            text = choices[number]
            n_predict = n_predicted(text, load.predict)
            request = Request(number, text.prompt, n_predict, SamplingParams(temp=0.0), n_ctx)
            engine.add(request, policy.begin(), metrics[number])
            arrival_s = arriving_s.popleft()
            if not load.concurrency:  # a client sends it when it has its text: now
                metrics[number].submitted_s = arrival_s
            number, n_open = number + 1, n_open + 1
        waiter.next_s = arriving_s[0] if arriving_s and n_open < load.n_open else math.inf
        engine.step()
        n_open -= len({emission.request.id for emission in emissions if emission.request.finish})
        emissions.clear()
    notice = engine.batches.too_short
    return _figures(load, pipeline, metrics) | ({"notice": notice} if notice else {})


def _figures(load: Load, pipeline: SimPipeline, metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    _, figures = load_figures(metrics, has_rate=not load.concurrency and math.isfinite(load.rate))
    window = min(each.token_s[0] for each in metrics), max(each.token_s[-1] for each in metrics)
    return figures | {
        "busy": [stage_time(stage.ledger.moved(0.0), {}, window).work_share for stage in pipeline.stages],
        "evaluating": [stage.evaluated_s / figures["wall_s"] for stage in pipeline.stages],
    }
