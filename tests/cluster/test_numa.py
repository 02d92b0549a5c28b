"""NUMA nodes of fake hosts, and threads that really stay on one: two cores of this machine play nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.cores import Cores, Host, share_cores
from pipeinfer.cluster.hosts.numa import DISTRIBUTE, ISOLATE, NUMACTL, is_distributed, isolated, unheeded, with_nodes
from tests.support.jobs import COMMAND, ROOT, descendants, environment, launcher

CORES = sorted(os.sched_getaffinity(0))
RUN = ["run", "-p", "def read_lines(path):\n", "-n", "4000", "-c", "5000", "--ignore-eos", "-md", "none"]


def tree(folder: Path, *lists: str) -> Path:
    """As /sys/devices/system/node has it; each list of cores is a node's."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
        for core in cores.split(",") if cores else ():
            (folder / f"node{number}" / f"cpu{core}").touch()
    (folder / "has_cpu").write_text("0\n")
    return folder


def host(name: str, cores: range, nodes: Path, n_cores: int = 0) -> Host:
    return with_nodes(Host(name, frozenset(cores), n_cores or len(cores)), nodes)


def cores_of(hosts: list[Host]) -> list[list[int]]:
    return [sorted(each.cores) for each in hosts]


def test_nodes_are_read_as_the_system_writes_them(tmp_path: Path) -> None:
    nodes = tree(tmp_path, "0-2,8", "4", "", "nonsense,5-6,", "12-13")
    assert host("a", range(14), nodes).nodes == ((0, frozenset([0, 1, 2, 8])), (1, {4}), (3, {5, 6}), (4, {12, 13}))
    few = host("a", range(5), nodes)
    assert few.nodes == ((0, frozenset([0, 1, 2])), (1, frozenset([4]))) and few.is_bound
    assert not host("a", range(14), nodes).is_bound
    assert host("a", range(4), tmp_path / "none").nodes == ()


def test_ranks_of_a_host_have_nodes_of_their_own(tmp_path: Path) -> None:
    two, four = tree(tmp_path / "2", "0-3", "4-7"), tree(tmp_path / "4", "0-1", "2-3", "4-5", "6-7")
    found = isolated([host("a", range(8), two), host("b", range(8), four), host("a", range(8), two)])
    assert cores_of(found) == [[0, 1, 2, 3], [*range(8)], [4, 5, 6, 7]] and [each.numa for each in found] == [
        "0",
        "",
        "1",
    ]
    assert share_cores(found, {0, 1, 2}) == (4, 8, 4)
    pairs = isolated([host("b", range(8), four)] * 2)
    assert [each.numa for each in pairs] == ["0+1", "2+3"] and cores_of(pairs) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    many = isolated([host("a", range(8), two)] * 5)
    assert [each.numa for each in many] == ["0", "0", "0", "1", "1"]
    assert share_cores(many, {0, 1, 2, 3, 4}) == (1, 1, 1, 2, 2)
    limited = isolated([host("a", range(8), two, n_cores=4)] * 2)
    assert [each.n_cores for each in limited] == [2, 2], "a control group's limit is of all of them"


def test_whom_a_launcher_has_bound_stays(tmp_path: Path) -> None:
    nodes = tree(tmp_path, "0-3", "4-7")
    bound = [host("a", range(4), nodes), host("a", range(4, 8), nodes)]
    lone, plain = [host("b", range(8), nodes)], [host("c", range(8), tmp_path / "none")] * 2
    asked = [*bound, *lone, *plain]
    assert isolated(asked) == asked
    assert list(unheeded(ISOLATE, asked)) == [
        "--numa isolate: host a has ranks that were bound to cores, which they keep",
        "--numa isolate: host b has one rank, which keeps all its cores",
        "--numa isolate: host c has no two NUMA nodes",
    ]
    assert [is_distributed(asked, rank) for rank in range(5)] == [False, False, True, False, False]
    part = [replace(lone[0], is_bound=True)]
    assert not is_distributed(part, 0) and "2 ranks; --numa isolate gives" in next(unheeded(DISTRIBUTE, asked))
    assert not list(unheeded(NUMACTL, asked)) and not list(unheeded(DISTRIBUTE, lone))


PROGRAM = """
import sys
from pathlib import Path
from pipeinfer.cli.main import main
from pipeinfer.cluster.hosts import numa
numa.FOLDER = Path(sys.argv.pop(1))
main()
"""


def affinities(pid: int) -> list[Cores]:
    """Of each thread of a process, the first one's first; none of one that has just ended."""
    found = []
    for task in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
        try:
            found.append(frozenset(os.sched_getaffinity(task)))
        except ProcessLookupError:
            continue
    return found


def wait_until(done: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(len(CORES) < 2, reason="two cores play nodes")
def test_each_rank_computes_on_its_own_node(tmp_path: Path) -> None:
    nodes = tree(tmp_path, *map(str, CORES))
    words = [sys.executable, "-c", PROGRAM, str(nodes), *RUN, "--numa", "isolate"]
    job = subprocess.Popen(
        [*launcher(2), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment() | {"COLUMNS": "200"},
    )  # fmt: skip
    assert job.stdout and job.stdout.read(1)
    half = len(CORES) // 2
    wanted = [frozenset(CORES[:half]), frozenset(CORES[half:])]
    ranks = [pid for pid in descendants(job.pid) if b"--numa" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    firsts = {affinities(pid)[0] for pid in ranks}
    job.terminate()
    _, errors = job.communicate(timeout=30)
    assert firsts >= set(wanted), errors
    assert "NUMA" in errors and "more threads" not in errors, errors


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(len(CORES) < 2 or not can_mount(), reason="libggml reads /sys, over which a tree is to be mounted")
def test_threads_of_a_lone_rank_are_spread_over_its_nodes(tmp_path: Path) -> None:
    nodes = tree(tmp_path, *map(str, CORES))
    script = 'mount --bind "$0" /sys/devices/system/node && exec "$@"'
    words = [*COMMAND, *RUN, "--numa", "distribute", "-t", "2", "--numerics", "fast"]
    job = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script, str(nodes), *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert job.stdout and job.stdout.read(1)
    wait_until(lambda: frozenset(CORES[1:2]) in affinities(job.pid))
    job.terminate()
    job.communicate(timeout=30)
