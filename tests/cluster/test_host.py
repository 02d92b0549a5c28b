"""How the ranks of a host share its cores."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.cluster.assignment import Sizes, assign
from pipeinfer.cluster.hosts.host import (
    Host,
    _quota,
    crowded_hosts,
    other_clocks,
    share_cores,
    this_host,
    threads_of_ranks,
)
from tests.support.jobs import environment, finish, launcher


def host(name: str, *cores: int, quota: int = 99) -> Host:
    return Host(name, frozenset(cores), min(len(cores), quota))


TWO = host("a", 0, 1)
SIZES = Sizes((8,) * 8, 0)


def test_the_draft_is_counted() -> None:
    plan = assign(3, [SIZES], SIZES, None)  # rank 0 drafts, 1 and 2 are stages
    assert threads_of_ranks((), plan.computing, [host("a", *range(8))] * 3) == (2, 2, 2)
    assert threads_of_ranks((), assign(2, [SIZES], SIZES, None).computing, [TWO] * 2) == (1, 1)
    assert threads_of_ranks((4,), plan.computing, [TWO] * 3) == (4, 4, 4)
    lone = assign(1, [SIZES], SIZES, None)
    assert threads_of_ranks((), lone.computing, [TWO]) == (2,)


def test_ranks_share_only_the_cores_that_they_have_in_common() -> None:
    bound = [host("a", 0, 1, 2, 3), host("a", 4, 5, 6, 7), host("b", 0, 1)]
    assert share_cores(bound, {0, 1, 2}) == (4, 4, 2)
    assert share_cores([host("a", *range(8))] * 3, {1, 2}) == (4, 4, 4)  # rank 0 computes nothing
    assert share_cores([host("a", *range(8), quota=2)] * 2, {0, 1}) == (1, 1)


def test_more_threads_than_cores_are_said() -> None:
    assert crowded_hosts([TWO] * 2, {0, 1}, (1, 1)) == []
    assert crowded_hosts([TWO] * 3, {1, 2}, (9, 1, 1)) == []  # rank 0 computes nothing
    (line,) = crowded_hosts([TWO] * 3 + [host("b", 0)], {0, 1, 2, 3}, (1, 1, 1, 1))
    assert line.startswith("host a has 2 cores for 3 threads of 3 ranks that compute; fewer ranks there may")
    (line,) = crowded_hosts([TWO], {0}, (3,))
    assert "2 cores for 3 threads of 1 rank " in line and line.endswith("compute; fewer threads (-t) may be faster")
    (line,) = crowded_hosts([TWO] * 2, {0, 1}, (2, 1))
    assert line.endswith("; fewer ranks there or fewer threads (-t) may be faster")


def test_a_job_warns_once() -> None:
    n = len(os.sched_getaffinity(0)) + 1
    done = finish(2, ["run", "-p", "x", "-n", "1", "-t", f"{n},1"])
    lines = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: host ")]
    assert done.returncode == 0 and len(lines) == 1 and f"{n + 1} threads of 2 ranks" in lines[0]


def test_what_this_process_may_use() -> None:
    here = this_host("x")
    assert here.cores == os.sched_getaffinity(0) and 1 <= here.n_cores <= len(here.cores)


def test_ranks_of_one_boot_read_one_clock() -> None:
    hosts = [replace(this_host("x"), clock=clock) for clock in ("a", "a", "b", "")]
    assert other_clocks(hosts) == [2, 3]
    assert other_clocks([replace(host, clock="") for host in hosts]) == [1, 2, 3]
    assert other_clocks([this_host("x"), this_host("x")]) == ([] if sys.platform == "linux" else [1])


SKEWED = """
import time
from pipeinfer.cluster.hosts.roster import clock_offset_s
from pipeinfer.cluster.transport import Link
link = Link()
offset_s = clock_offset_s(link, lambda: time.perf_counter() - 5.0 * link.rank, [2])
print(f"{link.rank} {offset_s}\\n", end="", flush=True)
link.finalize()
"""


def test_another_hosts_clock_is_compared_with_rank_0s() -> None:
    done = subprocess.run(
        [*launcher(3), sys.executable, "-c", SKEWED], capture_output=True, text=True, timeout=60, env=environment()
    )
    offsets = {int(rank): float(offset) for rank, offset in map(str.split, done.stdout.splitlines())}
    assert offsets == {0: 0.0, 1: 0.0, 2: pytest.approx(10.0, abs=0.05)}, done.stderr


def test_a_container_may_be_allowed_less(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (root / "job" / "step").mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:cpu:/old\n0::/job/step\n")
    assert _quota(proc, root) == math.inf
    (root / "job" / "step" / "cpu.max").write_text("max 100000\n")
    (root / "job" / "cpu.max").write_text("250000 100000\n")
    assert _quota(proc, root) == 2.5
    (root / "cpu.max").write_text("junk\n")
    assert _quota(proc, root) == 2.5 and _quota(tmp_path / "none", root) == math.inf
