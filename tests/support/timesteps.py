"""Policies in virtual time by given choices, where all takes whole seconds: when each run goes, and with what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import Guess, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.virtual.choices import Branch
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.drafts import SimDrafter
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from tests.support.audit import audit_engine, emitted

TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


@dataclass
class GivenChoices:
    """What follows which token, whatever came before; after all others two guesses that are wrong."""

    after: Mapping[int, Mapping[int, float]]
    prompt: Sequence[int] = TEXT[:1]
    n_tokens: int = len(TEXT)

    def target(self, position: int) -> int:
        return TEXT[min(position, len(TEXT) - 1)]

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        token = branch[-1] if branch else TEXT[start]
        found = self.after.get(token, {100 + 2 * token: 0.5, 101 + 2 * token: 0.5})
        return [Guess(guess, share) for guess, share in found.items()][:width]


def timesteps(
    policy: Policy,
    choices: GivenChoices,
    n_stages: int,
    n_predict: int,
    *,
    stage_s: float = 1.0,
    cancel: bool = True,
    known: bool = False,
) -> list[tuple[float, list[int]]]:
    """When each run went and its tokens, where every stage takes `stage_s` and every step of the draft a second.

    `known`: the engine knows what runs take, and holds them back until the first stage is about to want them.
    """
    stage, draft = (ModelCost(name, 1, Work((1.0,), (s,))) for name, s in (("stage", stage_s), ("draft", 1.0)))
    profile = Profile("steps", 4, (stage,) * n_stages, (draft,), LinkCost(0.0, math.inf), HeadCost())
    clock = VirtualClock()
    pipeline, sent = SimPipeline(profile, [choices], clock), []
    submit = pipeline.submit

    def noted(run: Run) -> None:
        sent.append((clock.now, [row.token for row in run.rows]))
        submit(run)

    pipeline.submit = noted  # type: ignore[method-assign]
    level = Level(pipeline, SequencePool(31, 200), cancel=cancel)
    cost = RunCost({1: stage_s, 64: stage_s}) if known else None
    drafter = SimDrafter(profile, [choices], [pipeline])
    engine = Engine(level, drafter, SimWaiter(clock), clock, run_cost=cost)
    drafter.timeout_s = engine.timeout_s
    request = Request(0, TEXT[:1], n_predict, SamplingParams(temp=0.0), 50)
    engine.add(request, policy)
    for _ in emitted(engine):
        audit_engine(engine)
    assert tuple(request.tokens) == TEXT[: 1 + n_predict]
    return sent
