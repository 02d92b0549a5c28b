"""PipeInfer as its paper has it: runs in figures 2 and 3, micro-batches (IV-B.1), reactive speculation (IV-B.2).

Every stage and every step of the draft takes a second. The prompt's token is 1; speculation begins with the first
generated token, 2, which is known when all stages are through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from experiments.cells import Setting, lengths, run
from pipeinfer.policies import Iterative, PipeInfer, Speculative
from pipeinfer.policies.learning import Calibration
from pipeinfer.virtual.choices import ranks_for, synthetic_team
from pipeinfer.virtual.pipeline import SimPipeline
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate
from tests.support.timesteps import TEXT, GivenChoices, timesteps

SURE = {token: {token + 1: 0.9} for token in TEXT}
STEADY = PipeInfer.from_paper(microbatch=2, recovery=0.0)


def test_runs_follow_each_other_without_waiting_as_in_figure_2() -> None:
    """The first token goes into the target's pipeline at once and is drafted from at the same time. The tree goes
    behind it, long before its verdict, which comes first: 2 is sent at 4 s and known at 9 s."""
    sent = timesteps(STEADY, GivenChoices(SURE), 5, 4)
    assert sent == [(0.0, [1]), (5.0, [2]), (7.0, [3, 4])]


def test_the_draft_goes_on_whenever_the_head_is_idle_as_in_figure_3() -> None:
    """Continuous speculation: each micro-batch builds on the one before, and verdicts come between them."""
    sent = timesteps(STEADY, GivenChoices(SURE), 4, 8)
    assert sent == [(0.0, [1]), (4.0, [2]), (6.0, [3, 4]), (8.0, [5, 6]), (10.0, [7, 8])]


def test_a_rejection_invalidates_all_runs_that_build_on_it() -> None:
    """3 was not guessed: at 8 s the run of 30 and 31 is dead, and 3 goes at once, by itself."""
    choices = GivenChoices({**SURE, 2: {30: 0.9}, 30: {31: 0.9}, 31: {32: 0.9}, 32: {33: 0.9}})
    sent = timesteps(STEADY, choices, 4, 8)
    assert sent[:3] == [(0.0, [1]), (4.0, [2]), (6.0, [30, 31])]
    assert sent[3:5] == [(8.0, [3]), (10.0, [4, 5])]


def test_a_micro_batch_is_a_tree_and_the_next_one_continues_its_first_branch() -> None:
    follows = {**SURE, 2: {3: 0.55, 20: 0.45}, 3: {4: 0.9, 21: 0.1}, 20: {22: 0.9}}
    sent = timesteps(PipeInfer.from_paper(recovery=0.0, split_cutoff=0.4), GivenChoices(follows), 9, 8)
    assert sent[1:3] == [(9.0, [2]), (11.0, [3, 20, 4, 22])]
    assert sent[3] == (15.0, [5, 6, 7, 8])


def test_every_micro_batch_raises_the_cutoff_until_a_verdict() -> None:
    """From 0.001 by 0.4: 0.9 is enough for three micro-batches, 1.201 for none. At 16 s 2 has its verdict."""
    sent = timesteps(PipeInfer.from_paper(microbatch=1), GivenChoices(SURE), 8, 8)
    assert sent == [(0.0, [1]), (8.0, [2]), (9.0, [3]), (10.0, [4]), (11.0, [5]), (17.0, [6]), (18.0, [7]), (19.0, [8])]


def test_a_guess_below_the_raised_cutoff_counts_once_a_verdict_has_reset_it() -> None:
    choices = GivenChoices({**SURE, 4: {5: 0.3}})
    sent = timesteps(PipeInfer.from_paper(microbatch=1, recovery=0.2), choices, 8, 8)
    assert sent[2:5] == [(9.0, [3]), (10.0, [4]), (16.0, [5])], "0.3 is below 0.401, and above 0.001 at 16 s"


def test_recovery_raises_the_split_cutoff_too() -> None:
    follows = {**SURE, **{token: {token + 1: 0.6, 20 + token: 0.4} for token in (2, 3)}}
    policy = PipeInfer.from_paper(microbatch=2, split_cutoff=0.3, recovery=0.2)
    sent = timesteps(policy, GivenChoices(follows), 9, 8)
    assert sent[2:4] == [(10.0, [3, 22]), (12.0, [4, 5])], "23 has 0.4, less than 0.5"


def test_decay_lowers_both_cutoffs_after_a_failure() -> None:
    """0.35 fails at 0.4, which takes 0.1 off; at 0.3 it is enough."""
    choices = GivenChoices({**SURE, 3: {4: 0.35}})
    sent = timesteps(PipeInfer.from_paper(microbatch=1, accept_cutoff=0.4, recovery=0.0, decay=0.1), choices, 8, 8)
    assert sent[2] == (9.0, [3]) and sent[3] == (10.0, [4])


@pytest.mark.parametrize("pruning", [False, True])
def test_rows_of_a_run_are_left_out_by_our_pruning_alone(pruning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned: list[Mapping[int, Sequence[int]]] = []
    monkeypatch.setattr(SimPipeline, "prune", lambda _, rows: pruned.append(rows))
    profile = load_profile("pipeinfer-c").lay_out(8, "dolphin-tinyllama")
    (choices,) = synthetic_team([ranks_for(0.5)], 0, 16)
    simulate(profile, choices, PipeInfer(microbatch=8, width=8, pruning=pruning), 48)
    assert bool(pruned) is pruning


def test_the_first_token_comes_as_soon_as_in_iterative_decoding() -> None:
    """Section V-B: nothing is guessed while the prompt is read, and the draft holds no token up."""
    setting = Setting("pipeinfer-c", "dolphin-tinyllama", 8)
    plain, paper, ours = (run(setting, policy).first_s for policy in (Iterative(), PipeInfer.from_paper(), PipeInfer()))
    assert paper == pytest.approx(plain, rel=0.02)
    assert ours < 0.6 * plain, "guesses go while the prompt is read"


@pytest.mark.parametrize(
    ("pair", "least", "most"), [("dolphin-tinyllama", 1.4, 1.8), ("goliath-xwin7", 1.4, 2.2), ("falcon-7", 1.4, 1.75)]
)
def test_the_published_settings_give_what_the_paper_reports_over_its_baseline(
    pair: str, least: float, most: float
) -> None:
    """1.5 to 1.7 times for well-aligned pairs, up to 2.15 for others."""
    setting = Setting("pipeinfer-c", pair, 8)
    ratio = run(setting, PipeInfer.from_paper()).speed / run(setting, Speculative.from_paper()).speed
    assert least < ratio < most


def test_a_cell_of_an_experiment_begins_with_nothing_learned() -> None:
    """One instance serves the cells of a table in turns."""
    policy, settings = PipeInfer(), [Setting("pipeinfer-c", nodes=4, acceptance=share) for share in (0.1, 0.6)]
    found = [lengths(setting, policy) for setting in settings]
    assert found == [lengths(setting, PipeInfer()) for setting in settings]
    assert policy.calibration == Calibration()
