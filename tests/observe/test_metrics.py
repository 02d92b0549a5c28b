"""Timestamps -> figures, by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import TokenTree
from pipeinfer.observe.figures import itl_s, percentiles, service_timings, speculation, timings
from pipeinfer.observe.metrics import RequestMetrics, why_no_guess
from pipeinfer.observe.trace import HeadLedger, StageLedger, head_time, stage_time
from pipeinfer.policies import Iterative, PipeInfer
from tests.core.test_engine import N_LAYERS, toy_engine, toy_pipeline
from tests.support.toy import OracleDrafter, Reference


def test_latencies_from_timestamps() -> None:
    metrics = RequestMetrics(submitted_s=10.0, n_prompt=4)
    metrics.token_s = [12.0, 12.5, 12.5, 14.0]
    metrics.finished_s = 14.5
    found = timings(metrics)
    assert itl_s(metrics) == [0.25, 0.25, 1.5], "tokens of one verdict share the gap before it"
    assert (found["ttft_s"], found["tpot_s"], found["itl_mean_s"]) == (2.0, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (found["prompt_per_second"], found["predicted_per_second"]) == (2.0, 1.5)
    assert (found["itl_p50_s"], found["total_s"]) == (0.25, 4.5)
    assert (found["itl_percentiles_s"][0], found["itl_percentiles_s"][100]) == (0.25, 1.5)


def test_what_a_service_tells_of_its_wait() -> None:
    """Who waits for room or another one's prompt waits until its first run; preempted it waits again."""
    turns = list[bool]()
    metrics = RequestMetrics(on_running=turns.append, submitted_s=10.0, n_prompt=5, n_kept=1, finished_s=20.0)
    metrics.opened(1)
    assert not turns and not metrics.is_running
    for now_s in (11.5, 11.75):
        metrics.run_sent(now_s, 2, 0, False, 0, 1)
    assert turns == [True]
    metrics.token_s = [12.0, 13.0]
    metrics.preempted()
    assert turns == [True, False] and not metrics.is_running
    metrics.run_sent(18.0, 3, 1, True, 0, 1)
    found = service_timings(metrics)
    assert turns == [True, False, True]
    assert (found["queued_s"], found["prompt_ms"], found["ttft_s"], found["total_s"]) == (1.5, 500.0, 2.0, 10.0)
    assert (found["prompt_per_second"], found["preempted_n"]) == (8.0, 1)
    assert (found["prompt_n"], found["cache_n"]) == (4, 1), "as llama-server counts them: evaluated, and not"
    assert math.isnan(service_timings(RequestMetrics(submitted_s=1.0))["queued_s"])


def test_no_tokens_and_one_token() -> None:
    metrics = RequestMetrics(submitted_s=1.0, n_prompt=1)
    assert math.isnan(timings(metrics)["ttft_s"])
    metrics.token_s = [2.0]
    found = timings(metrics)
    assert found["ttft_s"] == 1.0
    assert math.isnan(found["tpot_s"]) and math.isnan(found["predicted_per_second"])
    assert found["itl_percentiles_s"] == [] and all(map(math.isnan, percentiles([])))


def test_a_stage_waits_for_runs_under_way_and_idles_before() -> None:
    ledger = StageLedger()
    ledger.note(1, 0.0, 2.0, 5.0, False)  # sent at 1: idle 0-1, waiting 1-2
    ledger.note(2, 5.0, 5.5, 6.0, True)  # sent at 3, before the stage was free: waiting 5-5.5
    ledger.note(3, 6.0, 9.0, 10.0, False)  # sent at 8.5
    ledger.note(0, 10.0, 30.0, 30.0, False)  # the end
    use = stage_time(ledger.moved(100.0), {1: 101.0, 2: 103.0, 3: 108.5}, (100.0, 112.0))
    assert (use.wall_s, use.busy_s, use.cancelled_s) == (12.0, 4.0, 0.5)
    assert use.waiting_s == pytest.approx(1.0 + 0.5 + 0.5)
    assert use.idle_s == pytest.approx(1.0 + 2.5 + 2.0)
    assert use.busy_s + use.cancelled_s + use.waiting_s + use.idle_s == pytest.approx(use.wall_s)


def test_only_the_window_counts() -> None:
    ledger = StageLedger()
    ledger.note(1, 0.0, 1.0, 4.0, False)
    use = stage_time(ledger.moved(0.0), {1: 0.0}, (2.0, 5.0))
    assert (use.wall_s, use.busy_s, use.cancelled_s, use.waiting_s, use.idle_s) == (3.0, 2.0, 0.0, 0.0, 0.0)


def test_the_head_works_when_it_does_not_wait() -> None:
    ledger = HeadLedger(waits=[(0.0, 2.0), (5.0, 6.0)], cancelled=[(3.0, 3.5)])
    use = head_time(ledger, (1.0, 11.0))
    assert (use.waiting_s, use.cancelled_s, use.busy_s, use.idle_s) == (2.0, 0.5, 7.5, 0.0)


def test_guesses_are_judged_by_how_far_ahead_they_were_made() -> None:
    """The root's child is one token ahead, its grandchild two; once the root has moved, a guess counts from there."""
    tree, metrics = TokenTree(7, 10), RequestMetrics(submitted_s=0.0, n_prompt=1)
    (near,) = tree.grow(tree.root, [Guess(1, 0.9)], [-0.1])
    tree.grow(near, [Guess(2, 0.9)], [-0.1])
    tree.answer([tree.root], [1])
    metrics.settled(1.0, 1, tree.settle())
    (far,) = near.children
    tree.grow(far, [Guess(3, 0.9)], [-0.1])
    tree.answer([near, far], [2, 9])
    metrics.settled(2.0, 2, tree.settle())
    assert metrics.by_depth == {1: [1, 1], 2: [2, 1]}
    assert speculation(metrics)["by_depth"] == {"1": {"n": 1, "right": 1}, "2": {"n": 2, "right": 1}}


def test_a_draft_of_which_nothing_was_sent_is_explained() -> None:
    """Too slow, or never sure; nothing is said of texts with guesses, of short ones, and of jobs without a draft."""
    slow = RequestMetrics(submitted_s=0.0, n_prompt=1, n_draft_steps=10, n_draft_lost=10, draft_s=0.05)
    slow.token_s = [0.002 * index for index in range(40)]
    assert "answers in 2 ms" in why_no_guess(slow) and "steps of 5 ms, 10 of 10 given up" in why_no_guess(slow)
    late = replace(slow, n_draft_lost=0, n_drafted=12)
    assert "before the draft is done" in why_no_guess(late)
    assert "as many runs were in flight as the policy allows" in why_no_guess(replace(late, draft_s=0.01))
    unsure = replace(slow, n_draft_lost=0)
    assert "never sure enough" in why_no_guess(unsure)
    looked_up = replace(unsure, has_draft=False)
    short, idle = replace(slow, token_s=slow.token_s[:31]), replace(slow, n_draft_steps=0)
    for fine in (replace(slow, n_sent=1), short, idle, looked_up):
        assert not why_no_guess(fine)


@pytest.mark.parametrize("policy", [PipeInfer, Iterative])
def test_the_engine_says_why_no_guess_was_sent(policy: type[PipeInfer] | type[Iterative]) -> None:
    """With a drafter that is always interrupted."""
    rng, reference = random.Random(1), Reference(N_LAYERS)
    drafter = OracleDrafter(reference, 1.0)
    drafter.expand = lambda *_: None  # type: ignore[method-assign]
    engine = toy_engine(toy_pipeline(rng, 2, 500, False), SequencePool(4, 500), drafter)
    request = Request(0, [4], 40, SamplingParams(temp=0.0), 400)
    metrics = RequestMetrics()
    engine.add(request, policy(), metrics)
    engine.complete()
    assert len(metrics.notices) == (policy is PipeInfer) and metrics.n_sent == 0
    assert speculation(metrics)["draft_n_sent"] == 0
