"""A supervised job of a real Slurm, on this host: a rank that dies is started again within the allocation."""

import os
import signal
from pathlib import Path

from tests.support.jobs import COMMAND, ROOT, finish, until
from tests.support.slurm import ON_HOSTS, Slurm, slurm, slurm_on_hosts
from tests.support.supervised import held, let_go

__all__ = ["slurm"]
TEXT = ["run", "-p", "def fibonacci(n):", "-n", "300", "--ignore-eos", "-s", "3", "-t", "1"]


def test_a_job_goes_on_within_its_allocation(slurm: Slurm, tmp_path: Path) -> None:
    words = ["submit", "-o", str(tmp_path), "-n", "3", "-N", "2", "--restarts", "3", "--wait", *TEXT, *held(tmp_path)]
    job = slurm.popen(*COMMAND, *words, environ={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    text, log = (tmp_path / "pipeinfer-1" / name for name in ("text", "log"))
    until(lambda: text.exists() and text.stat().st_size > 200, 90)
    os.kill(min(slurm.processes("SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=3")), signal.SIGKILL)
    until(lambda: "the job starts again" in log.read_text(), 120)
    let_go(tmp_path)
    out, errors = job.communicate(timeout=120)
    assert job.returncode == 0 and "rank 1" in errors and "the job starts again (restart 1 of 3)" in errors, errors
    assert out == finish(1, [*TEXT, "--policy", "iterative"]).stdout


def test_a_node_that_is_lost_is_left_out(tmp_path: Path) -> None:
    """Slurm takes the cores of its step on the other nodes for used, for minutes."""
    asked = [*TEXT, "-n", "500", "-c", "520"]
    whole = finish(1, [*asked, "--policy", "iterative"]).stdout
    words = ["submit", "-o", str(tmp_path), "-N", "3", "-c", "8", "-t", "10", "--restarts", "3", *asked]
    text, log = (tmp_path / "pipeinfer-1" / name for name in ("text", "log"))
    with slurm_on_hosts(3, tmp_path) as running:
        running.finish(*COMMAND, *words, "--rank-timeout", "5", *held(tmp_path), environ=ON_HOSTS, cwd=tmp_path)
        until(lambda: text.exists() and text.stat().st_size > 50, 90)
        assert running.hosts
        running.hosts.cut("node3")
        until(lambda: "the job starts again, without node3" in log.read_text(), 120)
        let_go(tmp_path)
        until(lambda: text.read_text() == whole, 120)  # the job is there for longer, as Slurm waits for the node
