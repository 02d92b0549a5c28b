"""What is timed of ranks before there is a plan, and what is chosen by it: recorded for clusters that are played."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.hosts.speed import Speed
from pipeinfer.disk_cache import DiskCache
from pipeinfer.job.options.limits import ALL_LAYERS
from pipeinfer.job.options.options import RunOptions, gpu_layers_asked
from pipeinfer.job.placement import gpus
from pipeinfer.job.placement.deployment import lay_out
from pipeinfer.job.placement.draft_place import options_of_draft
from pipeinfer.job.planning.planner import ETHERNET, open_planner
from pipeinfer.job.profiling.host_speeds import timed_nodes as with_run_times
from pipeinfer.job.profiling.host_speeds import with_speeds
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.build import describe_build
from pipeinfer.models.llama.devices import Device
from pipeinfer.policies import Iterative, PipeInfer
from tests.support.played_cluster import Found, Played, PlayedStage, job, played_clock, played_speed


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    two = [Device(f"CUDA{number}", "H200", "gpu", 1 << 40, 1 << 40) for number in range(2)]
    monkeypatch.setattr(gpus, "gpus", lambda: two)
    monkeypatch.setattr("pipeinfer.job.loading.stages.LlamaStage", PlayedStage)
    monkeypatch.setattr("pipeinfer.job.profiling.host_speeds.measure_speed", played_speed)
    monkeypatch.setattr(time, "monotonic", played_clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def asked(**changed: Any) -> RunOptions:
    fixed: dict[str, Any] = {"model": TARGET, "drafts": (DRAFT,), "policy": PipeInfer()}
    return RunOptions(**fixed | changed)


def host(name: str, n_cores: int = 4, processor: str = "x") -> Host:
    return Host(name, frozenset(range(n_cores)), n_cores, processor=processor)


def chosen(found: Found, options: RunOptions) -> tuple[dict[int, str], list[int]]:
    """Of each rank with layers of the target which, and the rank of each draft."""
    infos = [read_model_info(path) for path in options.drafts_in_use]
    plan = lay_out(options, found.hosts, read_model_info(TARGET), infos, 512, 32).plan
    return {stage.rank: stage.span for stage in plan.stages}, [stages[0].rank for stages in plan.drafts]


def drafts_on_cpu(found: Found, options: RunOptions) -> list[bool]:
    ranks = range(len(found.hosts))
    return [gpu_layers_asked(options_of_draft(options, found.hosts, rank), rank) == 0 for rank in ranks]


def predicted(found: Found, options: RunOptions) -> float | None:
    """Tokens a second."""
    nodes = with_run_times(with_speeds(found.speeds, found.hosts), found.times)
    options = replace(options, policy=type(options.policy)())  # what it has learned is no part of the question
    return open_planner(options, read_model_info(TARGET), nodes, ETHERNET, 100, ()).speed


def kept(folder: Path) -> dict[str, Any]:
    """The values in the cache by their names, with @ for versions."""
    entries = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    of_build, of_ours = f", pipeinfer {__version__}, {describe_build()}", f", pipeinfer {__version__}"
    return {entry["name"].replace(of_build, "@").replace(of_ours, "@"): entry["value"] for entry in entries}


def three(slow: float = 1.6e-8, faults: Sequence[int] = ()) -> list[Played]:
    """Three hosts, the second of which is slow; some of its loads fail."""
    return [Played(host("a"), 4e-9), Played(host("b", 4, "y"), slow, faults=faults), Played(host("c"), 4.1e-9)]


def on_gpus(run_s: float, faults: Sequence[int] = ()) -> list[Played]:
    """Three hosts with GPUs, on which a run takes so long besides; some loads of the last one fail."""
    return [
        Played(host(f"g{number}", 4, f"p{number}"), cpu_s, 1e-10 * (1 + number), run_s, faults if number == 2 else ())
        for number, cpu_s in enumerate((4e-9, 8e-9, 2e-9))
    ]


def started(name: str) -> tuple[list[Played], RunOptions]:
    """The ranks of a case and its options."""
    on_gpu, plain = {"n_gpu_layers": (ALL_LAYERS,)}, {"drafts": (), "policy": Iterative()}
    alike, one_core = Played(host("a"), 4e-9), Played(host("a", 1), 4e-9)
    cases: dict[str, tuple[list[Played], RunOptions]] = {
        "no draft": (three(), asked(**plain)),
        "far slower": (three(), asked()),
        "slower": (three(slow=5.5e-9), asked()),
        "large draft": (three(slow=5.5e-9), asked(drafts=(TARGET,))),
        "rank 0": (three(), asked(draft_rank=0)),
        "rank 2": (three(), asked(draft_rank=2)),
        "no layers": (three(faults=[0]), asked()),
        "alike": ([replace(alike) for _ in range(3)], asked()),
        "pairs": (
            [replace(alike), replace(alike), Played(host("b"), 4.1e-9), Played(host("b"), 6e-9)], asked(**plain)
        ),
        "few cores": ([replace(one_core), replace(one_core), Played(host("b", 2), 4e-9)], asked(**plain)),
        "GPUs": (on_gpus(1e-5), asked(**on_gpu)),
        "slow GPUs": (on_gpus(1e-3), asked(**on_gpu)),
        "slow GPUs, rank 1": (on_gpus(1e-3), asked(**on_gpu, draft_rank=1)),
        "one slow GPU": (on_gpus(4e-4), asked(**on_gpu)),
        "one lacks its GPU": (on_gpus(1e-3, faults=[1]), asked(**on_gpu)),
    }  # fmt: skip
    return cases[name]


RECORDED: dict[str, tuple[dict[int, str], list[int], str, float, list[int], list[int], list[float]]] = {
    "no draft": (
        {0: "0-4", 1: "5-5", 2: "6-8"},
        [],
        "CCC",
        57.462029,
        [124, 31, 84],
        [215, 62, 156],
        [1.05, 1.19, 1.13],
    ),
    "far slower": ({1: "0-1", 2: "2-8"}, [0], "CCC", 62.997751, [124, 31, 84], [629, 62, 156], [1.41, 1.19, 1.13]),
    "slower": ({0: "0-4", 2: "5-8"}, [1], "CCC", 210.31854, [124, 90, 84], [629, 168, 156], [1.41, 1.1, 1.13]),
    "large draft": ({1: "0-3", 2: "4-8"}, [0], "CCC", 75.762963, [124, 90, 84], [291, 168, 156], [1.86, 1.1, 1.13]),
    "rank 0": ({1: "0-1", 2: "2-8"}, [0], "CCC", 62.997751, [0, 24, 68], [585, 47, 135], [1.11, 1.2, 1.18]),
    "rank 2": ({0: "0-7", 1: "8-8"}, [2], "CCC", 76.264864, [93, 18, 0], [171, 47, 543], [1.09, 1.2, 1.2]),
    "no layers": ({1: "0-4", 2: "5-8"}, [0], "CCC", 29.659031, [0, 0, 0], [629, 62, 156], [1.06, 0.84, 0.78]),
    "alike": ({1: "0-4", 2: "5-8"}, [0], "CCC", 26.756664, [0, 0, 0], [269, 14, 54], [1.72, 0.16, 1.04]),
    "pairs": (
        {0: "0-2", 1: "3-5", 2: "6-7", 3: "8-8"},
        [],
        "CCCC",
        37.580058,
        [279, 279, 273, 114],
        [211, 40, 207, 86],
        [1.95, 1.21, 1.95, 2.05],
    ),
    "few cores": ({0: "0-1", 1: "2-4", 2: "5-8"}, [], "CCC", 20.160389, [31, 31, 43], [62, 0, 83], [1.19, 0.35, 1.2]),
    "GPUs": ({0: "0-6", 1: "7-8"}, [2], "GGG", 653.484832, [5751, 3016, 2669], [3016, 489, 327], [1.49, 1.35, 1.51]),
    "slow GPUs": ({0: "0-6", 1: "7-8"}, [2], "CCC", 240.675756, [1057, 760, 1348], [735, 296, 263], [1.84, 1.54, 1.7]),
    "slow GPUs, rank 1": (
        {0: "0-7", 2: "8-8"},
        [1],
        "GCG",
        264.923927,
        [255, 536, 140],
        [312, 585, 240],
        [0.79, 1.78, 1.02],
    ),
    "one slow GPU": (
        {0: "0-6", 1: "7-8"},
        [2],
        "GGC",
        323.049819,
        [1708, 1230, 1679],
        [994, 366, 293],
        [1.63, 1.43, 1.59],
    ),
    "one lacks its GPU": (
        {0: "0-6", 1: "7-8"},
        [2],
        "CCG",
        240.675756,
        [1057, 760, 444],
        [735, 296, 263],
        [1.84, 1.54, 1.35],
    ),
}
"""What each case gave: the layers of each rank, the draft's rank, what would compute the draft on each rank (its GPU or
its CPU), predicted tokens/s, and what it took: of each rank the evaluations before `run` plans and those further ones
before `plan` does, and the seconds of both."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_timed_decides_as_it_was_recorded(name: str) -> None:
    stages, drafts, places, speed, n_runs, n_runs_for_plan, took_s = RECORDED[name]
    ranks, options = started(name)
    cold = job(ranks, options)
    warm = job(ranks, options)
    for found in (cold, warm):
        assert chosen(found, options) == (stages, drafts)
        assert drafts_on_cpu(found, options) == [place == "C" for place in places]
        assert predicted(found, options) == pytest.approx(speed, rel=1e-4)
        untimed = {each.name: each.untimed for each in found.hosts if each.untimed}
        assert untimed == ({"b": "no such device on b"} if name == "no layers" else {})
    for most, found_s in zip((*n_runs, *n_runs_for_plan), (*cold.n_runs, *cold.n_runs_for_plan), strict=True):
        assert (found_s > 0) == (most > 0) and found_s <= 1.02 * most + 2, "timing takes no longer than it did"
    assert all(now_s <= before_s + 0.02 for now_s, before_s in zip(cold.took_s, took_s, strict=True))
    assert not any(warm.n_runs_for_plan)
    assert any(warm.n_runs) == (name == "one lacks its GPU"), "what could not be loaded is tried again"


def test_a_prediction_does_not_depend_on_those_before_it() -> None:
    ranks, options = started("far slower")
    found = job(ranks, options)
    nodes = with_run_times(with_speeds(found.speeds, found.hosts), found.times)
    planner = open_planner(options, read_model_info(TARGET), nodes, ETHERNET, 100, ())
    assert planner.speed == planner.speed == pytest.approx(RECORDED["far slower"][3], rel=1e-6)


@pytest.mark.parametrize(("faults", "n_runs"), [([0], [0, 0, 0]), ([1], [211, 10, 165])])
def test_costs_that_cannot_be_timed_are_nobodys(faults: list[int], n_runs: list[int]) -> None:
    """The target's layers on rank 1, which nobody times then, or its draft."""
    ranks = three()
    ranks[0].host = ranks[1].host = ranks[2].host = host("a", 12)
    ranks[1].faults = faults
    options = asked(draft_rank=1)
    found = job(ranks, options)
    assert not found.times and found.untimed == "rank 1 (a): no such device on a"
    assert found.n_runs == [0, 0, 0] and found.n_runs_for_plan == n_runs
    assert not any("speed" not in name for name in kept(Path(os.environ["XDG_CACHE_HOME"])))


# -- what was kept by a version of the same number


LAYERS, ROWS = "3729ad29532b5c721bc333266252d890", {"rows": [1.0, 2.0, 4.0, 8.0]}
SLICE: dict[str, Any] = {
    **ROWS, "s_per_byte": [1e-9, 1.1e-9, 1.3e-9, 1.7e-9], "output_s": [], "context_s": 1e-9, "run_s": 1e-4,
    "reshape_s": 1e-5, "rest_s": 2e-5,
}  # fmt: skip
OF_DRAFT = SLICE | {"output_s": [6e-5, 7e-5, 9e-5, 1.3e-4], "context_s": None}
TWO: dict[str, Any] = {"beside": 1.3, "n_beside": 2, "source": "timed now"}
ALONE = {"beside": 1.0, "n_beside": 1}
NO_DRAFT: dict[str, Any] = {"draft": None, "draft_number": None}
HERE_A, HERE_B = "a, 8 cores, 4 threads, -ngl -1", "b, 4 cores, 4 threads, -ngl -1"
DRAFT_NAME = "d3f4c8ca690306db6842233d6742ac34"
KEPT: dict[str, Any] = {
    f"layers: {LAYERS} 3-5, exact, a, x, {HERE_A}, threads there 4 4@": {"s_per_byte": 1e-9, "output_s": None},
    f"layers: {LAYERS} 6-8, exact, b, x, {HERE_B}, threads there 4@": {"s_per_byte": 2.5e-9, "output_s": 5e-4},
    f"draft: {DRAFT_NAME}, f16 f16, x, {HERE_A} or the CPU, threads there 4 4@": {"asked_s": 3e-4, "cpu_s": 9e-4},
    f"draft: {DRAFT_NAME}, f16 f16, x, {HERE_B} or the CPU, threads there 4@": {"asked_s": 2e-3, "cpu_s": 2e-4},
    f"runs: {LAYERS} 3-5, exact, x, {HERE_A}, threads there 4 4@, {DRAFT_NAME} 1-1": {
        "target": SLICE, "draft": OF_DRAFT, "draft_number": 0, **TWO
    },
    f"runs: {LAYERS} 3-5, exact, x, {HERE_A}, threads there 4 4@, no draft": {"target": SLICE, **NO_DRAFT, **TWO},
    f"runs: {LAYERS} 6-8, exact, x, {HERE_B}, threads there 4@, no draft": {
        "target": SLICE | {"s_per_byte": [3e-9, 3.3e-9, 3.9e-9, 5.1e-9]}, **NO_DRAFT, **TWO, **ALONE,
    },
    "speed: a, x, 8 cores, 2 ranks there@": {"bytes_per_s": 1e9, "flop_per_s": 1e10},
    "speed: b, x, 4 cores, 1 ranks there@": {"bytes_per_s": 4e8, "flop_per_s": 4e9},
}  # fmt: skip


def pair_and_one() -> list[Played]:
    pair = Played(host("a", 8), 4e-9, 1e-10, 1e-4)
    return [pair, replace(pair), Played(host("b"), 1e-9, 4e-10, 1e-3)]


def keep(folder: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        build = "" if name.startswith("speed") else f", {describe_build()}"
        DiskCache(folder / "pipeinfer" / "kept").put(name.replace("@", f", pipeinfer {__version__}{build}"), value)


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    options = asked(n_gpu_layers=(ALL_LAYERS,))
    keep(tmp_path, KEPT)
    found = job(pair_and_one(), options)
    assert not any((*found.n_runs, *found.n_runs_for_plan))
    print(chosen(found, options), predicted(found, options))
    assert drafts_on_cpu(found, options) == [False, False, True]
    assert predicted(found, options) == pytest.approx(150.575131, rel=1e-4)
    assert [found.hosts[rank].speed for rank in (0, 2)] == [
        LayerSpeed(1e-9, None, "timed before"), LayerSpeed(2.5e-9, 5e-4, "timed before"),
    ]  # fmt: skip


def test_names_and_values_that_are_kept_stay_readable(tmp_path: Path) -> None:
    job(pair_and_one(), asked(n_gpu_layers=(ALL_LAYERS,)))
    found = kept(tmp_path)
    assert {name: shape(value) for name, value in found.items()} == {name: shape(value) for name, value in KEPT.items()}


def shape(value: Any) -> Any:
    return {name: shape(each) for name, each in value.items()} if isinstance(value, dict) else None


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("junk", [None, {"s_per_byte": -1.0}])
def test_what_was_kept_and_cannot_be_is_timed_anew(name: str, junk: object, tmp_path: Path) -> None:
    keep(tmp_path, KEPT | {name: junk})
    found = job(pair_and_one(), asked(n_gpu_layers=(ALL_LAYERS,)))
    of_run, of_plan, measured = (name.startswith(kind) for kind in (("layers", "draft"), "runs", "speed"))
    assert any(found.n_runs) == of_run and any(found.n_runs_for_plan) == of_plan
    assert shape(kept(tmp_path)) == shape(KEPT) and (
        not measured or found.speeds[0] != Speed(1e9, 1e10) or name[7] == "b"
    )
