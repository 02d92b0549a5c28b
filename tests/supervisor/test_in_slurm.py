"""A supervised job of a real Slurm, on this host: a rank that dies is started again within the allocation."""

import os
import signal
from pathlib import Path

import pytest

from tests.support import namespaces
from tests.support.jobs import BY_MPICH, COMMAND, ROOT, finish, until
from tests.support.slurm import Slurm, missing_programs, private_slurm, slurm

__all__ = ["slurm"]
TEXT = ["run", "-p", "def fibonacci(n):", "-n", "300", "--ignore-eos", "-s", "3", "-t", "1"]


def test_a_job_goes_on_within_its_allocation(slurm: Slurm, tmp_path: Path) -> None:
    words = ["submit", "-o", str(tmp_path), "-n", "3", "-N", "2", "--restarts", "3", "--wait", *TEXT]
    job = slurm.popen(*COMMAND, *words, environ={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    text = tmp_path / "pipeinfer-1" / "text"
    until(lambda: text.exists() and text.stat().st_size > 200, 90)
    os.kill(min(slurm.processes("SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=3")), signal.SIGKILL)
    out, errors = job.communicate(timeout=120)
    assert job.returncode == 0 and "rank 1" in errors and "the job starts again (restart 1 of 3)" in errors, errors
    assert out == finish(1, [*TEXT, "--policy", "iterative"]).stdout


def test_a_node_that_is_lost_is_left_out(tmp_path: Path) -> None:
    """Slurm takes the cores of its step on the other nodes for used, for minutes."""
    if why := ", ".join(missing_programs()) or namespaces.missing(needs_hydra=False):
        pytest.skip(f"no hosts with Slurm can be made here: {why}")
    if not BY_MPICH:
        pytest.skip("Open MPI needs Slurm's PMIx, which Debian's does not load")
    asked = [*TEXT, "-n", "500", "-c", "520"]
    whole = finish(1, [*asked, "--policy", "iterative"]).stdout
    words = ["submit", "-o", str(tmp_path), "-N", "3", "-c", "8", "-t", "10", "--restarts", "3", *asked]
    environ = {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    text, log = (tmp_path / "pipeinfer-1" / name for name in ("text", "log"))
    with namespaces.hosts(3, tmp_path) as made, private_slurm(hosts=made) as running:
        running.finish(*COMMAND, *words, "--rank-timeout", "5", environ=environ, cwd=tmp_path)
        until(lambda: text.exists() and text.stat().st_size > 50, 60)
        made.cut("node3")
        until(lambda: text.read_text() == whole, 60)  # the job is there for longer, as Slurm waits for the node
    assert "the job starts again, without node3" in log.read_text()
