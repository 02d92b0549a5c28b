"""`pipeinfer doctor` within an allocation of a real Slurm, of two nodes on this host."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import COMMAND, ROOT
from tests.support.slurm import Slurm, slurm

__all__ = ["slurm"]


def test_the_nodes_of_an_allocation(slurm: Slurm) -> None:
    words = ["salloc", "-N", "2", "-n", "2", *COMMAND, "doctor", "--json"]
    done = slurm.finish(*words, environ={"PYTHONPATH": str(ROOT)}, timeout_s=120)
    result = json.loads(done.stdout)
    assert [each for each in result["findings"] if each["level"] == "error"] == [], done.stderr
    assert list(result["hosts"]) == ["node0", "node1"]
    assert result["command"].startswith("srun --mpi=pmi2 -N 2 -n 2 -w node0,node1 ")
    (ring,) = [each for each in result["findings"] if each["check"] == "ring"]
    assert "a message went round 2 ranks of srun" in ring["text"]
    assert {each["state"] for each in result["links"]} == {"open"}


def test_a_rank_that_hangs_is_named_with_its_node(slurm: Slurm, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exec sleep 60\nexec {" ".join(COMMAND)} "$@"\n')
    slow.chmod(0o755)
    words = ["salloc", "-N", "2", "-n", "2", "srun", "--mpi=pmi2", str(slow), "run", "-p", "x", "-n", "4", "-t", "1"]
    done = slurm.finish(*words, environ={"PYTHONPATH": str(ROOT), "PIPEINFER_JOIN_TIMEOUT": "15"})
    waits, found, ends = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")]
    assert waits == "pipeinfer: waiting for rank 1 (host node1), 15 s at most (PIPEINFER_JOIN_TIMEOUT)"
    assert found == "pipeinfer: node1: no fault was found; ranks 0, 1 run there"  # both nodes are this machine
    assert ends.startswith("pipeinfer: rank 1 (host node1) did not join within 15 s") and done.returncode
