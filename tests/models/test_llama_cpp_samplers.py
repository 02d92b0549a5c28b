"""Samplers against llama.cpp's own: the candidates and their probabilities, and the shares of what is drawn."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
import pytest

from pipeinfer.core.drafting import guess_next
from pipeinfer.core.samplers import SAMPLERS, order_text, probabilities, sampler_names, switched_off
from pipeinfer.core.sampling import SamplingParams, adjust, choose, remaining, temperature
from pipeinfer.errors import UserError
from pipeinfer.models.demo import TARGET
from pipeinfer.models.text.tokenizer import BREAKERS, MAX_TAIL, Tokenizer, breaker_tokens, breakers_json

N_CTX = 4096
PLAIN = SamplingParams(seed=3, temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Any]:
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(TARGET).encode(), options)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(TARGET)
    yield tokenizer
    tokenizer.close()


def theirs(logits: np.ndarray, params: SamplingParams, history: list[int], vocabulary: Any) -> np.ndarray:
    """Probabilities (n_vocab,) of llama.cpp's chain; `xtc_probability` is 0 or 1."""
    texts = json.loads(params.dry_sequence_breakers) if params.dry_sequence_breakers else list(BREAKERS)
    breakers = (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])
    dry = params.dry_multiplier, params.dry_base, params.dry_allowed_length
    n_dry = params.dry_penalty_last_n if params.dry_penalty_last_n >= 0 else N_CTX
    penalties = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
    makers = {
        "penalties": lambda: llama_cpp.llama_sampler_init_penalties(len(logits), params.repeat_last_n, *penalties),
        "dry": lambda: llama_cpp.llama_sampler_init_dry(vocabulary, *dry, n_dry, breakers, len(texts)),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(params.top_k),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(params.typical_p, 0),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(params.top_p, 0),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(params.min_p, 0),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            params.temp, params.dynatemp_range, params.dynatemp_exponent
        ),
    }
    chain = [makers[name]() for name in params.sampler_order.split(";") if params.sampler_order] or [
        make() for make in makers.values()
    ]
    data = (llama_cpp.llama_token_data * len(logits))()
    for token, logit in enumerate(logits.tolist()):
        data[token] = llama_cpp.llama_token_data(token, logit, 0.0)
    row = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    for sampler in chain:
        for token in history:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(row))
        llama_cpp.llama_sampler_free(sampler)
    found = np.full(len(logits), -np.inf, np.float32)
    for index in range(row.size):
        found[int(row.data[index].id)] = row.data[index].logit
    return probabilities(found)


def ours(logits: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    """Probabilities (n_vocab,) with which tokens are chosen."""
    logits = logits.copy()
    adjust(logits, params, 0, history)
    ids, values = remaining(logits, params, 0)
    temp = 1.0 if params.sampler_order else temperature(values, params)
    found = np.full(len(logits), -np.inf, np.float32)
    found[ids] = values / np.float32(temp)
    return probabilities(found)


CASES: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.3, "top_k": 40, "min_p": 0.05},
    {"top_n_sigma": 2.0, "dynatemp_range": 0.5},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "top_k": 30},
    {"typical_p": 0.5, "temp": 0.7},
    {"xtc_probability": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02, "top_k": 20},
    {"xtc_probability": 1.0, "xtc_threshold": 0.51},
    {"dynatemp_range": 0.5},
    {"dynatemp_range": 1.5, "dynatemp_exponent": 2.0, "top_k": 15},
    {"dynatemp_range": 0.5, "temp": 0.0, "top_k": 15},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 2.0, "dry_base": 1.0, "dry_allowed_length": 0},
    {"dry_multiplier": 1.1, "dry_base": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": "[]"},
    {"dry_multiplier": 0.8, "dry_penalty_last_n": 20},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": '["ab", "r", "self."]'},
    {"dry_multiplier": 0.8, "xtc_probability": 1.0, "xtc_threshold": 0.05, "typical_p": 0.8, "top_k": 40, "temp": 0.8},
    {
        "dry_multiplier": 0.5,
        "repeat_penalty": 1.2,
        "repeat_last_n": 9,
        "top_k": 40,
        "top_p": 0.9,
        "dynatemp_range": 0.3,
    },
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_candidates_have_llama_cpps_probabilities(case: dict[str, Any], vocabulary: Any, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(5)
    params = replace(PLAIN, **case)
    plain = params
    if params.searched:
        params = replace(params, dry_breakers=breaker_tokens(tokenizer, params.dry_sequence_breakers))
    text = tokenizer.encode('def f(self):\n    return self.about(self.x, "a b")\n' * 2, add_special=False)
    letters = np.array(tokenizer.encode(" ".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"), add_special=False))
    n_changed = 0
    for number in range(24):
        logits = rng.normal(0, 1 + number % 4, tokenizer.n_vocab).astype(np.float32)
        few = letters[rng.integers(0, 3 + number, 4 * number)].tolist()
        history = (few, text[: len(text) - number], [letters[0].item()] * (5 * number), few * 3)[number % 4]
        found = ours(logits, params, history)
        assert np.abs(found - theirs(logits, plain, history, vocabulary)).max() < 1e-5, (case, number)
        n_changed += bool(np.abs(found - probabilities(logits)).max() > 1e-4)
    assert n_changed or case.get("xtc_threshold", 0) > 0.5, "the sampler did nothing"


@pytest.mark.parametrize("case", [each for each in CASES if "dynatemp_range" not in each], ids=str)
def test_greedy_choices_are_llama_cpps(case: dict[str, Any], vocabulary: Any, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(6)
    params = replace(PLAIN, **case, temp=0.0) if "temp" not in case else replace(PLAIN, **{**case, "temp": 0.0})
    tokens = replace(params, dry_breakers=breaker_tokens(tokenizer, params.dry_sequence_breakers))
    for number in range(12):
        logits = rng.normal(0, 3, tokenizer.n_vocab).astype(np.float32)
        history = rng.integers(0, 4, 30).tolist()
        expected = int(theirs(logits, params, history, vocabulary).argmax())
        assert choose(logits.copy(), tokens, number, history) == expected
        assert guess_next(logits.copy(), tokens, number, history, 3, True)[0].token == expected


def test_samplers_in_any_order_have_llama_cpps_probabilities(vocabulary: Any, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(8)
    on: dict[str, Any] = {"top_n_sigma": 2.0, "top_k": 30, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.05}
    on |= {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temp": 0.7, "repeat_penalty": 1.3, "repeat_last_n": 20}
    n_other = 0
    for _ in range(60):
        cuts = rng.permutation(list(SAMPLERS)[2:])[: rng.integers(1, 8)].tolist()
        if "top_n_sigma" in cuts:  # its logits of -inf make llama.cpp's entropy NaN
            cuts = [each for each in cuts if each != "typ_p"]
        names = [*["penalties"] * int(rng.integers(2)), *cuts]
        text = order_text(sampler_names(";".join(names)))
        params = replace(PLAIN, **{**on, **switched_off(names), "sampler_order": text})
        logits = rng.normal(0, 2, tokenizer.n_vocab).astype(np.float32)
        history = rng.integers(0, 40, 30).tolist()
        found = ours(logits, params, history)
        assert np.abs(found - theirs(logits, params, history, vocabulary)).max() < 1e-5, names
        chosen = choose(logits.copy(), params, 3, history)
        assert found[chosen] > 0 and guess_next(logits, params, 3, history, 2, True)[0].token == chosen
        n_other += bool(np.abs(found - ours(logits, replace(params, sampler_order=""), history)).max() > 1e-4)
    assert n_other > 5, "no order changed anything"


@pytest.mark.parametrize(
    ("text", "names", "order"),
    [
        ("edskypmxt", list(SAMPLERS), ""),
        ("top_k;top-p;temp", ["top_k", "top_p", "temperature"], ""),
        ("tk", ["temperature", "top_k"], "temperature;top_k"),
        ("", [], ""),
        ("typical_p;nucleus", ["typ_p", "top_p"], ""),
    ],
)
def test_orders_are_read_as_llama_cpp_does(text: str, names: list[str], order: str) -> None:
    assert sampler_names(text) == names
    assert order_text(names) == order


@pytest.mark.parametrize("names", [["top_k", "penalties"], ["dry", "penalties"], ["top_k", "min_p", "top_k"]])
def test_orders_that_are_not_possible_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="has"):
        order_text(names)


def test_draws_with_xtc_have_the_shares_of_both_outcomes() -> None:
    """Chi-square; 5 degrees of freedom, 0.1% limit 20.5."""
    logits = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], np.float32))
    params, n = replace(PLAIN, xtc_probability=0.3, xtc_threshold=0.12), 100_000
    counts = np.bincount([choose(logits, params, position) for position in range(n)], minlength=6)
    left = np.where(np.arange(6) < 2, 0.0, np.exp(logits))
    expected = n * (0.7 * np.exp(logits) + 0.3 * left / left.sum())
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_a_draft_with_the_targets_logits_guesses_what_it_chooses() -> None:
    rng = np.random.default_rng(7)
    params = SamplingParams(seed=4, xtc_probability=0.5, xtc_threshold=0.05, typical_p=0.9, dry_multiplier=0.8)
    for position in range(200):
        logits, history = rng.normal(0, 2, 500).astype(np.float32), rng.integers(0, 5, 40).tolist()
        chosen = choose(logits.copy(), params, position, history)
        assert guess_next(logits, params, position, history, 2, True)[0].token == chosen


def test_breakers_are_refused_that_are_too_many_or_too_long() -> None:
    assert breakers_json(["a"], "x") == '["a"]' and MAX_TAIL == 20
    for texts, reason in ((["a"] * 65, "64 are possible"), ([""], "0 characters"), (["a" * 41], "41 characters")):
        with pytest.raises(UserError, match=reason):
            breakers_json(texts, "--dry-sequence-breaker")
