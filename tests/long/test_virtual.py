"""The engine for 24 hours of virtual time on eight stages, under random settings: the tokens that the choices dictate,
nothing held after a generation, no memory that grows. A case follows from its number.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from itertools import count

import pytest

from pipeinfer.cluster.hosts.resources import resident_bytes
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Finish, Request
from pipeinfer.core.run_cost import interpolate
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.virtual.choices import SyntheticChoices, ranks_for
from pipeinfer.virtual.costs import LinkCost, Profile, run_cost
from pipeinfer.virtual.drafts import SimDrafter, SimDraftLevel
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from pipeinfer.virtual.profile import ProfileFile, load_profile
from tests.long.auditing import AuditedEngine, Memory, random_policy, some

pytestmark = pytest.mark.long

VIRTUAL_S = 24 * 3600.0
"""The heap takes some ten hours to find its size."""


def test_hours_of_random_generations() -> None:
    file, memory, virtual_s, n_tokens = load_profile("pipeinfer-b"), Memory(), 0.0, 0
    for number in count():
        engine, setting = _simulate(random.Random(number), file)
        assert _faults(engine) == [], f"case {number}: {setting}"
        virtual_s += engine.clock()
        n_tokens += engine.request.n_generated
        del engine
        interpolate.cache_clear()  # bounded, but filling it for hours would look like growth
        gc.collect()
        memory.samples.append(resident_bytes())
        if virtual_s >= VIRTUAL_S:
            break
    print(f"\n{number + 1} generations, {n_tokens} tokens, memory at {memory}")
    assert not memory.grows, memory


def _simulate(rng: random.Random, file: ProfileFile) -> tuple[AuditedEngine, str]:
    """One random generation in virtual time; the engine after it, and its settings in words."""
    policy = random_policy(rng)
    profile = _random_profile(rng, file, policy.drafts)
    n_prompt, n_predict = rng.randint(1, some(rng, 8, 128, 1000)), some(rng, 1, 30, 100, 500)
    choices = SyntheticChoices(ranks_for(some(rng, 0.0, 0.3, 0.7, 0.95, 1.0)), rng.getrandbits(30), n_prompt)
    clock = VirtualClock()
    n_seq, n_ctx = some(rng, 1, 2, 5, 31, 31), n_prompt + n_predict
    n_cells = n_ctx + some(rng, 0, 1, 9, 60, 512, 512)
    drafts = [
        _random_level(rng, profile, number, choices, clock, SequencePool(n_seq, n_cells))
        for number in range(1, len(profile.drafts))
    ]
    target = SimPipeline(profile, [choices], clock)
    pipelines = (target, *(level.sim_pipeline for level in drafts))
    for pipeline in pipelines:
        pipeline.neighbours = pipelines
    pool = SequencePool(n_seq, n_cells, parked=rng.random() < 0.5)
    drafter = SimDrafter(profile, [choices], pipelines) if profile.drafts else None
    engine = AuditedEngine(
        Level(target, pool, n_chunk=some(rng, 16, 128), n_rows=some(rng, 3, 32), cancel=rng.random() < 0.85),
        drafter,
        SimWaiter(clock),
        clock,
        drafts=drafts,
        run_cost=run_cost(profile, n_cells) if rng.random() < 0.8 else None,
    )
    if drafter:
        drafter.timeout_s = engine.timeout_s
    engine.add(Request(0, choices.prompt, n_predict, SamplingParams(temp=0.0), n_ctx), policy)
    engine.complete()
    return engine, f"{policy}, {n_prompt}+{n_predict} tokens, {pool.n_cells} cells, {n_seq} sequences"


def _random_profile(rng: random.Random, file: ProfileFile, has_draft: bool) -> Profile:
    """Eight stages of one of the file's pairs, with links fast or slow, at times with larger drafts too."""
    profile = file.lay_out(8 + has_draft, rng.choice(file.pairs), has_draft)
    drafts = [
        replace(draft, layers=n * draft.layers) for draft in profile.drafts for n in some(rng, (1,), (1, 3), (1, 2, 4))
    ]
    link = LinkCost(some(rng, 0.0, 50e-6, 5e-3), some(rng, 0.1, 1.0, 100.0) * 1e9 / 8)
    return replace(profile, link=link, drafts=tuple(drafts))


def _random_level(
    rng: random.Random,
    profile: Profile,
    number: int,
    choices: SyntheticChoices,
    clock: VirtualClock,
    pool: SequencePool,
) -> SimDraftLevel:
    """A larger draft on its own rank, that is right more or less often than the smaller ones."""
    alone = replace(profile, stages=(profile.drafts[number],), drafts=(), head_is_first=False)
    by_rank = ranks_for(some(rng, 0.1, 0.8, 1.0))
    larger = SyntheticChoices(by_rank, rng.getrandbits(30), len(choices.prompt), beside=choices)
    return SimDraftLevel(SimPipeline(alone, [larger], clock), [larger], pool, some(rng, 1, 2, 4))


def _faults(engine: AuditedEngine) -> list[str]:
    request, pipeline = engine.request, engine.target.pipeline
    assert isinstance(pipeline, SimPipeline)
    expected = [pipeline.choices[0].target(position) for position in range(request.n_ctx)]
    found = [] if request.tokens == expected else [f"{len(request.tokens)} tokens differ"]
    found += [] if request.finish is Finish.LENGTH else [f"finished by {request.finish}"]
    return found + [f"it keeps {leak}" for leak in engine.leaks()]
