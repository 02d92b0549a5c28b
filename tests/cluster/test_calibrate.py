"""The measured cost of rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeinfer import __version__
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.timed_runs import (
    CONTEXTS,
    ROWS,
    largest_question,
    recall_context,
    recall_rows,
    slowest_stage,
    time_context,
    time_rows,
)
from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.core.types import FloatArray
from pipeinfer.disk_cache import DiskCache
from pipeinfer.job.loading.stages import time_stage
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.ggml import describe_build
from pipeinfer.policies import Iterative
from tests.support.planned import lay_out, options_of
from tests.support.toy import ToyStage


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


class ReshapingStage(ToyStage):
    """A row takes a millisecond, and half of one a run of another size than the one before."""

    elapsed_s, n_before = 0.0, 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        n_rows = len(batch.tokens)
        self.elapsed_s += 1e-3 * n_rows + 5e-4 * (n_rows != self.n_before)
        self.n_before = n_rows
        return super().evaluate(batch, stop)


def test_several_rows_come_between_single_ones() -> None:
    stage = ReshapingStage(0, 2, False, n_cells=64)
    found = time_rows(stage, lambda: stage.elapsed_s)
    assert found == pytest.approx({1: 1e-3, 2: 2.5e-3, 3: 3.5e-3, 4: 4.5e-3})


class CountingStage(ToyStage):
    """A run of any size takes `run_s`."""

    elapsed_s, n, run_s = 0.0, 0, 1e-3

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.n += 1
        self.elapsed_s += self.run_s
        return super().evaluate(batch, stop)


def recall(kept: DiskCache, run_s: float, name: str = "m") -> tuple[dict[int, float], int]:
    """What is found, and how many evaluations it took."""
    stage = CountingStage(0, 2, False, n_cells=64)
    stage.run_s = run_s
    return recall_rows(stage, lambda: stage.elapsed_s, kept, name), stage.n


def test_what_was_timed_is_kept_and_follows_the_speed_of_now(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path)
    first, n_first = recall(kept, 1e-3)
    again, n_again = recall(kept, 1e-3)
    assert tuple(first) == tuple(again) == ROWS and again == pytest.approx(first) and n_again < 5 < n_first
    slower, n_slower = recall(kept, 3e-3)  # others compute here now
    assert slower == pytest.approx({n_rows: 3 * seconds for n_rows, seconds in first.items()}) and n_slower < 5
    _, n_other = recall(kept, 1e-3, "another model")
    assert n_other == n_first


def test_what_was_timed_on_a_busy_host_is_timed_anew(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path)
    recall(kept, 1e-3)
    faster, n = recall(kept, 1e-4)
    assert n > 5 and recall(kept, 1e-4)[0] == pytest.approx(faster)


@pytest.mark.parametrize(
    "junk",
    [[], "x", {"1": 0.0}, {"1": "a"}, {"2": 1.0}, {"1": 1.0, "5": 1.0}, {"1": 1e999}, {"1": 1.0, "2": 2.0, "3": 6.0}],
)
def test_a_kept_value_that_is_no_cost_is_timed_anew(tmp_path: Path, junk: object) -> None:
    kept = DiskCache(tmp_path)
    kept.put("m", junk)
    found, n = recall(kept, 1e-3)
    assert tuple(found) == ROWS and n > 5


def test_a_table_that_a_disturbance_cut_short_is_not_kept(tmp_path: Path) -> None:
    class DisturbedOnce(CountingStage):
        def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
            if len(batch.tokens) == 3 and self.n < 8:
                self.elapsed_s += 0.05
            return super().evaluate(batch, stop)

    stage, kept = DisturbedOnce(0, 2, False, n_cells=64), DiskCache(tmp_path)
    assert max(recall_rows(stage, lambda: stage.elapsed_s, kept, "m")) == 3
    assert kept.get("m") is None


def test_a_size_that_costs_more_than_its_rows_one_by_one_was_disturbed(tmp_path: Path) -> None:
    """Then the table is of this job alone: kept, it would only ever be scaled."""

    class Disturbed(DearStage):
        def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
            self.elapsed_s += 4 * (len(batch.tokens) == 2)
            return super().evaluate(batch, stop)

    kept = DiskCache(tmp_path)
    for kind, is_kept in ((Disturbed, False), (DearStage, True)):
        stage = kind(0, 2, False, n_cells=64)
        assert len(recall_rows(stage, partial(getattr, stage, "elapsed_s"), kept, "m", 1000.0)) > 1
        assert (kept.get("m") is not None) == is_kept


class AttentiveStage(ToyStage):
    """A row takes `row_s`, and `context_s` for each token before the run."""

    elapsed_s, row_s, context_s, n = 0.0, 1e-3, 2e-6, 0

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.n += 1
        self.elapsed_s += len(batch.tokens) * (self.row_s + self.context_s * int(batch.positions[0]))
        return super().evaluate(batch, stop)


def attentive(row_s: float = 1e-3) -> AttentiveStage:
    stage = AttentiveStage(0, 2, False, n_cells=512, parked=True)
    stage.row_s = row_s
    return stage


def test_what_a_context_costs_is_found_where_it_takes_no_time() -> None:
    stage = attentive()
    times = {1: 1e-3, 2: 2e-3, 8: 8e-3}
    assert time_context(stage, times, 512, lambda: stage.elapsed_s) == pytest.approx(2e-6)
    assert not stage.cells() and not stage.n_parked and stage.elapsed_s < 1
    assert time_context(stage, {1: 1e-3}, 512, lambda: stage.elapsed_s) == pytest.approx(2e-6)


def test_what_a_context_costs_is_left_to_be_learned_elsewhere() -> None:
    """Of a dear model, whose context would take seconds, and where the cache holds next to nothing."""
    for stage, row_s, n_cells in ((attentive(0.1), 0.1, 512), (attentive(), 1e-3, CONTEXTS[0])):
        assert time_context(stage, {1: row_s}, n_cells, partial(getattr, stage, "elapsed_s")) is None
        assert stage.n == 0


def test_costs_at_loading_are_kept_under_all_that_they_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build of llama.cpp and the threads of ranks beside it too, and again after the same start."""
    stage = attentive()
    monkeypatch.setattr("pipeinfer.job.loading.stages.time", SimpleNamespace(monotonic=lambda: stage.elapsed_s))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = [Host("a", frozenset(range(4)), 4, processor="x")] * 2
    options = options_of(model=TARGET, drafts=(), policy=Iterative(), threads=(1, 3))
    plan = lay_out(options, hosts, read_model_info(TARGET), [], 512, 32)
    context: Any = SimpleNamespace(rank=0)
    found = time_stage(context, plan, cast(LoadedModel, stage))
    assert found.context_s == pytest.approx(2e-6) and found.rows[2] == pytest.approx(2e-3) and found.chunk is None
    n, names = stage.n, [json.loads(path.read_text())["name"] for path in tmp_path.rglob("*.json")]
    own = plan.assignment.stages[0].layers
    versions = f"pipeinfer {__version__}, {describe_build()}"
    words = f" {own} exact, x, a, 4 cores, 1 threads, -ngl 0, threads there 1 3, {versions}"
    assert sorted(name.partition(": ")[0] for name in names if name.endswith(words)) == ["context", "row times"]
    assert time_stage(context, plan, cast(LoadedModel, stage)).rows == pytest.approx(found.rows)
    assert stage.n < n + 6, "known from the first time"


def test_what_a_context_costs_is_kept_in_units_of_a_row(tmp_path: Path) -> None:
    kept, stage = DiskCache(tmp_path), attentive()
    times = {1: 1e-3, 2: 2e-3}
    assert recall_context(stage, times, CONTEXTS[0], lambda: stage.elapsed_s, kept, "m") is None, "a small cache"
    assert recall_context(stage, times, 512, lambda: stage.elapsed_s, kept, "m") == pytest.approx(2e-6)
    n = stage.n
    slower = {n_rows: 3 * seconds for n_rows, seconds in times.items()}
    assert recall_context(stage, slower, 512, lambda: stage.elapsed_s, kept, "m") == pytest.approx(6e-6)
    assert stage.n == n
    junks: tuple[object, ...] = ([], "x", -1.0, 1e999, True)
    for junk in junks:
        kept.put("m", junk)
        assert recall_context(stage, times, 512, lambda: stage.elapsed_s, kept, "m") == pytest.approx(2e-6)
