"""Rounds of SSD: when a chain is sent, and what was made for the outcomes of the one before."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pipeinfer.core.runs import Guess, Run
from pipeinfer.core.tree import TokenTree
from pipeinfer.policies.ssd import DRAFT, NONE, Ssd
from pipeinfer.virtual.choices import Branch
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.pipeline import SimPipeline
from pipeinfer.virtual.simulation import simulate

TARGET_S, DRAFT_S = 5.0, 1.0
WRONG = -1


class OnceWrong:
    """A draft whose first guess for position `wrong` is wrong, `second` its other; the right token is the position."""

    prompt, n_tokens = (0,), 1 << 20

    def __init__(self, wrong: int, second: int) -> None:
        self.wrong, self.second = wrong, second

    def target(self, position: int) -> int:
        return position

    def guesses(self, start: int, branch: Branch, width: int, age: int = 0) -> list[Guess]:
        position = start + 1 + len(branch)
        if branch:
            return [Guess(WRONG, 0.6)]
        if position == self.wrong:
            return [Guess(WRONG, 0.6), Guess(self.second, 0.3)]
        return [Guess(position, 0.9)]


def rounds(monkeypatch: pytest.MonkeyPatch, policy: Ssd, draft: Any) -> list[tuple[float, list[int]]]:
    """The first three runs: when they were sent, and their tokens."""
    found = []
    submit = SimPipeline.submit

    def noted(pipeline: SimPipeline, run: Run) -> None:
        if run.rows:
            found.append((pipeline.clock.now, [row.token for row in run.rows]))
        submit(pipeline, run)

    monkeypatch.setattr(SimPipeline, "submit", noted)
    target, model = (ModelCost(f"{second:g} s", 1, Work((1.0,), (second,))) for second in (TARGET_S, DRAFT_S))
    profile = Profile("one stage", 4, (target,), (model,), LinkCost(0.0, math.inf), HeadCost())
    done = simulate(profile, draft, policy.begin(), 20)
    assert done.request.tokens == list(range(21))
    return found[:3]


def test_after_a_right_chain_the_next_one_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = rounds(monkeypatch, Ssd(3), OnceWrong(100, 100))
    assert first == (3.0, [0, 1, 2, 3])
    assert second == (8.0, [4, 5, 6, 7])
    assert third == (13.0, [8, 9, 10, 11])


@pytest.mark.parametrize("ranked", [True, False])
def test_so_it_does_after_a_foreseen_outcome(monkeypatch: pytest.MonkeyPatch, ranked: bool) -> None:
    first, second, _ = rounds(monkeypatch, Ssd(3, ranked=ranked), OnceWrong(2, 2))
    assert first == (3.0, [0, 1, WRONG, WRONG])
    assert second == (8.0, [2, 3, 4, 5])


@pytest.mark.parametrize(("backup", "expected"), [(DRAFT, (11.0, [2, 3, 4, 5])), (NONE, (10.0, [2]))])
def test_after_an_unforeseen_outcome_the_backup_decides(
    monkeypatch: pytest.MonkeyPatch, backup: str, expected: tuple[float, list[int]]
) -> None:
    assert expected in rounds(monkeypatch, Ssd(3, backup=backup), OnceWrong(2, -2))


@pytest.mark.parametrize(("ranked", "expected"), [(True, {20, 21}), (False, {11, 20})])
def test_outcomes_are_the_likeliest_or_as_many_for_each_row(ranked: bool, expected: set[int]) -> None:
    tree = TokenTree(0, 0)
    guess, *_ = tree.grow(tree.root, [Guess(10, 0.9), Guess(11, 0.1)], [math.log(0.9), math.log(0.1)])
    tree.grow(guess, [Guess(20, 0.6), Guess(21, 0.3)], [math.log(0.6), math.log(0.3)])
    tree.root.run_id = guess.run_id = 1
    context: Any = SimpleNamespace(tree=tree, may_branch=lambda node: True)
    to_expand = Ssd(n_draft=1, fan_out=1, ranked=ranked).draft(context)
    assert {node.token for node in to_expand} == expected
