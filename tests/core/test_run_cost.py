"""What a run costs: timed at loading, then learned."""

from __future__ import annotations

import random

import pytest

from pipeinfer.core.run_cost import RunCost

TIMED = {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.4, 16: 2.0}


def learned(scale: float, slope: float, context: int, sizes: tuple[int, ...], noise: float = 0.0) -> RunCost:
    """After 200 runs of random sizes that took scale × timed + slope × rows × context."""
    rng, cost = random.Random(5), RunCost(TIMED)
    truth = RunCost(TIMED)
    for position in range(context, context + 200):
        n_rows = rng.choice(sizes)
        seconds = scale * truth.seconds(n_rows, 0) + slope * n_rows * position
        cost.learn(n_rows, position, seconds * (1 + noise * rng.uniform(-1, 1)))
    return cost


def test_any_size() -> None:
    cost = RunCost({1: 1.0, 2: 2.0, 4: 3.0})
    assert [cost.seconds(n, 500) for n in (1, 2, 3, 4, 6)] == pytest.approx([1, 2, 2.5, 3, 4])
    assert RunCost({1: 2.0}).seconds(3, 0) == 6.0
    assert RunCost(TIMED).n_cheap_rows(9000) == 4


def test_a_slow_machine_makes_everything_dearer_and_leaves_the_choice() -> None:
    cost = learned(1.7, 0.0, 30, (1, 2, 4), noise=0.2)
    assert cost.seconds(2, 230) == pytest.approx(1.7 * 1.05, rel=0.1)
    assert cost.n_cheap_rows(230) == 4


@pytest.mark.parametrize("context", [1000, 8000])
def test_attention_makes_rows_dear_after_long_contexts(context: int) -> None:
    slope = 0.4 / context  # a row's attention costs 0.4 of its layers
    cost = learned(1.0, slope, context, (1, 2, 4, 8), noise=0.2)
    for n_rows in (1, 2, 8):
        expected = RunCost(TIMED).seconds(n_rows, 0) + slope * n_rows * (context + 200)
        assert cost.seconds(n_rows, context + 200) == pytest.approx(expected, rel=0.1)
    assert cost.n_cheap_rows(context + 200) == 1
    assert cost.n_cheap_rows(0) == 4


def test_single_rows_alone_say_what_the_context_costs_if_it_is_long() -> None:
    cost = learned(1.0, 0.5 / 4000, 4000, (1,))
    assert cost.seconds(1, 4200) == pytest.approx(1.525, rel=0.05)
    assert cost.n_cheap_rows(4200) == 1


def test_what_was_timed_of_attention_counts_from_the_first_run() -> None:
    cost = RunCost(TIMED, context_s=0.002)
    assert cost.seconds(2, 100) == pytest.approx(1.05 + 0.002 * 2 * 100)
    assert [cost.n_cheap_rows(context) for context in (0, 30, 400)] == [4, 2, 1]
    for position in range(100, 130):
        cost.learn(2, position, 1.5 * (1.05 + 0.002 * 2 * position))  # everything is slower, attention too
    assert cost.seconds(8, 100) == pytest.approx(1.5 * (1.4 + 0.002 * 8 * 100), rel=0.1)


def test_what_was_timed_of_attention_can_turn_out_too_much_and_never_below_nothing() -> None:
    """As with windows of attention: beyond them a context costs no more."""
    cost = RunCost(TIMED, context_s=0.0005)
    for position in range(4000, 4200):
        cost.learn(1 + position % 2, position, 1.2 + 0.1 * (position % 2))
    assert cost.seconds(2, 4200) == pytest.approx(1.3, rel=0.15) and cost.seconds(1, 0) > 0
    for position in range(4200, 8000, 10):
        cost.learn(1, position, 4.0 - position / 2000)
    assert cost.seconds(1, 9000) >= cost.seconds(1, 0) * 0.999 > 0


def test_one_interruption_does_not_count_for_much() -> None:
    cost = learned(1.0, 0.0, 100, (1, 2))
    cost.learn(2, 300, 1000.0)
    assert cost.seconds(2, 300) < 1.3


def test_runs_that_get_faster_with_the_context_teach_no_negative_slope() -> None:
    cost = RunCost(TIMED)
    for position in range(1000, 3000, 10):
        cost.learn(1, position, 2.0 - position / 2000)
    assert cost.seconds(1, 10_000) == pytest.approx(cost.seconds(1, 0))
    assert cost.seconds(1, 0) > 0


def test_chunks_of_prompts_fill_a_long_pipeline() -> None:
    """And are as large as they may be in a short one, on cores that are shared, and where rows cost nothing."""
    timed = {**TIMED, 32: 3.5, 64: 7.0, 128: 14.0}
    cost = RunCost(timed)
    through = {n: (31 - 1 + -(-256 // n)) * cost.seconds(n, 0) for n in timed}
    assert through[cost.n_chunk_rows(256, 31, 128)] <= 1.25 * min(through.values()) < through[128] / 2
    assert cost.n_chunk_rows(256, 31, 4) == 4 and cost.n_chunk_rows(3, 31, 128) <= 3
    assert cost.n_chunk_rows(256, 1, 128) == cost.n_chunk_rows(256, 2, 128) == 128
    assert RunCost(timed, crowding=31).n_chunk_rows(256, 31, 128) == 128
    assert RunCost({1: 1.0, 32: 1.0}).n_chunk_rows(256, 31, 128) >= 64
