"""The policy that needs no choice: what it sends, what it learns, and how it does beside the others."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pipeinfer.core.policy import NOTHING, AwaitDraft, Policy, Send
from pipeinfer.core.runs import Guess
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, Settled, TokenTree
from pipeinfer.policies import Auto, FlowSpec, Iterative, PipeDec, PipeInfer
from pipeinfer.policies.learning import TemperatureScaling
from pipeinfer.virtual.choices import ranks_for, synthetic_team
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import Simulated, simulate
from tests.support.cases import in_long
from tests.support.timesteps import TEXT, GivenChoices, timesteps

SURE = {token: {token + 1: 0.9, 50 + token: 0.1} for token in TEXT}


def test_the_root_takes_along_what_is_known_to_follow_it() -> None:
    """What is below an unsent root can only go with it; by itself it has no place."""
    tree, pool = TokenTree(1, 0), SequencePool(4, 64)
    (child,) = tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
    tree.grow(child, [Guess(3, 0.9)], [-0.2])
    pool.open(0)

    class View:
        def __init__(self, n_cheap_rows: int) -> None:
            self.tree, self.n_inflight, self.n_cheap_rows, self.depth_left = tree, 0, n_cheap_rows, 50
            self.n_stages = 2
            self.fitting, self.verdict_in_s, self.is_alone = pool.fitting, lambda node: 0.5, False

    assert Auto().send(View(2)) == Send([tree.root, child])  # type: ignore[arg-type]
    assert Auto().send(View(1)) == Send([tree.root])  # type: ignore[arg-type]
    full = SequencePool(4, 0)
    full.open(0)
    view = View(2)
    view.fitting = full.fitting
    assert Auto().send(view) == Send([tree.root]), "room for the root is made"  # type: ignore[arg-type]


def test_so_many_runs_are_under_way_as_slow_messages_want() -> None:
    """One a stage and one that waits; where a verdict is on its way for the time of three runs, four."""
    tree = TokenTree(1, 0)
    (child,) = tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
    tree.root.run_id = 1

    class View:
        n_stages, n_cheap_rows, depth_left, n_inflight = 2, 1, 50, 0
        on_way_s, run_s = 0.1, staticmethod(lambda n_rows: 0.1)
        fitting, early, drafting = list, staticmethod(lambda patience: None), ((), 0.0)
        verdict_in_s = staticmethod(lambda node: 0.5)

        def __init__(self) -> None:
            self.tree = tree

    def most(**changed: object) -> int:
        view = View()
        for name, value in changed.items():
            setattr(view, name, value)
        for view.n_inflight in range(20):
            answer = Auto().send(view)  # type: ignore[arg-type]
            if answer == NOTHING:
                return view.n_inflight
            assert answer == Send([child])
        raise AssertionError("no limit")

    assert most() == 3 and most(on_way_s=0.3) == 4 and most(n_stages=4) == 5
    assert most(run_s=lambda n_rows: 0.0) == 3, "nobody knows what runs take"


@pytest.mark.parametrize(("acceptance", "least"), [(0.05, 1.0), (0.3, 1.2), (0.6, 1.5), (0.9, 1.8)])
def test_one_stage_gains_too(acceptance: float, least: float) -> None:
    """Two ranks, what a newcomer starts: the verdict comes when the only stage is free, and two rows cost as one."""
    profile = load_profile("pipeinfer-c").lay_out(2, "dolphin-tinyllama")
    texts = [choices for seed in range(2) for choices in synthetic_team([ranks_for(acceptance)], seed, 64)]

    def took_s(policy: Policy) -> float:
        times = [simulate(profile, text, policy.begin(), 100).metrics.token_s for text in texts]
        return sum(token_s[-1] - token_s[0] for token_s in times)

    assert took_s(Iterative()) / took_s(Auto()) > least


def test_a_root_waits_for_its_first_guess_while_that_is_worth_the_stages_time() -> None:
    """Nothing else is in flight. The draft would need 10 ms, a run takes 0.1 s and carries two rows."""
    tree = TokenTree(1, 7)

    class View:
        is_alone, n_inflight, n_stages, n_cheap_rows, depth_left = True, 0, 2, 2, 50
        is_at_head = False
        step_s, left_s = 0.01, 0.0
        at_work: Sequence[Node] = ()

        def __init__(self) -> None:
            self.tree, self.fitting, self.verdict_in_s = tree, list, lambda node: 0.5
            self.run_s, self.may_branch = lambda n_rows: 0.1, lambda node: True

        @property
        def drafting(self) -> tuple[Sequence[Node], float]:
            return self.at_work, self.left_s

        @property
        def draft_s(self) -> float:
            return self.step_s

    auto, view = Auto(), View()
    assert auto.send(view) == Send([tree.root]), "the draft has yet to read the prompt"  # type: ignore[arg-type]
    auto.keep(Node(1, 6), [])
    assert auto.send(view) == AwaitDraft(tree.root)  # type: ignore[arg-type]
    for name, value in {"step_s": 0.2, "n_cheap_rows": 1, "is_alone": False, "may_branch": lambda node: False}.items():
        other = View()
        setattr(other, name, value)
        assert auto.send(other) == Send([tree.root]), name  # type: ignore[arg-type]
    view.at_work, view.left_s = [tree.root], 0.2
    assert auto.send(view) == Send([tree.root]), "it is at work on it, and will be for long"  # type: ignore[arg-type]
    view.left_s = 0.001
    assert auto.send(view) == AwaitDraft(tree.root)  # type: ignore[arg-type]
    (child,) = tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
    view.at_work = [child]
    assert auto.send(view) == Send([tree.root, child]), "a second guess would have no row"  # type: ignore[arg-type]
    view.n_cheap_rows, view.left_s = 64, 0.02
    assert auto.send(view) == Send([tree.root, child]), "it can go with the next run"  # type: ignore[arg-type]


def test_a_run_carries_no_more_rows_than_cost_little() -> None:
    """Here one: the engine knows no costs, and takes rows to be dear."""
    assert all(len(tokens) == 1 for _, tokens in timesteps(Auto(), GivenChoices(SURE), 3, 6))


def test_rows_that_cost_nothing_are_used() -> None:
    """Where 64 rows take as long as one, siblings of the likeliest guess go too."""
    sent = timesteps(Auto(), GivenChoices(SURE), 3, 6, known=True)
    assert max(len(tokens) for _, tokens in sent) > 1
    assert any({token + 1, 50 + token} <= set(tokens) for token in TEXT for _, tokens in sent)


def test_a_guess_whose_verdict_is_about_to_come_goes_last() -> None:
    """Of two equally likely guesses the one below the run that was sent later is sent: more time can be saved there."""
    tree = TokenTree(1, 0)
    early, late = tree.grow(tree.root, [Guess(2, 0.5), Guess(3, 0.5)], [-0.7, -0.7])
    (below_early,) = tree.grow(early, [Guess(4, 0.5)], [-0.7])
    (below_late,) = tree.grow(late, [Guess(5, 0.5)], [-0.7])
    tree.root.run_id, early.run_id, late.run_id = 1, 2, 3
    left_s = {early: 0.1, late: 0.8}

    class View:
        def __init__(self) -> None:
            self.tree, self.n_inflight, self.n_stages, self.n_cheap_rows, self.depth_left = tree, 3, 4, 1, 50
            self.early, self.drafting = lambda patience: None, ((), 0.0)
            self.verdict_in_s, self.run_s = left_s.__getitem__, lambda n_rows: 0.0
            self.on_way_s = 0.0

        @staticmethod
        def fitting(nodes: list[object]) -> list[object]:
            return nodes

    assert Auto().send(View()) == Send([below_late])  # type: ignore[arg-type]
    left_s[early] = 0.9
    assert Auto().send(View()) == Send([below_early])  # type: ignore[arg-type]


def test_a_run_waits_for_better_guesses_while_that_is_worth_the_stage_s_time() -> None:
    """The draft expands a likely node; all that is unsent is unlikely. Rows: one, which the better guess would need."""
    tree = TokenTree(1, 0)
    likely, other = tree.grow(tree.root, [Guess(2, 0.9), Guess(3, 0.1)], [math.log(0.9), math.log(0.1)])
    tree.root.run_id, likely.run_id = 1, 2
    at_work, left_s = [likely], 0.0

    class View:
        def __init__(self) -> None:
            self.tree, self.n_inflight, self.n_stages, self.n_cheap_rows, self.depth_left = tree, 2, 4, 1, 50
            self.early, self.drafting = lambda patience: None, (at_work, left_s)
            self.run_s, self.on_way_s = lambda n_rows: 0.1, 0.3

        @staticmethod
        def fitting(nodes: list[object]) -> list[object]:
            return nodes

    assert Auto().send(View()) == AwaitDraft(other)  # type: ignore[arg-type]
    left_s = 10.0
    assert Auto().send(View()) == Send([other])  # type: ignore[arg-type]
    left_s, at_work = 0.0, []
    assert Auto().send(View()) == Send([other])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("probability", "run_id", "left_s", "waits"),
    [
        (0.3, 2, 0.1, True),
        (0.3, 2, 0.15, False),  # the step after the verdict is hardly late
        (0.3, 2, 0.0, False),  # nobody knows when it comes
        (0.9, 2, 0.1, False),  # this step will hardly be in vain
        (0.9, 1, 0.1, True),  # this verdict says what follows the node
    ],
)
def test_a_draft_step_waits_for_a_verdict_that_may_make_it_vain(
    probability: float, run_id: int, left_s: float, waits: bool
) -> None:
    """It takes 0.2 s; the root's verdict comes in `left_s`, and the step is for one guess after the root."""
    tree = TokenTree(1, 0)
    (guess,) = tree.grow(tree.root, [Guess(2, probability)], [math.log(probability)])
    tree.root.run_id, guess.run_id, tree.root.expanded = 1, run_id, True

    class View:
        n_stages, n_inflight, n_cheap_rows, depth_left, draft_s = 2, 2, 2, 50, 0.2
        is_alone, is_at_head = True, False

        def __init__(self) -> None:
            self.tree, self.verdict_in_s, self.may_branch = tree, lambda node: left_s, lambda node: True

    assert (not Auto().draft(View())) == waits  # type: ignore[arg-type]


def test_requests_of_a_session_share_what_was_learned_and_said_and_nothing_else() -> None:
    first = Auto()
    second = first.begin()
    assert second.calibration is first.calibration and second == first and hash(second) == hash(first)
    beside_others: Any = SimpleNamespace(is_alone=False)
    tree = TokenTree(1, 0)
    tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
    notices = []
    for _ in range(40):
        tree.root.verdict = 3  # never what was guessed
        notices.append(first.settled(tree.settle(), beside_others))
        tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
    assert any("hardly any guess" in notice for notice in notices)
    assert first.keep(tree.root, [Guess(2, 0.9)])[0].probability < 0.5, "such confidence was never justified"
    assert not second._backoff.holds
    assert not second.settled(Settled([tree.root], []), beside_others) and second._backoff.holds, "it was said before"


@pytest.mark.parametrize("are_sent", [True, False])
def test_without_a_draft_only_tokens_that_guesses_were_sent_for_say_what_guesses_cost(
    are_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.policies.auto._least_s", lambda context, n_before: 1.0)
    auto, tree, now_s, notices = Auto(), TokenTree(1, 0), [0.0], []
    alone: Any = SimpleNamespace(is_alone=True, tree=tree, clock=lambda: now_s[0])
    for number in range(100):
        if not auto._all_guesses_rest(alone):
            (guess,) = tree.grow(tree.root, [Guess(2, 0.9)], [-0.1])
            guess.run_id = number if are_sent else None
        tree.root.verdict = 2 + number % 2
        now_s[0] += 1.0 if auto._all_guesses_rest(alone) else 2.0
        notices.append(auto.settled(tree.settle(), alone))
    assert any("guesses cost time here" in notice for notice in notices) == are_sent
    assert auto._all_guesses_rest(alone) == are_sent


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_sharpness_of_a_draft_is_learned(power: float) -> None:
    """A draft that says the square root of how likely tokens are, as shares, gets a power of two; a right one none."""
    learned, rng = TemperatureScaling(), random.Random(5)
    for _ in range(1500):
        weights = [rng.uniform(1, 4), 0.6, 0.2, 0.05]
        said = [weight ** (1 / power) for weight in weights]
        guesses = [Guess(token, share / sum(said)) for token, share in enumerate(said)]
        corrected = learned.scaled(guesses, 0)
        assert sum(guess.probability for guess in corrected) == pytest.approx(1)
        tree = TokenTree(9, 0)
        tree.grow(tree.root, corrected, [math.log(guess.probability) for guess in corrected])
        (tree.root.verdict,) = rng.choices(range(4), weights)
        learned.settled(tree.settle())
    assert corrected[0].probability == pytest.approx(weights[0] / sum(weights), abs=0.06)


# -- beside the others, in virtual time


def speed(policy: Policy, profile_name: str, pair: str, nodes: int, acceptance: float, seeds: int = 2) -> float:
    profile = load_profile(profile_name).lay_out(nodes, pair, policy.drafts)
    return statistics.fmean(_tokens_a_second(profile, policy, acceptance, seed) for seed in range(seeds))


def _tokens_a_second(profile: object, policy: Policy, acceptance: float, seed: int) -> float:
    (choices,) = synthetic_team([ranks_for(acceptance)], seed, 64)
    found: Simulated = simulate(profile, choices, policy.begin(), 128)  # type: ignore[arg-type]
    token_s = found.metrics.token_s
    return (len(token_s) - 1) / (token_s[-1] - token_s[0])


@pytest.mark.parametrize(
    ("cluster", "acceptance", "others"),
    [
        in_long(("pipedec-14", "", 0), 0.52, (PipeDec(), PipeInfer())),
        (("flowspec", "llama2-7b", 0), 0.66, (FlowSpec(), PipeInfer(), PipeDec(layer_width=16))),
        in_long(("pipespec", "llama-70b-1b", 3), 0.3, (PipeDec(), PipeInfer())),
        (("pipeinfer-c", "goliath-xwin7", 8), 0.3, (PipeInfer(), PipeDec(layer_width=2, children=2))),
        (("pipeinfer-a", "dolphin-tinyllama", 4), 0.79, (PipeInfer(),)),
        (("pipeinfer-b", "falcon-7", 13), 0.05, (Iterative(), PipeInfer())),
        # a token takes less time than the draft takes to read the prompt
        (("ethernet", "qwen-1.5b-0.5b", 12), 0.4, (PipeInfer(),)),
    ],
)
def test_it_is_not_worse_than_what_is_best_there(
    cluster: tuple[str, str, int], acceptance: float, others: tuple[Policy, ...]
) -> None:
    best = max(speed(policy, *cluster, acceptance) for policy in others)
    assert speed(Auto(), *cluster, acceptance) > 0.97 * best
