"""The choice for a position: llama.cpp's candidates, the target's distribution, the same wherever it is asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pipeinfer.core.samplers import MAX_BIASES, bias_text, largest, read_bias
from pipeinfer.core.sampling import SamplingParams, choose, gumbel, gumbel_bound, perturbed, random_words, remaining


def logits_of(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def candidates(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    ids, values = remaining(logits, params, position=0)
    return ids[~np.isneginf(values)] if params.top_n_sigma > 0.0 else ids


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), SamplingParams(temp=0), 5) == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=0, top_p=1, min_p=0), [0, 1, 2, 3]),
        (SamplingParams(top_k=2, top_p=1, min_p=0), [0, 1]),
        (SamplingParams(top_k=0, top_p=0.5, min_p=0), [0, 1]),
        (SamplingParams(top_k=0, top_p=0.39, min_p=0), [1]),
        (SamplingParams(top_k=0, top_p=1, min_p=0.6), [0, 1]),
        (SamplingParams(top_k=0, top_p=0.0, min_p=1.0), [1]),
        (SamplingParams(top_k=1000, top_p=1, min_p=0), [0, 1, 2, 3]),
    ],
)
def test_candidates(params: SamplingParams, kept: list[int]) -> None:
    assert candidates(logits_of([0.3, 0.4, 0.1, 0.2]), params).tolist() == kept


def test_ties_at_the_border_of_top_k_go_by_token_id() -> None:
    assert candidates(np.array([1, 2, 1, 1], np.float32), SamplingParams(top_k=2, top_p=1, min_p=0)).tolist() == [0, 1]


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


def noise(seed: int, position: int, ids: list[int]) -> np.ndarray:
    return gumbel(random_words(seed, position, np.array(ids)))


def test_noise_depends_on_seed_position_and_token_only() -> None:
    assert np.array_equal(noise(3, 9, list(range(50))), noise(3, 9, list(range(100)))[:50])
    assert not np.array_equal(noise(3, 9, [1, 2]), noise(3, 10, [1, 2]))
    assert not np.array_equal(noise(3, 9, [1, 2]), noise(4, 9, [1, 2]))


def test_noise_is_the_same_for_ever() -> None:
    """A seed's text must not change with a version: these values are part of the interface."""
    assert noise(7, 42, [0, 1, 2]) == pytest.approx(
        [1.6383498330874182, 2.6696577405925885, 0.4180793520062409], abs=1e-12
    )


def test_a_token_has_its_noise_whatever_else_is_asked_for() -> None:
    """Far between and close together, from the start and from the middle: the words of one stream."""
    stream = np.random.Philox(key=5, counter=[0, 0, 0, 17]).random_raw(50_000)
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 40, 1000, 49_000):
        ids = np.sort(rng.choice(50_000, n, replace=False))
        assert np.array_equal(random_words(5, 17, ids), stream[ids])
    for first, last in ((0, 1), (3, 5), (4, 8), (4099, 4200)):
        assert np.array_equal(random_words(5, 17, np.arange(first, last)), stream[first:last])


def test_the_bound_of_the_noise_holds() -> None:
    ends = np.array([0, 1, 2**11, 2**32 - 1, 2**63, 2**64 - 2**32 - 1, 2**64 - 2**32, 2**64 - 1], np.uint64)
    words = np.concatenate([ends, random_words(3, 4, np.arange(20_000))])
    assert np.all(gumbel_bound(words) >= gumbel(words) - 1e-5)
    assert np.all(np.isfinite(gumbel(words)))
    assert np.median(gumbel_bound(words) - gumbel(words)) < 0.5


# -- against a plain implementation


def plain_candidates(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """Sort everything, then cut: most likely first, ties by token id."""
    ids = np.argsort(-logits, kind="stable")[: params.top_k if params.top_k > 0 else None]
    weights = np.exp(logits[ids] - logits[ids[0]]).astype(np.float64)
    if params.top_p < 1.0:
        ids = ids[: int(np.searchsorted(np.cumsum(weights), params.top_p * weights.sum())) + 1]
    if params.min_p > 0.0:
        ids = ids[logits[ids] >= logits[ids[0]] + np.float32(np.log(params.min_p))]
    return ids.tolist()


def plain_choice(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    """Noise for the whole vocabulary, then the best of the candidates."""
    stream = np.random.Philox(key=params.seed, counter=[0, 0, 0, position]).random_raw(len(logits))
    scores = logits.astype(np.float64) / params.temp + gumbel(stream)
    return max(plain_candidates(logits, params), key=lambda token: scores[token])


SHAPES = {
    "normal": lambda rng, n: rng.normal(0, 3, n),
    "flat": lambda rng, n: rng.normal(0, 0.1, n),
    "peaked": lambda rng, n: 2 * rng.standard_t(2, n),
    "tied": lambda rng, n: rng.integers(0, 12, n),
    "level": lambda rng, n: np.zeros(n),
    "barred": lambda rng, n: np.where(np.arange(n) % 9, -np.inf, rng.normal(0, 3, n)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_vocab", [3, 700, 20_001, 80_000])
def test_the_choice_is_that_of_the_plain_implementation(shape: str, n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    options = [(top_k, top_p, min_p) for top_k in (0, 1, 40, 3000) for top_p in (1.0, 0.95, 0.3) for min_p in (0, 0.05)]
    for number, (top_k, top_p, min_p) in enumerate(options):
        params = SamplingParams(7, 0.8 + 0.1 * (number % 4), top_k, top_p, min_p)
        logits = SHAPES[shape](rng, n_vocab).astype(np.float32)
        assert candidates(logits, params).tolist() == sorted(plain_candidates(logits, params)), params
        assert choose(logits, params, number) == plain_choice(logits, params, number), params


def test_the_largest_are_found_wherever_they_lie() -> None:
    rng = np.random.default_rng(4)
    for n in (1, 2, 40, 200):
        for logits in (np.arange(9001), -np.arange(9001), rng.permutation(9001), rng.integers(0, 50, 9001)):
            found = largest(logits.astype(np.float32), n)
            assert found.tolist() == sorted(np.argsort(-logits, kind="stable")[:n].tolist())


def test_many_candidates_follow_the_distribution() -> None:
    """Chi-square over groups of a vocabulary too large to be scored whole; 9 degrees of freedom, 0.1% limit 27.9."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, 40_000).astype(np.float32)
    params, n = SamplingParams(seed=2, temp=0.9, top_k=0, top_p=1.0, min_p=0.0), 2000
    counts = np.bincount([choose(logits, params, position) % 10 for position in range(n)], minlength=10)
    weights = np.exp(logits.astype(np.float64) / params.temp)
    expected = n * np.bincount(np.arange(40_000) % 10, weights) / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 27.9


def test_tokens_at_one_position_share_its_noise() -> None:
    """Siblings in a tree of guesses, and the target: whatever else is a candidate."""
    rng = np.random.default_rng(6)
    one, other = rng.normal(0, 3, (2, 30_000)).astype(np.float32)
    found = []
    for logits, top_k in ((one, 40), (other, 40), (one, 0)):
        ids, scores = perturbed(logits, SamplingParams(seed=1, temp=1.0, top_k=top_k), 5)
        found.append(dict(zip(ids.tolist(), scores - logits[ids].astype(np.float64), strict=True)))
    shared = [(first[token], second[token]) for first in found for second in found for token in first.keys() & second]
    assert len(shared) > 40
    assert all(first == pytest.approx(second, abs=1e-9) for first, second in shared)


@pytest.mark.parametrize("temp", [1.0, 1e-4, 7e-8, 3e-9, 1e-11, 1e-18, 1e-25, 1e-30])
def test_the_best_of_many_is_found_at_every_temperature(temp: float) -> None:
    """Bounds of float32 leave candidates out: logits divided by a low temperature exceed what they tell apart."""
    rng, params = np.random.default_rng(8), SamplingParams(seed=1, temp=temp, top_k=0, top_p=1.0, min_p=0.0)
    for position in range(40):
        logits = rng.normal(0, 3, 30_000).astype(np.float32)
        whole = logits.astype(np.float64) / temp + gumbel(random_words(1, position, np.arange(30_000)))
        assert choose(logits, params, position) == np.argmax(whole)


def test_what_is_excluded_is_not_the_least_likely_of_the_top() -> None:
    params = SamplingParams(seed=1, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=1.0, xtc_threshold=0.0)
    logits = np.array([3.0, 1.0, 2.0, -np.inf, -np.inf], np.float32)
    assert choose(logits, params, 3) == 1


def test_penalties_change_seen_tokens_only() -> None:
    params = SamplingParams(temp=0, repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = np.array([4.0, 3.9, -1.0, 1.0], np.float32)
    assert choose(logits, params, 3, [0, 0, 2]) == 1
    assert logits.tolist() == [0.75, np.float32(3.9), -2.75, 1.0]


def test_biases_come_before_penalties_and_temperature() -> None:
    params = SamplingParams(temp=0, repeat_penalty=2.0, logit_bias=bias_text([(0, -2.0), (2, 3.5), (1, -math.inf)]))
    logits = np.array([4.0, 3.9, -1.0, 1.0], np.float32)
    assert choose(logits, params, 3, [0, 0]) == 2
    assert logits.tolist() == [1.0, -math.inf, 2.5, 1.0]
    assert choose(np.zeros(3, np.float32), replace(params, logit_bias="1-inf 99+5"), 1) == 0  # 99: a smaller vocabulary
    for temp in (0.0, 0.8):
        never = replace(params, temp=temp, logit_bias="0-inf 1-inf 2-inf", repeat_penalty=1.0)
        assert choose(np.zeros(3, np.float32), never, 1) in range(3), "nothing is left: some token, no fault"


def test_a_bias_moves_shares_as_its_size_says() -> None:
    params, n = SamplingParams(seed=4, temp=1.0, top_k=0, top_p=1.0, min_p=0.0), 4000
    biased = replace(params, logit_bias=bias_text([(1, 0.5), (1, 0.5), (3, -math.inf)]))  # of one token they add up
    tokens = [choose(np.zeros(4, np.float32), biased, position) for position in range(n)]
    counts = np.bincount(tokens, minlength=4)
    assert counts[3] == 0 and abs(counts[1] / n - math.e / (2 + math.e)) < 0.03


@pytest.mark.parametrize(
    "text", ["1", "+1", "1+", "a+1", "1+inf", "1+nan", "1*2", "99999999999+1", "1+1e99", "", "1 +1"]
)
def test_what_is_no_bias_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"TOKEN_ID\(\+/-\)BIAS"):
        read_bias(text)


def test_biases_are_the_same_text_however_they_are_written() -> None:
    assert (
        bias_text(map(read_bias, ["22-inf", "7+.5", "7+1e0"]))
        == bias_text([(7, 1.5), (22, -math.inf)])
        == "7+1.5 22-inf"
    )
    with pytest.raises(ValueError, match="2048 are possible"):
        bias_text((token, 1.0) for token in range(MAX_BIASES + 1))
    assert bias_text([(5, 1e9), (5, 1e9), (6, -1e9), (6, -1.0)]) == "5+1e+09 6-inf", "what it writes can be read"
    assert len(bias_text((2**31 - 1 - token, -1.2345678e-9) for token in range(MAX_BIASES))) < 1 << 16


def test_ends_are_not_chosen_before_min_tokens() -> None:
    params = SamplingParams(temp=0, min_tokens=3, logit_bias=bias_text([(2, 50.0)])).with_ends(10, {2, 99})
    chosen = [choose(np.array([1, 3, 2, 0], np.float32), params, position) for position in range(10, 15)]
    assert chosen == [1, 1, 1, 2, 2]
    assert SamplingParams().with_ends(10, {2}) == SamplingParams()
