"""--numa is libllama's: threads that really stay on nodes; two cores of this machine play these."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import COMMAND, ROOT, environment, until

CORES = sorted(os.sched_getaffinity(0))
RUN = ["run", "-p", "def read_lines(path):\n", "-n", "4000", "-c", "5000", "--ignore-eos", "-md", "none"]


def tree(folder: Path) -> Path:
    """As /sys/devices/system/node has it, each core a node."""
    for number, core in enumerate(CORES):
        (folder / f"node{number}").mkdir(parents=True)
        (folder / f"node{number}" / "cpulist").write_text(f"{core}\n")
        (folder / f"node{number}" / f"cpu{core}").touch()
    (folder / "has_cpu").write_text("0\n")
    return folder


def affinities(pid: int) -> list[frozenset[int]]:
    """Of each thread of a process, the first one's first; none of one that has just ended."""
    found = []
    for task in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
        try:
            found.append(frozenset(os.sched_getaffinity(task)))
        except ProcessLookupError:
            continue
    return found


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("strategy", ["distribute", "isolate"])
@pytest.mark.skipif(len(CORES) < 2 or not can_mount(), reason="libggml reads /sys, over which a tree is to be mounted")
def test_threads_use_the_nodes_that_libggml_gives_them(strategy: str, tmp_path: Path) -> None:
    script = 'mount --bind "$0" /sys/devices/system/node && exec "$@"'
    words = [*COMMAND, *RUN, "--numa", strategy, "-t", "2", "--numerics", "fast"]
    unshared = ["unshare", "-m", "sh", "-c", script, str(tree(tmp_path)), *words]
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    job = subprocess.Popen(unshared, stdin=none, stdout=pipe, stderr=pipe, text=True, env=environment(), cwd=ROOT)
    assert job.stdout and job.stdout.read(1)
    until(lambda: any(len(own) == 1 for own in affinities(job.pid)))
    job.terminate()
    job.communicate(timeout=30)
