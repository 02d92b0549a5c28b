"""The measured cost of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pipeinfer.cluster.calibrate import ROWS, largest_question, slowest_stage, time_rows
from pipeinfer.interfaces import Batch, FloatArray
from tests.toy import ToyStage


def test_timing_leaves_the_cache_empty() -> None:
    stage, ticks = ToyStage(0, 2, False, n_cells=64, parked=True), itertools.count()
    found = time_rows(stage, lambda: float(next(ticks)), budget_s=100)
    assert tuple(found) == ROWS and all(seconds == 1 for seconds in found.values())
    assert not stage.cells() and not stage.n_parked


def test_one_row_is_timed_even_without_a_budget() -> None:
    ticks = itertools.count()
    assert set(time_rows(ToyStage(0, 1, True), lambda: float(next(ticks)), budget_s=0)) == {1}


def test_the_slowest_stage_decides() -> None:
    cost = slowest_stage([{1: 1.0, 2: 1.1, 4: 1.9}, {1: 0.5, 2: 1.2, 3: 9.0, 4: 1.3}])
    assert cost == {1: 1.0, 2: 1.2, 4: 1.9}
    assert slowest_stage([]) == {}


def test_a_question_is_large_enough_to_get_ahead() -> None:
    assert largest_question({}) == largest_question({1: 1.0, 2: 1.9}) == 4
    assert largest_question({1: 1.0, 2: 1.0, 8: 1.2, 12: 2.0}) == 8


class DisturbedStage(ToyStage):
    """Every third evaluation takes ten times as long."""

    elapsed_s, n = 0.0, 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.n += 1
        self.elapsed_s += 1e-4 * (10 if self.n % 3 == 0 else 1)
        return super().evaluate(batch, stop)


def test_what_disturbs_for_a_moment_does_not_count() -> None:
    stage = DisturbedStage(0, 2, False, n_cells=64)
    found = time_rows(stage, lambda: stage.elapsed_s)
    assert tuple(found) == ROWS and list(found.values()) == pytest.approx([1e-4] * len(ROWS))


class DearStage(ToyStage):
    """A row costs as much as the one before it: nothing is saved by a larger run."""

    elapsed_s = 0.0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.elapsed_s += len(batch.tokens)
        return super().evaluate(batch, stop)


def test_sizes_that_cost_too_much_are_not_timed() -> None:
    stage = DearStage(0, 2, False, n_cells=64)
    assert time_rows(stage, lambda: stage.elapsed_s, budget_s=1000) == {1: 1, 2: 2, 3: 3, 4: 4}
