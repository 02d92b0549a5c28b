"""The choice for a position: llama.cpp's candidates, the target's distribution, the same wherever it is asked."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.sampling import SamplingParams, candidates, choose, gumbel_noise


def logits_of(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), SamplingParams(temp=0), 5) == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=0, top_p=1, min_p=0), [1, 0, 3, 2]),
        (SamplingParams(top_k=2, top_p=1, min_p=0), [1, 0]),
        (SamplingParams(top_k=0, top_p=0.5, min_p=0), [1, 0]),
        (SamplingParams(top_k=0, top_p=0.39, min_p=0), [1]),
        (SamplingParams(top_k=0, top_p=1, min_p=0.5), [1, 0]),
        (SamplingParams(top_k=0, top_p=0.0, min_p=1.0), [1]),
        (SamplingParams(top_k=1000, top_p=1, min_p=0), [1, 0, 3, 2]),
    ],
)
def test_candidates(params: SamplingParams, kept: list[int]) -> None:
    assert candidates(logits_of([0.3, 0.4, 0.1, 0.2]), params).tolist() == kept


def test_ties_at_the_border_of_top_k_go_by_token_id() -> None:
    assert candidates(np.array([1, 2, 1, 1], np.float32), SamplingParams(top_k=2, top_p=1, min_p=0)).tolist() == [1, 0]


@pytest.mark.parametrize("temp", [0.5, 1.0, 2.0])
def test_sampled_tokens_follow_the_distribution(temp: float) -> None:
    """Chi-square against the exact distribution; 7 degrees of freedom, 0.1% limit 24.3."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, -2.0], np.float32)
    params = SamplingParams(seed=11, temp=temp, top_k=0, top_p=1, min_p=0)
    n = 20_000
    counts = np.bincount([choose(logits, params, position) for position in range(n)], minlength=8)
    weights = np.exp(logits / temp)
    expected = n * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_noise_depends_on_seed_and_position_only() -> None:
    assert np.array_equal(gumbel_noise(3, 9, 50), gumbel_noise(3, 9, 100)[:50])
    assert not np.array_equal(gumbel_noise(3, 9, 50), gumbel_noise(3, 10, 50))
    assert not np.array_equal(gumbel_noise(3, 9, 50), gumbel_noise(4, 9, 50))


def test_noise_is_the_same_for_ever() -> None:
    """A seed's text must not change with a version: these values are part of the interface."""
    assert gumbel_noise(7, 42, 3) == pytest.approx(
        [1.6383498330874182, 2.6696577405925885, 0.4180793520062409], abs=1e-12
    )
