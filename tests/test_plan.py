"""Layers -> stages: balanced, as asked, or a clear refusal."""

from __future__ import annotations

import itertools
import random

import pytest

from pipeinfer.cluster.plan import Sizes, balance, make_plan, parse_split, split_layers, stage_ranks
from pipeinfer.errors import UserError


def sizes(layers: list[int], output: int = 0) -> Sizes:
    return Sizes(tuple(layers), (10,) * len(layers), 5, output)


def test_roles() -> None:
    assert stage_ranks(1, True) == [0]
    assert stage_ranks(2, True) == [1]
    assert stage_ranks(2, False) == [0, 1]
    assert stage_ranks(4, True) == [1, 2, 3]


def test_balance_is_optimal() -> None:
    rng = random.Random(5)
    for _ in range(200):
        layers = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        n_stages, output = rng.randint(1, len(layers)), rng.randint(0, 20)

        def worst(counts: tuple[int, ...] | list[int], layers: list[int] = layers, output: int = output) -> int:
            ends = list(itertools.accumulate(counts))
            loads = [sum(layers[end - count : end]) for end, count in zip(ends, counts, strict=True)]
            return max([*loads[:-1], loads[-1] + output])

        found = balance(sizes(layers, output), n_stages)
        assert sum(found) == len(layers) and min(found) >= 1
        options = (c for c in itertools.product(range(1, len(layers) + 1), repeat=n_stages) if sum(c) == len(layers))
        assert worst(found) == min(map(worst, options))


def test_plan_counts_bytes_where_they_lie() -> None:
    plan = make_plan(3, True, sizes([10, 10, 10, 10], output=7), n_cells=100, split=[3, 1])
    first, last = plan.stages
    assert (first.rank, first.first, first.last, first.weight_bytes, first.kv_bytes) == (1, 0, 3, 35, 3000)
    assert (last.rank, last.first, last.last, last.weight_bytes, last.kv_bytes) == (2, 3, 4, 17, 1000)
    assert plan.describe(0) == "draft" and plan.describe(2) == "stage 1, layers 3-3"


@pytest.mark.parametrize(
    ("split", "n_layers", "expected"),
    [([4, 4], 8, [4, 4]), ([0.25, 0.75], 8, [2, 6]), ([0.1, 0.4, 0.5], 10, [1, 4, 5]), ([1.0], 8, [8]), ([1], 1, [1]),
     ([0.001, 0.998, 0.001], 3, [1, 1, 1])],
)  # fmt: skip
def test_split(split: list[float], n_layers: int, expected: list[int]) -> None:
    assert split_layers(split, n_layers, len(split)) == expected


@pytest.mark.parametrize(
    ("text", "n_layers", "n_stages", "words"),
    [("4,4,4", 12, 2, "3 parts for 2 stages"), ("4,4", 9, 2, "adds up to 8"), ("0.5,0.6", 9, 2, "add up to 1"),
     ("0,9", 9, 2, "above 0"), ("-1,10", 9, 2, "above 0"), ("nan,1", 9, 2, "above 0"), ("a,b", 9, 2, "list of numbers"),
     ("", 9, 2, "list of numbers"), ("0.5,0.5/0.5", 9, 2, "draft")],
)  # fmt: skip
def test_wrong_splits_are_refused(text: str, n_layers: int, n_stages: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        split_layers(parse_split(text), n_layers, n_stages)


def test_pipeinfers_split_form_is_taken() -> None:
    assert parse_split("0.1,0.4,0.5/1.0") == [0.1, 0.4, 0.5]


def test_more_stages_than_layers() -> None:
    with pytest.raises(UserError, match="5 stages for 4 layers; start at most 5 ranks"):
        make_plan(6, True, sizes([1] * 4), 10)
    with pytest.raises(UserError, match="at most 4 ranks"):
        make_plan(6, False, sizes([1] * 4), 10)
