"""Layers that are timed before there is a plan: what counts, on which ranks, and what becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.assignment import Sizes
from pipeinfer.cluster.hosts.host import Host, LayerSpeed, processor_name, turns_on_cores
from pipeinfer.cluster.timed_runs import time_layers
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.types import FloatArray
from pipeinfer.job.options.values import Backend, Pace
from pipeinfer.job.profiling.speeds import TIMED_BYTES, average_alike, is_doubtful, timed_span
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_blank, open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.policies import PipeInfer
from tests.support.jobs import environment, finish, launcher
from tests.support.planned import options_of, timed_ranks
from tests.support.toy import ToyStage

LAYER_S, REST_S = 0.01, 0.004


class TimedStage(ToyStage):
    """A layer takes LAYER_S, what comes before and after them REST_S each; every third run is disturbed."""

    now_s, n_runs, speaks = 0.0, 0, True

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.n_runs += 1
        self.now_s += REST_S
        for layer in range(self.first, self.last):
            self.now_s += LAYER_S * (5 if self.n_runs % 3 == 0 else 1)
            if self.speaks and (self.is_last or layer + 1 < self.last):
                stop()
        self.now_s += REST_S if self.is_last else 0
        return super().evaluate(batch, lambda: False)


def timed(stage: TimedStage, layer_bytes: list[int], output_bytes: int = 0, asks: bool = True) -> LayerSpeed:
    found = time_layers(stage, layer_bytes, output_bytes, lambda: stage.now_s, asks)
    assert not stage.cells()
    return found


def test_layers_and_what_follows_them_are_told_apart() -> None:
    middle, last = timed(TimedStage(1, 4, False), [100] * 3), timed(TimedStage(1, 4, True), [100] * 3, 500)
    assert middle.s_per_byte == pytest.approx(LAYER_S / 100) == last.s_per_byte and middle.output_s is None
    assert last.output_s == pytest.approx(REST_S)
    assert last.seconds([100, 200], 500) == pytest.approx([LAYER_S, 2 * LAYER_S + REST_S])
    assert timed(TimedStage(1, 2, False), [100]).s_per_byte == pytest.approx((LAYER_S + REST_S) / 100), "all there is"


def test_a_model_that_does_not_say_when_a_layer_is_done_is_timed_as_a_whole() -> None:
    silent = TimedStage(1, 3, True)
    silent.speaks = False
    for stage, asks in ((silent, True), (TimedStage(1, 3, True), False)):
        found = timed(stage, [100] * 2, 300, asks)
        assert found.output_s is None and found.s_per_byte == pytest.approx(2 * (LAYER_S + REST_S) / 500)


def test_layers_without_weights_are_computed_as_others_are() -> None:
    info = read_model_info(TARGET)
    for first, last in ((3, 6), (6, 9)):
        params = LlamaParams(n_cells=256, n_seq_max=2, n_batch=1, n_outputs_max=1)
        blank, real = (LlamaStage(cut(info, first, last), params) for cut in (open_blank, open_slice))
        sizes = info.layer_bytes[first:last]
        for model in (blank, real):
            assert model.slice_bytes == real.slice_bytes and model.next_position(0) == 0
        assert all(1e-6 < each.layer_s(sizes) < 1 for each in (_time(blank, sizes), _time(real, sizes)))
        blank.close()
        real.close()


def _time(model: LlamaStage, sizes: tuple[int, ...]) -> LayerSpeed:
    ticks = iter([n / 100 for n in range(0, 10**6)])
    return time_layers(model, sizes, 10**6, lambda: next(ticks), stops=True)


class StalledStage(TimedStage):
    """The first run waits half a second for cores."""

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        self.now_s += 0.0 if self.n_runs else 0.5
        return super().evaluate(batch, stop)


def test_a_row_that_waited_for_cores_is_not_all_that_counts() -> None:
    stage = StalledStage(1, 2, False)
    assert timed(stage, [100]).s_per_byte == pytest.approx((LAYER_S + REST_S) / 100) and stage.n_runs >= 5


# -- which layers, on which ranks, when


def test_as_many_layers_are_timed_as_a_stage_has_but_not_too_much() -> None:
    small = Sizes((1000,) * 24, 0)
    assert timed_span(small, 4, False) == (9, 15) and timed_span(small, 4, True) == (18, 24)
    large = replace(small, layer_bytes=(TIMED_BYTES // 2,) * 24)
    assert timed_span(large, 4, False) == (11, 13) and timed_span(large, 24, True) == (23, 24)
    huge = replace(small, layer_bytes=(9 * TIMED_BYTES,) * 24)
    assert timed_span(huge, 4, False) == (12, 13)
    odd = {(first, last): "odd" for first in range(24) for last in range(25) if first % 4 or last % 4}
    assert timed_span(replace(large, faults=odd), 4, False) == (8, 12)
    assert timed_span(replace(large, faults=odd), 4, True) == (20, 24)
    assert timed_span(Sizes((5, 5), 0), 2, False) == (1, 2), "the first layer wants tokens"
    assert timed_span(Sizes((5,), 0), 1, True) is None


def host(name: str, n_cores: int = 4, processor: str = "x") -> Host:
    return Host(name, frozenset(range(n_cores)), n_cores, processor=processor)


def ranks(hosts: list[Host], **changed: Any) -> list[int]:
    fixed: dict[str, Any] = {"model": TARGET, "drafts": (TARGET,), "policy": PipeInfer(), "draft_rank": 0}
    return timed_ranks(options_of(**fixed | changed), hosts)


def test_only_ranks_that_are_not_alike_are_timed() -> None:
    a, b, c = host("a"), host("b"), host("c")
    assert not ranks([a] * 3) and not ranks([a, a], drafts=())
    assert ranks([a, b, c]) == [1, 2] and ranks([a, a, b, b], drafts=()) == [0, 1, 2, 3], "hosts that only look alike"
    assert not ranks([a, b, b]), "the draft's host is no matter"
    assert ranks([host("a", processor="y"), b, c], draft_rank=None) == [0, 1, 2], "but where it may be any"
    assert ranks([a, b, host("c", processor="y")]) == ranks([a, b, host("c", 8)]) == ranks([a, b, c], threads=(4, 4, 2))
    assert ranks([a, b, c], drafts=(), threads=(1, 2, 2)) == [0, 1, 2]
    assert ranks([a, a, b, c]) == [1, 2, 3], "a rank that has its host for itself"
    assert ranks([a, b, c], n_gpu_layers=(0, -1, -1)) == [1, 2], "GPUs of two hosts"
    assert not ranks([b, a, a], n_gpu_layers=(-1,)) and not ranks([b, a, a], backend=(Backend.parse("torch:cpu"),))
    assert ranks([a, b, c], backend=(Backend.parse("torch"),)) == [1, 2]
    unlike = {"threads": (1, 1, 2)}
    assert not ranks([a, b, c], **unlike, layer_split="4,5") and not ranks(
        [a, b, c], **unlike, pace=Pace.parse("sipipe")
    )
    assert not ranks([a, b, c], threads=(1, 2)) and not ranks([a], **unlike), "which is refused later"


def test_what_only_timing_tells_apart_is_alike() -> None:
    assert not is_doubtful([LayerSpeed(1.0), LayerSpeed(1.08), LayerSpeed(9.0), None], [("x",), ("x",), ("y",), ("y",)])
    assert is_doubtful([LayerSpeed(1.0), LayerSpeed(1.2), None], [("x",)] * 3) and not is_doubtful([None], [("x",)])
    near, far, other, unknown = [1.0, 1.08], [1.0, 1.3], 9.0, None
    kinds = [("x",), ("x",), ("y",), ("y",)]
    assert average_alike([*map(LayerSpeed, near), LayerSpeed(other), unknown], kinds) == [
        LayerSpeed(1.04),
        LayerSpeed(1.04),
        LayerSpeed(other),
        unknown,
    ]
    assert average_alike([*map(LayerSpeed, far), LayerSpeed(other), unknown], kinds) == [
        *map(LayerSpeed, far),
        LayerSpeed(other),
        unknown,
    ]
    assert average_alike([*map(LayerSpeed, near), LayerSpeed(other)], kinds[:3])[:2] == [
        LayerSpeed(1.04),
        LayerSpeed(1.04),
    ]
    with_output = [LayerSpeed(1.0), LayerSpeed(1.08, 5.0), LayerSpeed(9.0)]
    assert average_alike(with_output, kinds[:3])[1] == LayerSpeed(1.04, 5.0)
    assert average_alike([unknown, *with_output[:2]], [("y",), *kinds[:2]]) == [None] * 3, "sizes say as much"
    assert average_alike([*map(LayerSpeed, far)], kinds[:2]) == [*map(LayerSpeed, far)]


def test_ranks_of_a_host_time_at_once_where_it_has_cores_for_them() -> None:
    pair = [host("a"), host("a"), host("b"), host("b"), host("b")]
    assert turns_on_cores(pair, (1, 3, 1, 1, 2), [1, 2, 3, 4]) == {1: 0, 2: 0, 3: 0, 4: 0}
    assert turns_on_cores(pair, (2, 3, 2, 1, 2), [1, 2, 3, 4]) == {1: 0, 2: 0, 3: 1, 4: 2}


def test_a_processor_is_named_as_the_system_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\ncpu MHz\t: 1\n\nmodel name\t: other\n")
    assert processor_name(path) == "Some CPU @ 2 GHz" and processor_name(tmp_path / "none") == ""
    path.write_text("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n")
    assert processor_name(path) == "0x41 0xd0c"


# -- jobs


def test_a_job_times_ranks_that_are_not_alike_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "200"}
    monkeypatch.setattr("tests.support.jobs.environment", lambda: environment() | own)
    words = ["-m", str(TARGET), "-md", "none", "-t", "1,2"]
    planned = finish(2, ["plan", *words, "--json"])
    assert planned.returncode == 0, planned.stderr
    rows = json.loads(planned.stdout)["ranks"]
    assert [row["layer_source"] for row in rows] == ["timed now"] * 2 and all(row["layer_s"] > 0 for row in rows)
    run = finish(2, ["run", *words, "-n", "1", "-p", "x", "-v"])
    lines = [line.split() for line in run.stderr.splitlines() if "timed before" in line]
    assert run.returncode == 0 and [row["layers"] in line for row, line in zip(rows, lines, strict=True)] == [True] * 2


FAILING = """
import os, sys
from pipeinfer.cli import main
from pipeinfer.cluster.hosts.launch import rank_from_environment
from pipeinfer.errors import UserError
from pipeinfer.job.profiling import speeds
how = sys.argv[1]
def fail(*words, **more):
    if how == "die":
        os._exit(9)
    raise UserError("no such device")
if rank_from_environment() == 2:
    setattr(speeds, "open_blank" if how == "refuse" else "time_layers", fail)
sys.argv[1:] = sys.argv[2:]
main()
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("refuse", ["layers go by size, not by ranks' speed: rank 2 (", "could not be timed: no such device"]),
        ("die", ["rank 2 (", "timing layers"]),
    ],
)
def test_a_rank_that_fails_while_it_times_is_named(how: str, words: list[str]) -> None:
    done = failing(how, "run", "-p", "x", "-n", "2", "-t", "1,1,2")
    assert (done.returncode == 0) == (how == "refuse"), done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def failing(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher(3), sys.executable, "-c", FAILING, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        env=environment(),
    )
