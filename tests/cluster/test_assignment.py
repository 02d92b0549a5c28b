"""Layers -> stages: balanced, as asked, or a clear refusal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from pytest import MonkeyPatch

from pipeinfer.cluster import spread as spread_module
from pipeinfer.cluster.assignment import RoomFor, Sizes, assign, balance, parse_split, split_layers, stage_ranks
from pipeinfer.cluster.hosts.host import LayerSpeed
from pipeinfer.cluster.spread import StageRoom, spread_layers
from pipeinfer.errors import UserError

N = TypeVar("N", int, float)


def sizes(layers: list[int], output: int = 0) -> Sizes:
    return Sizes(tuple(layers), output)


def test_roles() -> None:
    assert stage_ranks(1, [1]) == [0]
    assert stage_ranks(2, [1]) == [1]
    assert stage_ranks(2, []) == [0, 1]
    assert stage_ranks(4, [1]) == [1, 2, 3]
    assert stage_ranks(7, [1, 1, 3]) == [5, 6]


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
        assert worst(found) == min(map(worst, splits(len(layers), n_stages)))


def splits(n_layers: int, n_stages: int) -> list[tuple[int, ...]]:
    """All there are."""
    cuts = itertools.combinations(range(1, n_layers), n_stages - 1)
    return [tuple(end - start for start, end in itertools.pairwise((0, *cut, n_layers))) for cut in cuts]


def stage_sums(values: Sequence[Sequence[N]], counts: Sequence[int]) -> list[N]:
    """Of what each stage has of `values[stage][layer]`."""
    ends = list(itertools.accumulate(counts, initial=0))
    return [sum(row[first:last]) for row, first, last in zip(values, ends, ends[1:], strict=False)]


def random_case(rng: random.Random) -> tuple[list[list[int]], list[list[int]], StageRoom]:
    """Costs and memory by stage and layer, and the memory that there is, of hosts with some stages each."""
    n_layers = rng.randint(1, 7)
    n_stages = rng.randint(1, min(4, n_layers))
    speeds, layers = [rng.randint(1, 3) for _ in range(n_stages)], [rng.randint(1, 4) for _ in range(n_layers)]
    costs = [[speed * layer for layer in layers] for speed in speeds]
    needs = [[rng.randint(1, 5) for _ in layers] for _ in range(n_stages)]
    hosts = tuple(rng.choice("ab") for _ in range(n_stages))
    free = {host: rng.randint(0, 4 * n_layers) for host in hosts}
    limits = tuple(rng.randint(2, 3 * n_layers) for _ in hosts)
    gpus = tuple(rng.choice(["", f"GPU of {host}", "other GPU"]) for host in hosts) if rng.random() < 0.5 else ()
    free |= {name: rng.randint(1, 4 * n_layers) for name in gpus if name}
    return (
        costs,
        needs,
        StageRoom(
            lambda stage, first, last: sum(needs[stage][first:last]),
            hosts,
            free,
            limits,
            lambda stage, first, last: (1 + stage % 2) * (last - first),
            gpus,
        ),
    )


def fits(needs: list[list[int]], counts: Sequence[int], room: StageRoom) -> bool:
    held, taken = stage_sums(needs, counts), dict.fromkeys(room.free, 0)
    for stage, host in enumerate(room.hosts):
        taken[host] += held[stage]
        if room.gpus and room.gpus[stage]:
            taken[room.gpus[stage]] += (1 + stage % 2) * counts[stage]
    is_within = all(n <= limit for n, limit in zip(held, room.limits, strict=True))
    return is_within and all(taken[name] <= room.free[name] for name in taken)


def test_no_split_that_fits_is_faster() -> None:
    """Against all splits: stages of different speed, hosts that share their memory among stages, limits of ranks
    and of their GPUs."""
    rng, n_found, n_tight = random.Random(7), 0, 0
    for _ in range(2000):
        costs, needs, room = random_case(rng)
        possible = [c for c in splits(len(costs[0]), len(costs)) if fits(needs, c, room)]
        found = spread_layers(costs, room)
        assert bool(found) == bool(possible), (costs, needs, room)
        free = spread_layers(costs)
        assert free and sum(free) == len(costs[0])
        if found:
            n_found, n_tight = n_found + 1, n_tight + (found != free)
            assert tuple(found) in possible
            assert max(stage_sums(costs, found)) == min(max(stage_sums(costs, c)) for c in possible)
            assert found == free or not fits(needs, free, room), "where memory is no matter it changes nothing"
    assert n_found > 300 and n_tight > 100


def test_of_equally_fast_splits_the_most_even_one() -> None:
    assert balance(sizes([1] * 11), 4) == [2, 3, 3, 3]
    assert spread_layers([[1] * 6, [3] * 6, [1] * 6]) == [2, 1, 3]
    assert spread_layers([[0.1] * 30] * 3) == [10] * 3, "sums of floats that are equal but for their rounding"


def test_hosts_that_take_turns_share_in_equal_parts_where_all_ways_are_too_many(monkeypatch: MonkeyPatch) -> None:
    hosts = tuple("abcabc")
    room = StageRoom(lambda stage, first, last: last - first, hosts, {"a": 4, "b": 9, "c": 99}, (99,) * 6)
    exact = spread_layers([[1] * 24] * 6, room)
    monkeypatch.setattr(spread_module, "MAX_STATES", 1)
    in_parts = spread_layers([[1] * 24] * 6, room)
    for found in (exact, in_parts):
        assert found and sum(found) == 24 and max(found) == 6
        assert found[0] + found[3] <= 4 and found[1] + found[4] <= 9
    assert in_parts and in_parts[0] <= 2 and in_parts[1] <= 4
    parted = StageRoom(room.needed, hosts, {"a": 4, "b": 4, "c": 8}, (99,) * 6)
    assert spread_layers([[1] * 24] * 6, parted) is None


def test_as_many_stages_as_a_model_has_layers() -> None:
    assert balance(sizes([1] * 512), 512) == [1] * 512
    assert max(balance(sizes([1] * 512), 500)) == 2


def test_a_small_host_gets_fewer_layers() -> None:
    layers = sizes([10] * 12)
    room = StageRoom(lambda stage, first, last: 10 * (last - first), ("a", "b", "a"), {"a": 110, "b": 25}, (99, 99, 50))
    assert balance(layers, 3) == [4, 4, 4]
    plan = assign(4, [sizes([1])], layers, room=lambda placed, ranks: room)
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 5), (5, 7), (7, 12)]
    chosen = assign(4, [sizes([1])], layers, split=[4, 4, 4], room=lambda placed, ranks: room)
    assert [stage.last for stage in chosen.stages] == [4, 8, 12], "a split that was asked for is taken as it is"
    short = StageRoom(room.needed, room.hosts, {"a": 40, "b": 25}, room.limits)
    tight = assign(4, [sizes([1])], layers, room=lambda placed, ranks: short)
    assert [stage.last for stage in tight.stages] == [4, 8, 12]


def test_a_plan_describes_its_ranks() -> None:
    plan = assign(3, [sizes([1])], sizes([10, 10, 10, 10], output=7), split=[3, 1])
    first, last = plan.stages
    assert (first.rank, first.first, first.last) == (1, 0, 3) and (last.rank, last.first, last.last) == (2, 3, 4)
    assert plan.describe(0) == "draft" and plan.describe(2) == "stage 1, layers 3-3"


@pytest.mark.parametrize(
    ("split", "n_layers", "expected"),
    [
        ([4, 4], 8, [4, 4]),
        ([0.25, 0.75], 8, [2, 6]),
        ([0.1, 0.4, 0.5], 10, [1, 4, 5]),
        ([1.0], 8, [8]),
        ([1], 1, [1]),
        ([0.001, 0.998, 0.001], 3, [1, 1, 1]),
        ([0.33, 0.33, 0.33], 80, [27, 26, 27]),
        ([0.142] * 7, 94, [13, 14, 13, 14, 13, 14, 13]),
        ([0.505, 0.504], 80, [40, 40]),
    ],
)
def test_split(split: list[float], n_layers: int, expected: list[int]) -> None:
    assert split_layers(split, n_layers, len(split)) == expected


@pytest.mark.parametrize(
    ("text", "n_layers", "n_stages", "words"),
    [
        ("4,4,4", 12, 2, "3 parts, and the number of stages is 2"),
        ("4,4", 9, 2, "adds up to 8"),
        ("0.5,0.6", 9, 2, "add up to 1"),
        ("0,9", 9, 2, "above 0"),
        ("-1,10", 9, 2, "above 0"),
        ("nan,1", 9, 2, "above 0"),
        ("a,b", 9, 2, "list of numbers"),
        ("", 9, 2, "list of numbers"),
        ("0.5,0.5/0.5", 9, 2, "draft"),
    ],
)
def test_wrong_splits_are_refused(text: str, n_layers: int, n_stages: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        split_layers(parse_split(text), n_layers, n_stages)


def test_pipeinfers_split_form_is_taken() -> None:
    assert parse_split("0.1,0.4,0.5/1.0") == [0.1, 0.4, 0.5]


# -- drafts over several ranks


def test_larger_drafts_are_cut_by_size_too() -> None:
    drafts = [sizes([1] * 4), sizes([2] * 6), sizes([3] * 9, output=9)]
    plan = assign(8, drafts, sizes([10] * 12), draft_split=[1, 3])
    assert plan.draft_split == (1, 3)
    assert [[(own.rank, own.first, own.last) for own in stages] for stages in plan.drafts] == [
        [(0, 0, 4)],
        [(1, 0, 6)],
        [(2, 0, 4), (3, 4, 8), (4, 8, 9)],
    ]
    assert [(stage.rank, stage.first, stage.last) for stage in plan.stages] == [(5, 0, 4), (6, 4, 8), (7, 8, 12)]
    assert [plan.describe(rank) for rank in (0, 1, 3, 5)] == [
        "draft 1",
        "draft 2",
        "draft 3 stage 1, layers 4-7",
        "stage 0, layers 0-3",
    ]
    assert plan.computing == frozenset(range(8))
    assert [plan.neighbours(rank) for rank in (2, 3, 4)] == [(0, 3), (2, 4), (3, None)]
    assert [plan.neighbours(rank) for rank in (5, 6, 7)] == [(0, 6), (5, 7), (6, None)]


def test_a_draft_is_cut_so_that_it_fits_into_what_memory_the_drafts_before_leave() -> None:
    asked: list[tuple[int, list[int]]] = []

    def room(placed: Sequence[object], ranks: Sequence[int]) -> StageRoom:
        asked.append((len(placed), list(ranks)))
        hosts = tuple(map(str, ranks))
        return StageRoom(lambda stage, first, last: last - first, hosts, dict.fromkeys(hosts, 9), (9, 2)[: len(ranks)])

    plan = assign(5, [sizes([1]), sizes([1] * 6)], sizes([1] * 6), room=room, draft_split=[2])
    assert asked == [(1, [1, 2]), (2, [3, 4])]
    assert [own.last for own in plan.drafts[1]] == [own.last for own in plan.stages] == [4, 6]


@pytest.mark.parametrize(
    ("n_ranks", "n_drafts", "draft_split", "words"),
    [
        (4, 1, [2], "--draft-split 2 cuts larger drafts, and there is none"),
        (4, 0, [2], "--draft-split 2 cuts larger drafts, and there is none"),
        (9, 2, [2, 3], "--draft-split 2,3 has 2 parts for 1 larger draft; give one number for each"),
        (9, 3, [2], "--draft-split 2 has 1 part for 2 larger drafts; give one number for each"),
        (3, 2, [2], "2 drafts on 3 ranks and the target need 4 ranks, here are 3; start more, or give a smaller"),
        (1, 2, [2], "2 drafts on 3 ranks and the target need 4 ranks, here is 1; start more"),
        (9, 2, [7], "--draft-split 7: 7 ranks for draft 2, which has 6 layers; give at most 6"),
    ],
)
def test_drafts_that_cannot_be_cut_so(n_ranks: int, n_drafts: int, draft_split: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        assign(n_ranks, [sizes([1] * 6)] * n_drafts, sizes([1] * 12), draft_split=draft_split)


def test_drafts_in_one_part_each_may_share_a_lone_rank() -> None:
    plan = assign(1, [sizes([1]), sizes([1] * 6)], sizes([1] * 12), draft_split=[1])
    assert plan.describe(0) == "draft 1, draft 2, stage 0, layers 0-11"


def test_more_stages_than_layers() -> None:
    with pytest.raises(UserError, match="5 stages for 4 layers; start at most 5 ranks"):
        assign(6, [sizes([1])], sizes([1] * 4))
    with pytest.raises(UserError, match="at most 4 ranks"):
        assign(6, [], sizes([1] * 4))


# --- models that cannot be cut everywhere ---------------------------------------------------------------------------


def test_faults_are_respected_and_the_rest_is_best() -> None:
    rng = random.Random(3)
    for _ in range(100):
        layers = [rng.randint(1, 9) for _ in range(rng.randint(2, 7))]
        runs = itertools.combinations(range(len(layers) + 1), 2)
        faults = {run: "a reason" for run in runs if rng.random() < 0.4}
        n_stages = rng.randint(1, len(layers))

        def possible(counts: Sequence[int], faults: dict[tuple[int, int], str] = faults) -> bool:
            ends = list(itertools.accumulate(counts, initial=0))
            return not any(run in faults for run in itertools.pairwise(ends))

        options = [counts for counts in splits(len(layers), n_stages) if possible(counts)]
        found = spread_layers([layers] * n_stages, None, faults)
        assert (found is None) == (not options)
        if found is not None:
            assert possible(found)
            assert max(stage_sums([layers] * n_stages, found)) == min(
                max(stage_sums([layers] * n_stages, counts)) for counts in options
            )


def summed(layers: Sequence[int]) -> Callable[[int, int, int], float]:
    return lambda stage, first, last: sum(layers[first:last])


def always(room: StageRoom) -> RoomFor:
    return lambda placed, ranks: room


def test_timed_ranks_are_split_as_well_as_any_split_there_is() -> None:
    """Of 200 unequal clusters: layers of different sizes, the output matrix, hosts whose memory some ranks share."""
    rng, n_bound = random.Random(11), 0
    for _ in range(200):
        n_stages = rng.randint(2, 4)
        layers = [rng.randint(50, 90) for _ in range(rng.randint(n_stages, 14))]
        model = Sizes(tuple(layers), rng.randint(0, 300))
        known = [None, 0.0, rng.uniform(1e-3, 0.2)]
        speeds = [LayerSpeed(rng.uniform(1, 8) * 1e-4, rng.choice(known)) for _ in range(n_stages)]
        hosts = tuple(rng.choice("abc") for _ in range(n_stages))
        room = StageRoom(
            summed(layers),
            hosts,
            {host: rng.uniform(0.4, 1.2) * sum(layers) for host in hosts},
            (sum(layers),) * n_stages,
        )
        costs = [speed.seconds(layers, model.output_bytes) for speed in speeds]
        plan = assign(n_stages + 1, [sizes([1])], model, None, always(room), (), [None, *speeds])
        found = [stage.last - stage.first for stage in plan.stages]
        fitting = [counts for counts in splits(len(layers), n_stages) if room.fits(counts)]
        best = min(max(stage_sums(costs, counts)) for counts in fitting or splits(len(layers), n_stages))
        assert max(stage_sums(costs, found)) <= 1.0001 * best, (found, costs)
        n_bound += found != balance(model, n_stages, None, speeds)
    assert n_bound > 10, "memory was no matter"


def test_ranks_that_are_alike_or_not_all_timed_go_by_size() -> None:
    model, by_size = sizes([10] * 12, output=20), [7, 5]
    for speeds in ([LayerSpeed(1.0), None], [LayerSpeed(1.0)] * 2, [None, None], []):
        assert [stage.last - stage.first for stage in assign(2, [], model, speeds=speeds).stages] == by_size
    (slow, fast) = assign(2, [], model, speeds=[LayerSpeed(3.0), LayerSpeed(1.0, output_s=0.0)]).stages
    assert (slow.last - slow.first, fast.last - fast.first) == (3, 9)
    chosen = assign(2, [], model, [6, 6], speeds=[LayerSpeed(3.0), LayerSpeed(1.0)])
    assert chosen.stages[0].last == 6, "a split that was asked for is taken as it is"


def test_a_split_that_the_model_does_not_allow_is_refused() -> None:
    in_fours = {(a, b): "only in fours" for a in range(13) for b in range(13) if a % 4}
    model = Sizes((1,) * 12, 1, in_fours)
    assert balance(model, 2) == [8, 4] and balance(model, 3) == [4, 4, 4]
    assert [stage.first for stage in assign(3, [], model).stages] == [0, 4, 8]
    with pytest.raises(UserError, match=r"4 stages for 12 layers .*only in fours\); start so few ranks .* 3 stages"):
        balance(model, 4)
    with pytest.raises(UserError, match=r"--layer-split 4,2,6: layers 6-11 of this model cannot be a stage, only in"):
        assign(3, [], model, split=[4, 2, 6])
