"""PipeDec's tree, layer by layer and timestep by timestep (sections 3.2 to 3.4)."""

from __future__ import annotations

import pytest

from pipeinfer.policies import PipeDec
from tests.support.timesteps import TEXT, GivenChoices, timesteps

SURE = {2: 0.6, 10: 0.4}


def test_a_layer_a_timestep_as_in_figure_2() -> None:
    """Three nodes, two guesses a token, layers of three at most. The root's verdict is in after three timesteps: the
    tree is pruned to the subtree of the hit, and only then is it decided what the next layer is, so that it is full."""
    follows = {
        1: SURE,
        2: {3: 0.5, 11: 0.49},
        10: {12: 0.9, 13: 0.1},
        12: {14: 0.6, 15: 0.4},
        3: {4: 0.9, 16: 0.1},
        11: {17: 0.5, 18: 0.4},
        4: {5: 0.9, 19: 0.05},
    }
    sent = timesteps(PipeDec(children=2, layer_width=3), GivenChoices(follows), 3, 5)
    assert sent[:4] == [(0.0, [1]), (1.0, [2, 10]), (2.0, [12, 3, 11]), (3.0, [4, 17, 18])]
    when_s, layer = sent[4]
    assert when_s == 4.0 and layer[0] == 5 and len(layer) == 2, "3 was accepted: 11 and all after it are gone"


def test_a_miss_begins_a_new_tree() -> None:
    sent = timesteps(PipeDec(children=2, layer_width=3), GivenChoices({1: {10: 0.6, 11: 0.3}}), 3, 4)
    assert sent[:3] == [(0.0, [1]), (1.0, [10, 11]), (2.0, [120, 121, 122])]
    assert sent[3] == (3.0, [2]), "by itself, whatever was in flight"


def test_a_verdict_that_leaves_nothing_of_the_last_layer_has_the_one_before_expanded_again() -> None:
    """The only child of the hit in flight has no guesses there: what was not chosen for its layer is sent now."""
    follows = {1: SURE, 2: {3: 0.2, 11: 0.1}, 10: {12: 0.5, 13: 0.5}}
    choices = GivenChoices(follows)
    sent = timesteps(PipeDec(children=2, layer_width=2), choices, 3, 4)
    assert sent[:3] == [(0.0, [1]), (1.0, [2, 10]), (2.0, [12, 13])]
    assert sent[3] == (3.0, [3, 11])


@pytest.mark.parametrize(("group", "most"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_stages_of_a_group_have_one_layer_between_them(group: int, most: int) -> None:
    follows = {token: {token + 1: 0.9} for token in TEXT}
    sent = timesteps(PipeDec(group=group), GivenChoices(follows), 4, 5)
    begun = [when_s for when_s, _ in sent]
    assert max(sum(start <= when_s < start + 4 for start in begun) for when_s in begun) == most
