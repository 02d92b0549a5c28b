"""The measured cost of rows, and what is chosen by it."""

from __future__ import annotations

import itertools

import pytest

from pipeinfer.cluster.calibrate import cheapest_microbatch, interpolate_cost, slowest_stage, time_rows
from tests.toy import ToyStage


def test_timing_leaves_the_cache_empty() -> None:
    stage, ticks = ToyStage(0, 2, False, n_cells=16, parked=True), itertools.count()
    found = time_rows(stage, lambda: float(next(ticks)), budget_s=100)
    assert set(found) == {1, 2, 3, 4} and all(seconds == 1 for seconds in found.values())
    assert not stage.cells() and not stage.n_parked


def test_one_row_is_timed_even_without_a_budget() -> None:
    ticks = itertools.count()
    assert set(time_rows(ToyStage(0, 1, True), lambda: float(next(ticks)), budget_s=0)) == {1}


def test_the_slowest_stage_decides() -> None:
    cost = slowest_stage([{1: 1.0, 2: 1.1, 4: 1.9}, {1: 0.5, 2: 1.2, 3: 9.0, 4: 1.3}])
    assert cost == {1: 1.0, 2: 1.2, 4: 1.9}
    assert cheapest_microbatch(cost) == 2
    assert cheapest_microbatch({}) == 1


def test_cost_of_any_size() -> None:
    assert interpolate_cost({}) is None
    at = interpolate_cost({1: 1.0, 2: 2.0, 4: 3.0})
    assert at and [at(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1, 2, 2.5, 3, 4])
