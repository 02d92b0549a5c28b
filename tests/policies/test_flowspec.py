"""FlowSpec in virtual time: segments by score, expansions after a verdict, a new tree after a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeinfer.policies import FlowSpec
from pipeinfer.virtual.choices import ranks_for, synthetic_team
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate
from tests.support.timesteps import TEXT, GivenChoices, timesteps

STAGE_S = 2.0
SMALL = FlowSpec(width=2, depth=2, tree_size=7, segment=3, expansion_depth=2, expansion_size=4)
FOLLOWS = {
    1: {2: 0.6, 10: 0.4},
    2: {3: 0.9, 11: 0.1},
    10: {12: 0.5, 13: 0.5},
    3: {4: 0.8, 14: 0.2},
    4: {5: 0.8, 15: 0.2},
    5: {6: 0.8, 16: 0.2},
}
HIT = GivenChoices(FOLLOWS)
MISS = GivenChoices({**FOLLOWS, 1: {10: 0.6, 20: 0.4}})
FIRST_TREE = [(2.0, [1, 2, 3]), (3.999, [10, 12, 13]), (5.999, [11])]


def segments(
    policy: FlowSpec, choices: GivenChoices = HIT, *, stage_s: float = STAGE_S, cancel: bool = True, n_predict: int = 7
) -> list[tuple[float, list[int]]]:
    return timesteps(policy, choices, 3, n_predict, stage_s=stage_s, cancel=cancel, known=True)


def test_a_first_tree_goes_in_segments_of_descending_score() -> None:
    """Two steps of the draft, then three rows a run, each just before the first stage is free, across the tree's
    layers: 3 (0.54) before 10 (0.4)."""
    assert segments(SMALL)[:3] == FIRST_TREE


def test_without_scores_it_goes_layer_by_layer() -> None:
    sent = segments(replace(SMALL, scored=False))
    assert [run for _, run in sent[:3]] == [[1, 2, 10], [3, 12, 13], [11]]


def test_only_the_best_of_what_was_drafted_are_sent() -> None:
    sent = segments(replace(SMALL, tree_size=4, expansion=False))
    assert sent[:2] == [(2.0, [1, 2, 3]), (3.999, [10])]
    assert sent[2][1][0] == 4, "12, 13 and 11 were drafted, but are not among the best four"


def test_parents_go_before_their_children() -> None:
    parents = {child: parent for parent, children in FOLLOWS.items() for child in children}
    for policy in (SMALL, replace(SMALL, scored=False), replace(SMALL, segment=1), replace(SMALL, segment=16)):
        seen: set[int] = set()
        for token in [token for _, run in segments(policy) for token in run]:
            assert token not in seen, "sent twice"
            assert parents.get(token) in (None, *seen)
            seen.add(token)


def test_the_tree_is_expanded_only_after_a_segment_has_come_back() -> None:
    """Section III-D: at 6 s all is sent; the first segment comes back at 8 s, with it new tokens, and the fresh tree of
    three layers from 4 takes the draft until 11 s."""
    sent = segments(SMALL)
    assert sent[:3] == FIRST_TREE
    assert sent[3] == (11.0, [4, 5, 6])


def test_an_empty_segment_has_the_tree_expanded_from_its_last_layer() -> None:
    """Section III-D, score-aware: 10 is wrong at 14 s, when 2 is accepted. Its segment comes back empty behind 3's at
    22 s, and the layer after 5 is drafted beside 5's way through the stages, four seconds each."""
    choices = GivenChoices({1: {2: 0.5, 10: 0.45}, 10: {12: 0.9}, **{token: {token + 1: 0.9} for token in TEXT[1:]}})
    policy = replace(SMALL, segment=1, depth=2, expansion_depth=1, expansion_size=2)
    sent = segments(policy, choices, stage_s=4.0)
    assert [run for _, run in sent] == [[1], [2], [3], [10], [4], [5], [6], [7]]
    assert sent[5][0] == 23.0 and sent[6][0] == pytest.approx(27.0, abs=0.01), "without it 6 goes at 32 s"


def test_after_an_acceptance_a_fresh_tree_adds_what_is_new() -> None:
    """Section III-D, context-aware: at 8 s the root is 2, at 10 s it is 3, and both were sent before. Of the tree
    that is drafted below 3 in the two steps until 12 s, what is new goes, 4 (0.8) first."""
    sent = segments(replace(SMALL, segment=1, tree_size=4))
    assert [run for _, run in sent[:4]] == [[1], [2], [3], [10]]
    assert [run for _, run in sent[4:7]] == [[4], [5], [6]] and sent[4][0] == 12.0


def test_a_miss_begins_a_new_round() -> None:
    """2 was no guess: at 8 s the pipeline's rows are pruned, and a tree is drafted from 2, for two steps."""
    sent = segments(SMALL, MISS)
    assert [run for _, run in sent[:3]] == [[1, 10, 20], [12, 13, 140], [141]]
    at = [run[0] for _, run in sent].index(2)
    assert sent[at] == (10.0, [2, 3, 4])


@pytest.mark.parametrize(("cancel", "again_s"), [(True, 10.0), (False, 14.0)])
def test_without_expansion_a_round_is_one_tree(cancel: bool, again_s: float) -> None:
    """Table III's baselines. Pruned, a miss at 8 s begins the next round at once; else ("Chunk-PP") the last segment of
    the tree, which enters behind those before it just before 6 s, comes back at 12 s."""
    sent = segments(replace(SMALL, expansion=False), MISS, cancel=cancel)
    assert len(sent[2][1]) == 1 and sent[3] == (again_s, [2, 3, 4])


@pytest.mark.parametrize(("stage_s", "n_layers"), [(1.0, 2), (3.0, 3), (4.0, 4)])
def test_an_expansion_is_as_deep_as_the_draft_gets_while_a_stage_works(stage_s: float, n_layers: int) -> None:
    """Section IV-A, from what was measured; a first tree's depth at least."""
    chain = GivenChoices({token: {token + 1: 0.9} for token in TEXT})
    measured = FlowSpec(width=1, depth=2, segment=1)
    given = replace(measured, expansion_depth=n_layers)
    found, wanted = (segments(policy, chain, stage_s=stage_s) for policy in (measured, given))
    assert found == wanted


def test_each_part_of_the_method_makes_it_faster_as_in_table_3() -> None:
    profile = load_profile("flowspec").lay_out(0, "llama2-7b", True)
    bare = FlowSpec(expansion=False, scored=False)

    def took_s(policy: FlowSpec, cancel: bool = True) -> float:
        (choices,) = synthetic_team([ranks_for(share) for share in profile.acceptance], 0, 16)
        return simulate(profile, choices, policy.begin(), 64, cancel=cancel).metrics.token_s[-1]

    chunked, pruned = took_s(bare, cancel=False), took_s(bare)
    unscored, whole = took_s(FlowSpec(scored=False)), took_s(FlowSpec())
    assert chunked > pruned > unscored > whole and chunked > 1.4 * whole
