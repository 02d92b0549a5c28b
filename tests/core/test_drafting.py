"""The draft's guesses: likeliest tokens, or, sampling, what the target would sample with the same noise."""

from __future__ import annotations

import numpy as np

from pipeinfer.core.drafting import coupled, likeliest
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.sequences import SequencePool
from pipeinfer.models.drafts.model_drafter import ModelDrafter, newest_tokens
from tests.support.toy import ToyStage


def test_likeliest_are_sorted_with_their_probabilities() -> None:
    found = likeliest(np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32)), 3)
    assert [guess.token for guess in found] == [1, 3, 2]
    assert np.allclose([guess.probability for guess in found], [0.4, 0.3, 0.2])
    assert len(likeliest(np.zeros(4, np.float32), 9)) == 4


def test_a_coupled_draft_that_equals_the_target_is_always_right() -> None:
    rng = np.random.default_rng(1)
    params = SamplingParams(seed=5, temp=1.0)
    for position in range(300):
        logits = rng.normal(0, 2, 200).astype(np.float32)
        assert coupled(logits, 3, params, position)[0].token == choose(logits, params, position)


def test_coupling_raises_acceptance() -> None:
    """A draft whose logits are the target's with noise: shared noise agrees more often than the draft's favourite."""
    rng = np.random.default_rng(2)
    params = SamplingParams(seed=5, temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
    n_coupled = n_likeliest = 0
    for position in range(1000):
        target = rng.normal(0, 2, 100).astype(np.float32)
        draft = target + rng.normal(0, 0.5, 100).astype(np.float32)
        token = choose(target, params, position)
        n_coupled += coupled(draft, 1, params, position)[0].token == token
        n_likeliest += likeliest(draft, 1)[0].token == token
    assert n_coupled > n_likeliest + 200


def test_newest_tokens_reach_over_the_root() -> None:
    request = Request(0, [1, 2, 3], 9, SamplingParams(), 99)
    (child,) = request.tree.grow(request.tree.root, [Guess(4, 1.0)], [0.0])
    (leaf,) = request.tree.grow(child, [Guess(5, 1.0)], [0.0])
    assert [newest_tokens(request, leaf, n) for n in (0, 1, 2, 3, 9)] == [[], [5], [4, 5], [3, 4, 5], [1, 2, 3, 4, 5]]
    assert newest_tokens(request, request.tree.root, 2) == [2, 3]


def test_certain_tokens_stay_evaluated_however_often_the_draft_is_interrupted() -> None:
    """A draft slower than the target is told to give up in every step: it must get through the prompt all the same."""
    pool = SequencePool(4, 100)
    drafter = ModelDrafter(ToyStage(0, 2, True), pool, n_batch=4)
    request = Request(0, list(range(11)), 9, SamplingParams(temp=0.0), 99)
    drafter.open(request)
    assert drafter.expand(request, {request.tree.root: 2}, lambda: True) is None
    assert pool.placed_end(request.id) == request.tree.root.position
    assert drafter.expand(request, {request.tree.root: 2}, lambda: False)
