"""How many threads are fastest is found by trying, at little cost, and found anew when it changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pipeinfer.models.llama.thread_trials import MOST_ROWS, WAIT_MAX, ThreadTrials

ROW_S = 0.002
Speed = Callable[[int], float]  # of so many threads, over that of one


def evaluate(trials: ThreadTrials, speed: Speed, n: int, n_rows: int = 1, noise: float = 0.0, seed: int = 0) -> float:
    """Seconds that so many evaluations take."""
    rng, total_s = random.Random(seed), 0.0
    for _ in range(n):
        n_threads = trials.n_threads(n_rows)
        seconds = ROW_S / speed(n_threads) * (1 + noise * rng.random()) * (5 if rng.random() < noise / 10 else 1)
        trials.note(n_rows, n_threads, seconds)
        total_s += seconds
    return total_s


@pytest.mark.parametrize("most", [2, 3, 6, 8, 64])
def test_all_threads_stay_where_they_are_fastest_and_trying_costs_little(most: int) -> None:
    trials = ThreadTrials(most)
    assert evaluate(trials, float, 200) < 1.06 * 200 * ROW_S / most
    assert evaluate(trials, float, 2000) < 1.02 * 2000 * ROW_S / most


@pytest.mark.parametrize(("most", "fastest"), [(2, 1), (4, 1), (6, 3), (8, 4), (64, 16), (96, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_fewer_are_found_where_they_are_faster(most: int, fastest: int, noise: float) -> None:
    def speed(n: int) -> float:
        return min(n, fastest) / max(1.0, n / fastest) ** 0.5

    trials = ThreadTrials(most)
    evaluate(trials, speed, 600, noise=noise)
    found_s = evaluate(trials, speed, 1000, noise=noise, seed=1)
    least_s = sum(ROW_S / fastest * (1 + noise / 2) * (1 + noise / 10 * 4) for _ in range(1000))
    assert found_s < 1.05 * least_s


def test_two_processors_that_share_a_core_are_told_within_forty_tokens() -> None:
    trials = ThreadTrials(2)
    evaluate(trials, lambda n: 1.0 if n == 1 else 0.8, 40)
    assert {trials.n_threads(1) for _ in range(5)} == {1}


def test_what_has_changed_is_found_anew() -> None:
    trials = ThreadTrials(2)
    evaluate(trials, lambda n: 1.0 / n, 5000)
    assert trials.n_threads(1) == 1
    evaluate(trials, float, 2 * WAIT_MAX)
    assert evaluate(trials, float, 100) < 1.05 * 100 * ROW_S / 2


def test_numbers_of_rows_are_tried_apart_and_many_rows_not_at_all() -> None:
    trials = ThreadTrials(2)
    for _ in range(300):
        evaluate(trials, lambda n: 1.0 / n, 1, n_rows=1)
        evaluate(trials, float, 1, n_rows=16)
        assert trials.n_threads(MOST_ROWS + 1) == 2
    assert evaluate(trials, lambda n: 1.0 / n, 50, 1) < 1.1 * 50 * ROW_S
    assert evaluate(trials, float, 50, 16) < 1.1 * 50 * ROW_S / 2


def test_others_that_want_the_cores_end_a_trial() -> None:
    trials = ThreadTrials(8)
    for _ in range(500):
        trials.n_threads(1)
        trials.note(1, 3, ROW_S)  # as many as were to be had
    assert trials.n_threads(1) == 8
