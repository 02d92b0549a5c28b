"""One stage, one request: what a run carries, when it goes, what the draft guesses meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import pytest

from pipeinfer.core.policy import NOTHING, Answer, AwaitDraft, HoldUntil, Send
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node, Settled, TokenTree
from pipeinfer.policies import Auto
from pipeinfer.policies.learning import HIT_MEMORY
from pipeinfer.policies.likeliest import best_run, pays_alone

STEEP = (1.0, 1.8, 2.2, 2.5, 2.8, 3.0, 3.1, 3.2, 3.4)
"""Of runs of one row, two, …: a second row costs nearly as much as the first one, further ones little."""


class View:
    """As the policy sees the request. A chain of guesses as probable as `hits` says hangs below the root."""

    n_stages, n_inflight, n_cheap_rows, depth_left, is_at_head = 1, 0, 1, 50, False

    def __init__(self, hits: Sequence[float], costs: Sequence[float] = STEEP, step_s: float = 0.05) -> None:
        self.tree, self.costs, self.draft_s, self.is_alone = TokenTree(1, 7), costs, step_s, True
        self.fitting, self.verdict_in_s, self.may_branch = list, lambda node: 0.5, lambda node: True
        self.early: Callable[[float], HoldUntil | None] = lambda patience: None
        self.drafting, self.on_way_s, self.undisturbed_s = ((), 0.0), 0.0, RunCost({1: 9.0}).undisturbed_s
        self.clock = partial(next, count())
        self.end: Node = self.tree.root
        for token, hit in enumerate(hits):
            (self.end,) = self.tree.grow(self.end, [Guess(token, hit)], [math.log(hit)])

    def run_s(self, n_rows: int) -> float:
        return self.costs[min(n_rows, len(self.costs)) - 1]


def n_sent(answer: Answer) -> int:
    return len(answer.nodes) if isinstance(answer, Send) else 0


def caught_up(first_rate: float = 0.9) -> Auto:
    auto = Auto()
    auto.keep(Node(1, 6), [])
    auto.calibration.first_rate = first_rate
    return auto


@pytest.mark.parametrize(
    ("hits", "n_rows"), [([0.9] * 7, 8), ([0.7, 0.3], 1), ([0.9] * 5 + [0.1] * 2, 6), ([0.3] * 7, 1)]
)
def test_a_run_carries_what_makes_the_most_tokens_a_second(hits: Sequence[float], n_rows: int) -> None:
    """Also where two rows by themselves would not pay."""
    view = View(hits, step_s=9.0)
    assert n_sent(caught_up().send(view)) == n_rows  # type: ignore[arg-type]
    view.is_alone = False
    assert n_sent(caught_up().send(view)) == 1, "others want the pipeline"  # type: ignore[arg-type]


def test_nothing_goes_before_the_verdict_of_what_is_in_flight() -> None:
    view = View([0.9] * 7)
    view.tree.root.run_id, view.n_inflight = 1, 1
    assert caught_up().send(view) == NOTHING  # type: ignore[arg-type]


def sent_behind(view: View, n_inflight: int = 1) -> int:
    view.tree.root.run_id, view.n_inflight = 1, n_inflight
    return n_sent(caught_up().send(view))  # type: ignore[arg-type]


def test_runs_go_before_the_verdict_where_that_is_long_on_its_way() -> None:
    """As many rows as make the most tokens a second, unless hardly any would be of use."""
    view = View([0.9] * 7)
    view.on_way_s = 0.06
    assert sent_behind(view) == 7 and sent_behind(view, 2) == 0, "one waits for the stage already"
    view.on_way_s = 1.6
    assert sent_behind(view, 2) == 7 and sent_behind(view, 3) == 0
    view.early = lambda patience: HoldUntil(9.0)
    assert sent_behind(view) == 0, "the stage does not want one yet"
    for hits, n_rows in (([0.3, 0.9], 2), ([0.2, 0.9], 0), ([0.9, 0.1], 1)):
        view = View(hits)
        view.on_way_s = 0.06
        assert sent_behind(view) == n_rows, hits
    view.draft_s = 0.5
    assert sent_behind(view) == 0, "eight guesses take longer than eight rows"
    view.draft_s, view.is_at_head = 0.05, True
    assert sent_behind(view) == 0, "the head evaluates one run at a time"


def test_a_verdict_s_way_counts_for_how_many_rows_go() -> None:
    """Long ways make rows cheap that are dear in themselves; but single rows that go ahead hide them."""
    view = View([0.7, 0.3])
    assert len(best_run(view)[0]) == 1 and pays_alone(view, 0.9)  # type: ignore[arg-type]
    view.on_way_s = 9.0
    assert len(best_run(view)[0]) == 3  # type: ignore[arg-type]
    assert not pays_alone(view, 0.9)  # type: ignore[arg-type]
    view.is_at_head = True
    assert pays_alone(view, 0.9), "nothing is hidden there"  # type: ignore[arg-type]


@pytest.mark.parametrize(("first_rate", "step_s", "waits"), [(0.9, 0.05, True), (0.9, 0.5, False), (0.2, 0.05, False)])
def test_a_root_waits_for_as_many_guesses_as_pay(first_rate: float, step_s: float, waits: bool) -> None:
    """No single one would: a second row takes as long as 0.8 runs."""
    view = View([], step_s=step_s)
    assert (caught_up(first_rate).send(view) == AwaitDraft(view.tree.root)) == waits  # type: ignore[arg-type]
    assert Auto().send(view) == Send([view.tree.root]), "the draft has yet to read the prompt"  # type: ignore[arg-type]


def test_the_draft_goes_no_further_than_guesses_may_pay() -> None:
    for hits, goes_on in (([0.9, 0.9], True), ([0.9, 0.1], False), ([0.9] * 9, False)):
        view = View(hits)
        view.tree.root.run_id, view.n_inflight = 1, 1
        assert bool(caught_up().draft(view)) == goes_on  # type: ignore[arg-type]
    dear = View([0.9], costs=[1.0 * n for n in range(1, 10)])
    dear.tree.root.run_id = 1
    assert not caught_up(0.9).draft(dear), "a run of more than one row saves nothing"  # type: ignore[arg-type]


def test_the_draft_keeps_no_run_from_being_evaluated_at_the_head() -> None:
    """But for the first ones, and now and then: it is not known else how often it is right, and how long it takes."""
    auto, view = caught_up(), View([])
    view.is_at_head, view.tree.root.run_id, view.n_inflight = True, 1, 1
    assert auto.draft(view)  # type: ignore[arg-type]
    for number in range(HIT_MEMORY):
        guess = Node(number, 8, view.tree.root, math.log(0.9))
        auto.settled(Settled([view.tree.root, guess], [number], 1, 1, [([guess], guess)]), view)  # type: ignore[arg-type]
    assert not auto.draft(view)  # type: ignore[arg-type]
    view.tree.root.run_id, view.n_inflight = None, 0
    assert auto.draft(view) and auto.send(view) == AwaitDraft(view.tree.root)  # type: ignore[arg-type]


def test_no_step_is_made_to_learn_what_the_rest_of_a_text_cannot_repay() -> None:
    """The draft reads the prompt first."""
    for depth_left, learns in ((50, True), (1, False)):
        auto, view = Auto(), View([], step_s=0.1)
        view.is_at_head, view.tree.root.run_id, view.n_inflight, view.depth_left = True, 1, 1, depth_left
        assert bool(auto.draft(view)) == learns  # type: ignore[arg-type]


@pytest.mark.parametrize("n_stages", [1, 3])
def test_a_long_chain_of_right_but_unlikely_guesses_divides_nothing_by_zero(n_stages: int) -> None:
    auto, view = caught_up(), View([0.9, 0.8])
    view.n_stages, view.tree.root.run_id = n_stages, None
    for node in (view.tree.root, *view.tree.root.children, view.end):
        node.score -= 800.0
    assert isinstance(auto.send(view), Send | AwaitDraft)  # type: ignore[arg-type]
    view.tree.root.run_id, view.n_inflight = 1, 1
    assert isinstance(auto.send(view), Send | AwaitDraft)  # type: ignore[arg-type]
