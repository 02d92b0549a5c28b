"""What is timed of ranks before there is a plan, and what is chosen by it: recorded for clusters that are played."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer import __version__
from pipeinfer.cluster.hosts.host import Host, LayerSpeed, Speed
from pipeinfer.disk_cache import DiskCache
from pipeinfer.job.options.limits import ALL_LAYERS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.planning.planner import ETHERNET, Planner
from pipeinfer.job.profiling.speeds import with_speeds
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.drafts.head_files import read_drafts
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.ggml import describe_build
from pipeinfer.policies import Iterative, PipeInfer
from tests.support.planned import lay_out, options_of
from tests.support.played_cluster import Found, Played, PlayedStage, job, played_clock, played_speed


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("pipeinfer.job.loading.stages.LlamaStage", PlayedStage)
    monkeypatch.setattr("pipeinfer.job.profiling.speeds.measure_speed", played_speed)
    monkeypatch.setattr(time, "monotonic", played_clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield


def asked(**changed: Any) -> RunOptions:
    fixed: dict[str, Any] = {"model": TARGET, "drafts": (DRAFT,), "policy": PipeInfer()}
    return options_of(**fixed | changed)


def host(name: str, n_cores: int = 4, processor: str = "x") -> Host:
    """With two GPUs, if layers go there."""
    return Host(
        name, frozenset(range(n_cores)), n_cores, processor=processor, offloads=True, gpu_names=("CUDA0", "CUDA1")
    )


def chosen(found: Found, options: RunOptions) -> tuple[dict[int, str], list[int]]:
    """Of each rank with layers of the target which, and the rank of each draft."""
    infos = [read_model_info(path) for path in options.drafts_in_use]
    assignment = lay_out(options, found.hosts, read_model_info(TARGET), infos, 512, 32).assignment
    return {stage.rank: stage.span for stage in assignment.stages}, [stages[0].rank for stages in assignment.drafts]


def kept(folder: Path) -> dict[str, Any]:
    """The values in the cache by their names, with @ for versions."""
    entries = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    of_build, of_ours = f", pipeinfer {__version__}, {describe_build()}", f", pipeinfer {__version__}"
    return {entry["name"].replace(of_build, "@").replace(of_ours, "@"): entry["value"] for entry in entries}


def three(slow: float = 1.6e-8, faults: Sequence[int] = ()) -> list[Played]:
    """Three hosts, the second of which is slow; some of its loads fail."""
    return [Played(host("a"), 4e-9), Played(host("b", 4, "y"), slow, faults=faults), Played(host("c"), 4.1e-9)]


def on_gpus(run_s: float) -> list[Played]:
    """Three hosts with GPUs, on which a run takes so long besides."""
    return [
        Played(host(f"g{number}", 4, f"p{number}"), cpu_s, 1e-10 * (1 + number), run_s)
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
        "pairs": ([replace(alike), replace(alike), Played(host("b"), 4.1e-9), Played(host("b"), 6e-9)], asked(**plain)),
        "few cores": ([replace(one_core), replace(one_core), Played(host("b", 2), 4e-9)], asked(**plain)),
        "GPUs": (on_gpus(1e-5), asked(**on_gpu)),
        "slow GPUs": (on_gpus(1e-3), asked(**on_gpu)),
        "slow GPUs, rank 1": (on_gpus(1e-3), asked(**on_gpu, draft_rank=1)),
    }
    return cases[name]


RECORDED: dict[str, tuple[dict[int, str], list[int], list[int], float]] = {
    "no draft": ({0: "0-4", 1: "5-5", 2: "6-8"}, [], [124, 31, 84], 0.35),
    "far slower": ({1: "0-1", 2: "2-8"}, [0], [124, 31, 84], 0.35),
    "slower": ({0: "0-4", 2: "5-8"}, [1], [124, 90, 84], 0.35),
    "large draft": ({1: "0-3", 2: "4-8"}, [0], [124, 90, 84], 0.35),
    "rank 0": ({1: "0-1", 2: "2-8"}, [0], [0, 24, 68], 0.36),
    "rank 2": ({0: "0-7", 1: "8-8"}, [2], [93, 18, 0], 0.36),
    "no layers": ({1: "0-4", 2: "5-8"}, [0], [0, 0, 0], 0.0),
    "alike": ({1: "0-4", 2: "5-8"}, [0], [0, 0, 0], 0.0),
    "pairs": ({0: "0-2", 1: "3-5", 2: "6-7", 3: "8-8"}, [], [279, 279, 273, 114], 1.07),
    "few cores": ({0: "0-1", 1: "2-4", 2: "5-8"}, [], [31, 31, 43], 0.35),
    "GPUs": ({0: "0-7", 2: "8-8"}, [1], [1196, 609, 284], 0.35),
    "slow GPUs": ({0: "0-7", 2: "8-8"}, [1], [273, 224, 158], 0.35),
    "slow GPUs, rank 1": ({0: "0-7", 2: "8-8"}, [1], [255, 0, 140], 0.35),
}
"""What each case gave: the layers of each rank, the draft's rank, evaluations of each rank, and seconds
of the slowest."""


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_timed_decides_as_it_was_recorded(name: str) -> None:
    stages, drafts, n_runs, took_s = RECORDED[name]
    ranks, options = started(name)
    cold = job(ranks, options)
    warm = job(ranks, options)
    for found in (cold, warm):
        assert chosen(found, options) == (stages, drafts)
        untimed = {each.name: each.untimed for each in found.hosts if each.untimed}
        assert untimed == ({"b": "no such device on b"} if name == "no layers" else {})
    for most, found_s in zip(n_runs, cold.n_runs, strict=True):
        assert (found_s > 0) == (most > 0) and found_s <= 1.02 * most + 2, "timing takes no longer than it did"
    assert max(cold.took_s) <= took_s + 0.02 and not any(warm.n_runs)


def test_a_prediction_goes_by_what_was_timed_and_not_by_those_before_it() -> None:
    ranks, options = started("far slower")
    found = job(ranks, options)
    nodes = with_speeds(found.speeds, found.hosts)
    info = read_model_info(TARGET)
    planner = Planner(options, info, read_drafts(options.models.drafts, info), nodes, ETHERNET, 100)
    assert planner.speed == planner.speed is not None
    costs = planner.lay_out(has_draft=True)
    for stage, rank in zip(costs.stages, (1, 2), strict=True):
        speed = found.hosts[rank].speed
        assert speed and stage.layer.at(1) == pytest.approx(speed.layer_s(read_model_info(TARGET).layer_bytes))


# -- what was kept by a version of the same number


LAYERS = "3729ad29532b5c721bc333266252d890"
HERE_A, HERE_B = "a, 8 cores, 4 threads, -ngl -1", "b, 4 cores, 4 threads, -ngl -1"
KEPT: dict[str, Any] = {
    f"layers: {LAYERS} 3-5, exact, a, x, {HERE_A}, threads there 4 4@": {"s_per_byte": 1e-9, "output_s": None},
    f"layers: {LAYERS} 6-8, exact, b, x, {HERE_B}, threads there 4@": {"s_per_byte": 2.5e-9, "output_s": 5e-4},
    "speed: a, x, 8 cores, 2 ranks there@": {"bytes_per_s": 1e9, "flop_per_s": 1e10},
    "speed: b, x, 4 cores, 1 ranks there@": {"bytes_per_s": 4e8, "flop_per_s": 4e9},
}


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
    assert not any(found.n_runs)
    assert [found.hosts[rank].speed for rank in (0, 2)] == [
        LayerSpeed(1e-9, None, "timed before"),
        LayerSpeed(2.5e-9, 5e-4, "timed before"),
    ]


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
    assert any(found.n_runs) == name.startswith("layers") and shape(kept(tmp_path)) == shape(KEPT)
    assert not name.startswith("speed") or found.speeds[0] != Speed(1e9, 1e10) or name[7] == "b"
