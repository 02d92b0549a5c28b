"""When a run is due: as late as the slowest stage allows, earlier where times are not what they were thought to be."""

from __future__ import annotations

import math

import pytest

from pipeinfer.core.levels import InFlightRun
from pipeinfer.core.run_cost import LOOKAHEAD, MARGIN_S, Pacer, RunCost


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacer(clock: Clock) -> Pacer:
    """Of a stage that takes a tenth of a second a row, with one run on its way."""
    pacer = Pacer(RunCost({1: 0.1, 8: 0.2}), clock)
    pacer.sent(one_row())
    return pacer


def one_row(sent_s: float = 0.0, cost_s: float = 0.1, n_context: int = 0) -> InFlightRun:
    return InFlightRun(1, [], n_rows=1, n_context=n_context, n_before=0, sent_s=sent_s, cost_s=cost_s)


def pruned(flight: InFlightRun) -> InFlightRun:
    """It teaches nothing but that it is back."""
    flight.whole = False
    return flight


def due_s(pacer: Pacer, **given: float) -> float:
    found = pacer.due_s(0, **given)
    assert found > pacer.clock()
    return found


def test_a_run_is_due_just_before_the_slowest_stage_is_free(pacer: Pacer, clock: Clock) -> None:
    assert due_s(pacer) == pytest.approx(0.1 - MARGIN_S)
    clock.now = 0.1 - MARGIN_S
    assert pacer.due_s(0) <= clock.now


def test_it_is_due_earlier_where_costs_are_off_but_not_ever_earlier(pacer: Pacer) -> None:
    pacer.landed(one_row(), 0.12, 1.0)
    first_s = due_s(pacer)
    assert 0.1 - 0.5 * 0.1 < first_s < 0.1 - MARGIN_S
    for _ in range(100):
        pacer.landed(one_row(), 0.3, 1.0)
    assert pacer.run_cost and pacer.due_s(0) == pytest.approx(0.1 - LOOKAHEAD * pacer.run_cost.seconds(1, 0))


def test_it_is_due_earlier_where_the_head_is_late(pacer: Pacer, clock: Clock) -> None:
    """A busy machine, or a draft whose layers take long: asked 10 ms after it was due."""
    clock.now = due_s(pacer) + 0.010
    pacer.asked_late(0.010)
    pacer.landed(pruned(one_row()), 0.0, 0.0)
    pacer.sent(one_row())
    assert due_s(pacer) < clock.now + 0.1 - MARGIN_S - 0.002


def test_a_head_that_is_asked_in_time_is_not_late(pacer: Pacer, clock: Clock) -> None:
    before_s = due_s(pacer)
    clock.now = before_s / 2  # a verdict came
    assert due_s(pacer) == before_s
    clock.now = before_s
    pacer.asked_late(0.0)
    pacer.landed(pruned(one_row()), 0.0, 0.0)
    pacer.sent(one_row())
    assert due_s(pacer) == pytest.approx(clock.now + 0.1 - MARGIN_S)


def test_a_verdict_that_is_expected_is_waited_for_but_not_for_long(pacer: Pacer) -> None:
    plain_s = due_s(pacer)
    pacer.landed(one_row(sent_s=-plain_s - 0.02), 0.0, 1.0)
    assert due_s(pacer, oldest_sent_s=0.0, patience=0.2) == pytest.approx(plain_s + 0.02)
    assert due_s(pacer, oldest_sent_s=0.001, patience=0.2) == plain_s  # it comes too late
    assert due_s(pacer) == plain_s


def test_nothing_is_early_where_no_costs_are_known_or_runs_were_given_up(pacer: Pacer, clock: Clock) -> None:
    assert Pacer(None, clock).due_s(0) == -math.inf
    assert due_s(pacer) > 0
    pacer.given_up()
    assert pacer.due_s(0) == -math.inf


def test_what_a_verdict_takes_besides_is_the_least_of_late(pacer: Pacer) -> None:
    """What met a queue says nothing of the way; that it got longer is noticed by and by."""

    def came(on_way_s: float) -> float:
        pacer.landed(one_row(sent_s=-0.1 - on_way_s), 0.1, 1.0)
        return pacer.on_way_s

    assert pacer.on_way_s == 0.0
    behind = one_row(sent_s=-1.0)
    behind.queued = True
    pacer.landed(behind, 0.1, 1.0)
    assert pacer.on_way_s == 0.0
    for on_way_s, found_s in ((0.5, 0.5), (0.1, 0.1), (-0.05, 0.0)):
        assert came(on_way_s) == pytest.approx(found_s)
    came(0.02)
    assert came(0.82) == pytest.approx(0.12)
    for _ in range(60):
        came(0.82)
    assert pacer.on_way_s == pytest.approx(0.82, rel=0.01)


def test_prompts_and_pruned_runs_teach_nothing_of_answers(pacer: Pacer) -> None:
    pacer.landed(pruned(one_row(sent_s=-5.0)), 0.3, 1.0)
    pacer.landed(one_row(sent_s=-5.0, n_context=1), 0.3, 1.0)
    assert pacer.answer_s == pacer.on_way_s == 0.0
