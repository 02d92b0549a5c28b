"""Guesses that cost more time than they save rest, and are tried again now and then."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, Settled
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Auto, Iterative
from pipeinfer.policies.learning import (
    LEAST_REST,
    LONGEST_REST,
    LONGEST_TRY,
    N_WITH,
    N_WITHOUT,
    PauseNotices,
    SpeculationBackoff,
    SpeculationTrial,
)
from pipeinfer.virtual.choices import SyntheticChoices, ranks_for, synthetic_team
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work, run_cost
from pipeinfer.virtual.drafts import SimDrafter
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from pipeinfer.virtual.simulation import simulate


def told(trial: SpeculationTrial, n_tokens: int, with_s: float, without_s: float = 1.0) -> tuple[list[bool], list[str]]:
    """Of so many tokens, one a verdict: whether each was made without guesses, and what was said."""
    rested, said = [], []
    for _ in range(n_tokens):
        rested.append(trial.rests)
        if line := trial.settled(1, without_s if trial.rests else with_s, lambda _: without_s, 0):
            said.append(line)
    return rested, said


def test_guesses_that_cost_time_rest_within_some_tens_of_tokens() -> None:
    trial = SpeculationTrial()
    rested, said = told(trial, 4000, with_s=1.2)
    assert not any(rested[:N_WITH]) and all(rested[2 * N_WITH : 2 * N_WITH + LEAST_REST])
    assert len(said) == 1 and "0.8 tokens/s with them, 1.0 without" in said[0]
    tries = [at for at in range(1, 4000) if rested[at - 1] and not rested[at]]
    rests = [second - first for first, second in pairwise(tries)]
    assert 2 <= len(tries) <= 8 and rests == sorted(rests) and rests[-1] <= LONGEST_REST + 2 * N_WITH
    assert sum(rested) > 0.97 * len(rested)


def test_the_longer_a_try_takes_the_longer_they_rest() -> None:
    little, much = SpeculationTrial(), SpeculationTrial()
    assert sum(told(much, 400, with_s=3.0)[0]) > sum(told(little, 400, with_s=1.1)[0]) + N_WITH


def test_guesses_that_surely_save_time_are_not_put_to_the_test() -> None:
    rested, said = told(SpeculationTrial(), 2000, with_s=0.5)
    assert not any(rested) and not said


def test_guesses_that_save_little_are_tested_and_go_on() -> None:
    rested, said = told(SpeculationTrial(), 1000, with_s=0.93)
    assert 0 < sum(rested) <= 5 * (N_WITHOUT + 2) and not said


def test_guesses_that_save_time_again_go_on() -> None:
    trial = SpeculationTrial()
    told(trial, 200, with_s=1.5)
    assert trial.rests
    rested, said = told(trial, 3000, with_s=0.6)
    assert said == ["guesses save time again: speculation goes on"] and not any(rested[-500:])


def test_requests_of_a_session_share_what_a_token_takes_without_guesses() -> None:
    first = SpeculationTrial()
    told(first, 100, with_s=0.93)
    rested, said = told(SpeculationTrial(first.without), 100, with_s=0.93)
    assert not any(rested) and not said
    rested, said = told(SpeculationTrial(first.without), 100, with_s=1.2)
    assert not any(rested[:N_WITH]) and all(rested[N_WITH + 2 : N_WITH + LEAST_REST]) and len(said) == 1


def test_what_a_token_takes_is_not_moved_by_what_is_learned_of_costs() -> None:
    """It was multiplied by the ratio of two estimates, one of before, which others on the host had disturbed."""
    first = SpeculationTrial()
    told(first, 60, with_s=0.93)
    disturbed = SpeculationTrial(first.without)
    for _ in range(60):
        assert not disturbed.settled(1, 0.93, lambda n_before: 0.1, 0) and not disturbed.rests
    lengthened = SpeculationTrial(first.without)
    for _ in range(N_WITH + 2):
        assert not lengthened.settled(1, 1.8, lambda n_before: 0.1 * (1 + n_before / 1000), 1000)
    assert not lengthened.rests, "after a longer context a token takes longer without guesses too"


def test_each_change_is_said_once_whichever_request_meets_it() -> None:
    first = SpeculationTrial()
    said = [
        line
        for with_s in (1.2, 1.3, 0.5, 0.6, 1.2)
        for line in told(SpeculationTrial(first.without, first.notices), 60, with_s)[1]
    ]
    assert [line.partition(":")[0] for line in said] == [
        "guesses cost time here",
        "guesses save time again",
        "guesses cost time here",
    ]
    backoffs, root = [SpeculationBackoff(PauseNotices())], Node(1, 0)
    settled = Settled([root, root], [1])
    backoffs += [SpeculationBackoff(backoffs[0].notices) for _ in range(3)]
    lines = [each.settled(settled, hit_rate) for each, hit_rate in zip(backoffs, (0.01, 0.02, 0.5, 0.6), strict=True)]
    assert "hardly any guess" in lines[0] and "right again" in lines[2] and not lines[1] + lines[3]


def test_a_try_after_silence_lasts_until_a_guess_was_judged() -> None:
    backoff, root = SpeculationBackoff(), Node(1, 0)
    none = Settled([root, root], [1])
    right, wrong = (Settled([root, root], [1], 1, hit, [([root], root if hit else None)]) for hit in (1, 0))
    assert backoff.settled(wrong, 0.01) and backoff.holds
    for judged, n_roots in ((wrong, 4), (wrong, 8), (right, 16), (wrong, 4)):
        for _ in range(n_roots):
            assert backoff.holds
            backoff.settled(none, 0.01)
        for _ in range(LONGEST_TRY - 1):  # the draft reads what came meanwhile
            assert not backoff.holds
            backoff.settled(none, 0.01)
        backoff.settled(judged, 0.01)
    assert backoff.holds
    for _ in range(8 + LONGEST_TRY):
        backoff.settled(none, 0.01)
    assert backoff.holds, "a draft that guesses nothing is asked no longer"
    assert "right again" in backoff.settled(right, 0.5) and not backoff.holds


# -- in virtual time


def profile(n_stages: int, row_share: float, slowdown: tuple[float, ...], elsewhere: bool) -> Profile:
    """A token takes 30 ms, a step of the draft 10 ms, further rows `row_share` of the first. All ranks share a host."""
    rows = (1.0, 2.0, 8.0)
    shares = tuple(1 + row_share * (n_rows - 1) for n_rows in rows)
    stage = ModelCost("stage", 1, Work(rows, tuple(0.03 / n_stages * each for each in shares)))
    draft = ModelCost("d", 1, Work(rows, (0.01, 0.015, 0.045)))
    return Profile(
        "one host",
        1536,
        (stage,) * n_stages,
        (draft,),
        LinkCost(3e-5, 1e9),
        HeadCost(),
        head_is_first=elsewhere,
        sleeps=True,
        slowdown=slowdown,
    )


def tokens_a_second(policy: Policy, cluster: Profile, acceptance: float) -> float:
    (choices,) = synthetic_team([ranks_for(acceptance)], 1, 600)
    token_s = simulate(cluster, choices, policy, 512).metrics.token_s
    return (len(token_s) - 1) / (token_s[-1] - token_s[0])


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.85])
def test_auto_hardly_loses_where_a_draft_takes_the_stages_cores(
    n_stages: int, elsewhere: bool, acceptance: float
) -> None:
    """Without trials it made down to 0.4 as many tokens a second as without guesses."""
    cluster = profile(n_stages, 1.0, (1.0, 1.7, 2.6, 3.5), elsewhere)
    assert tokens_a_second(Auto(), cluster, acceptance) > 0.95 * tokens_a_second(Iterative(), cluster, acceptance)


def test_auto_still_gains_where_guesses_do() -> None:
    cluster = profile(3, 0.3, (), True)
    assert tokens_a_second(Auto(), cluster, 0.85) > 2.0 * tokens_a_second(Iterative(), cluster, 0.85)


def test_a_draft_that_was_timed_while_the_host_was_busy_is_tried_again() -> None:
    """Its steps seem to take nearly as long as tokens, and none is made by which that could be known better."""
    stage, draft = ModelCost("stage", 8, Work((1.0,), (0.05 / 8,))), ModelCost("draft", 2, Work((1.0,), (0.0025,)))
    cluster = replace(Profile("lone", 256, (stage,), (draft,), LinkCost(1e-6, 1e10), HeadCost()), head_is_first=True)
    clock, policy = VirtualClock(), Auto()
    choices = [SyntheticChoices((0.8, 0.06), seed, 20) for seed in range(6)]
    pipeline = SimPipeline(cluster, choices, clock)
    drafter = SimDrafter(cluster, choices, (pipeline,))
    costs, level = run_cost(cluster, 234), Level(pipeline, SequencePool(32, 234), n_chunk=128, n_rows=32)
    engine = Engine(level, drafter, SimWaiter(clock), clock, run_cost=costs, draft_s=0.045)
    drafter.timeout_s = engine.timeout_s
    steps = []
    for number, text in enumerate(choices):
        request = Request(number, text.prompt, 150, SamplingParams(temp=0.0), 170)
        engine.add(request, policy.begin(), metrics := RequestMetrics())
        engine.complete()
        steps.append(metrics.n_draft_steps)
    assert steps[0] == 0 and min(steps[-2:]) > 50 and engine.speculator.step_s < 0.01
