"""How many threads evaluations use when other processes want the cores: in a simulated host, and in this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.core.interfaces import Batch
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.llama.threads import Reading, ThreadShare, read_free, read_process, spin_briefly, threads_to_keep
from tests.support.gguf_factory import Shape, write_model

EVALUATION_S = 0.004


class FakeHost:
    """Cores on which processes of a ThreadShare each and `n_other` further threads compute, all of them fairly."""

    def __init__(self, n_cores: int, *mosts: int) -> None:
        self.n_cores, self.n_other, self.now_s, self.idle_s, self.cpu_s, self.n_preempted = n_cores, 0, 0.0, 0.0, 0.0, 0
        self.shares = [ThreadShare(most, process=self.read, free=lambda: self.idle_s) for most in mosts]
        self.running = list(self.shares)

    def read(self) -> Reading:
        return Reading(self.now_s, self.cpu_s, self.n_preempted)

    def run(self, seconds: float) -> list[int]:
        """Threads of each process in the end."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.evaluate()
        return [share.n_threads for share in self.running]

    def evaluate(self) -> None:
        """All processes evaluate once, at the same time: each reads its own clocks, which is simulated in turns."""
        start = self.now_s, self.cpu_s, self.n_preempted
        counts = [share.begin() for share in self.running]
        n_threads = sum(counts) + self.n_other
        part = min(1.0, self.n_cores / n_threads)
        for count, share in zip(counts, self.running, strict=True):
            self.now_s, self.cpu_s = start[0] + EVALUATION_S, start[1] + count * part * EVALUATION_S
            self.n_preempted = start[2] + count * (part < 1)
            share.end()
        self.idle_s += max(0, self.n_cores - n_threads) * EVALUATION_S


def test_alone_all_threads_stay() -> None:
    assert FakeHost(2, 2).run(5) == [2]
    assert FakeHost(64, 64).run(5) == [64]


def test_two_jobs_share_the_cores_and_the_one_that_stays_takes_them_back() -> None:
    host = FakeHost(2, 2, 2)
    assert host.run(1) == [1, 1]
    assert host.run(20) == [1, 1]
    host.running.pop()
    assert host.run(10) == [2]


@pytest.mark.parametrize(("n_cores", "n_jobs"), [(8, 2), (64, 2), (64, 3), (16, 4)])
def test_large_hosts_are_shared_without_swings(n_cores: int, n_jobs: int) -> None:
    host = FakeHost(n_cores, *[n_cores] * n_jobs)
    host.run(30)
    for _ in range(20):
        found = host.run(0.5)
        assert 0.7 * n_cores <= sum(found) <= 1.1 * n_cores, found


def test_one_busy_core_costs_one_thread_until_it_is_free() -> None:
    host = FakeHost(4, 4)
    host.n_other = 1
    assert host.run(2) == [3]
    host.n_other = 0
    assert host.run(10) == [4]


def test_waits_and_noise_cost_no_thread() -> None:
    assert threads_to_keep(2, 1.0, 1.2, n_preempted=30) == 2  # sleep in waits, and the system's noise
    assert threads_to_keep(2, 0.03, 0.044, n_preempted=3) == 2
    assert threads_to_keep(2, 1.0, 1.9, n_preempted=500) == 2  # a poll of a waiting rank is short
    assert threads_to_keep(64, 1.0, 62.5, n_preempted=5000) == 64
    assert threads_to_keep(2, 0.03, 0.03, n_preempted=7) == 1
    assert threads_to_keep(2, 0.13, 0.18, n_preempted=20) == 1  # one busy process


def test_where_the_system_does_not_tell_more_threads_are_tried() -> None:
    host = FakeHost(2, 2)
    host.shares[0]._free = lambda: None
    host.n_other = 2
    host.run(5)
    host.n_other = 0
    assert host.run(20) == [2]


def test_one_thread_asks_nothing() -> None:
    def never() -> Reading:
        raise AssertionError("asked")

    share = ThreadShare(1, process=never)
    assert share.begin() == 1
    share.end()


def test_clocks() -> None:
    first = read_process()
    sum(range(300_000))
    second = read_process()
    assert second.wall_s > first.wall_s and second.cpu_s > first.cpu_s and second.n_preempted >= first.n_preempted
    if sys.platform == "linux":
        idle_s = read_free()
        assert idle_s is not None and 0 <= idle_s <= (read_free() or 0)


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}])
def test_what_the_user_has_set_stays(given: dict[str, str]) -> None:
    environ = dict(given)
    spin_briefly(environ)
    assert environ == given
    empty: dict[str, str] = {}
    spin_briefly(empty)
    assert empty["GOMP_SPINCOUNT"].isdecimal()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_real_stage_gives_way_to_busy_processes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", Shape(n_layer=4, n_embd=256, n_head=4, n_head_kv=2, n_ff=704))
    info = read_model_info(tmp_path / "m.gguf")
    n_cores = len(os.sched_getaffinity(0))
    stage = LlamaStage(open_slice(info, 0, info.n_layer, None), LlamaParams(256, n_batch=32, n_threads=n_cores))
    batch = Batch(np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32), [(0,)] * 8, None, np.ones(8, bool))

    def logits() -> bytes:
        stage.clear()
        out = stage.evaluate(batch, lambda: False)
        assert out is not None
        return out.tobytes()

    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * n_cores)]
    try:
        expected, start_s = logits(), time.monotonic()
        while stage.threads.n_threads == n_cores and time.monotonic() - start_s < 60:
            assert logits() == expected
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert stage.threads.n_threads < n_cores
    assert logits() == expected  # the same bits with any number of threads
    stage.close()
