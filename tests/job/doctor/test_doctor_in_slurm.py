"""`pipeinfer doctor` within an allocation of a real Slurm, of two nodes on this host, or of nodes that are hosts of
their own (namespaces of this machine)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.job.doctor.test_doctor_hosts import FIREWALL, NFT
from tests.support.jobs import COMMAND, ROOT
from tests.support.slurm import ON_HOSTS, Slurm, slurm, slurm_on_hosts

__all__ = ["slurm"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Of three nodes; node3 lacks the program."""
    setups = {"node3": f"mount -t tmpfs none {sys.prefix}"}
    with slurm_on_hosts(3, tmp_path_factory.mktemp("hosts"), setups) as running:
        yield running


def test_the_nodes_of_an_allocation(slurm: Slurm) -> None:
    words = ["salloc", "-N", "2", "-n", "2", *COMMAND, "doctor", "--json"]
    done = slurm.finish(*words, environ={"PYTHONPATH": str(ROOT)}, timeout_s=120)
    result = json.loads(done.stdout)
    assert [each for each in result["findings"] if each["level"] == "error"] == [], done.stderr
    assert list(result["hosts"]) == ["node0", "node1"]
    assert result["command"].startswith("srun -X --mpi=pmi2 -N 2 -n 2 -w node0,node1 ")
    (ring,) = [each for each in result["findings"] if each["check"] == "ring"]
    assert "a message went round 2 ranks of srun" in ring["text"]
    assert {each["state"] for each in result["links"]} == {"open"}


def test_a_rank_that_hangs_is_named_with_its_node(slurm: Slurm, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exec sleep 600\nexec {" ".join(COMMAND)} "$@"\n')
    slow.chmod(0o755)
    words = ["salloc", "-N", "2", "-n", "2", "srun", "--mpi=pmi2", str(slow), "run", "-p", "x", "-n", "4", "-t", "1"]
    # a host without a fault is reported after 10 s, and a moment that what else is at work here makes longer
    environ = {"PYTHONPATH": str(ROOT), "PIPEINFER_JOIN_TIMEOUT": "30"}
    done = slurm.finish(*words, environ=environ, timeout_s=120)
    waits, found, ends = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")]
    assert waits == "pipeinfer: waiting for rank 1 (host node1), 30 s at most (PIPEINFER_JOIN_TIMEOUT)"
    assert found == "pipeinfer: node1: no fault was found; ranks 0, 1 run there"  # both nodes are this machine
    assert ends.startswith("pipeinfer: rank 1 (host node1) did not join within 30 s") and done.returncode


def doctor(apart: Slurm, n_nodes: int) -> dict[str, Any]:
    words = ["salloc", "-N", str(n_nodes), "-n", str(n_nodes), "-w", f"node[1-{n_nodes}]", *COMMAND, "doctor", "--json"]
    done = apart.finish(*words, environ=ON_HOSTS, timeout_s=120)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def problems(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["host"], each["check"], each["text"]) for each in result["findings"] if each["level"] != "ok"]


def test_nodes_that_are_hosts_of_their_own(apart: Slurm) -> None:
    result = doctor(apart, 2)
    assert problems(result) == []
    assert [report["place"][0] for report in result["hosts"].values()] == ["node1", "node2"]
    assert {(each["state"], each["interface"]) for each in result["links"]} == {("open", "eth0")}
    words = ["salloc", "-N", "2", "-n", "2", "-w", "node[1-2]", "sh", "-c", f"{result['command']} -n 4 --json"]
    run = apart.finish(*words, environ=ON_HOSTS)
    assert run.returncode == 0, run.stderr
    assert [rank["host"] for rank in json.loads(run.stdout)["ranks"]] == ["node1", "node2"]


def test_a_node_without_the_program(apart: Slurm, tmp_path: Path) -> None:
    ((host, check, text),) = problems(doctor(apart, 3))
    assert (host, check) == ("node3", "python") and text.endswith("is not there")
    words = ["salloc", "-N", "2", "-n", "2", "-w", "node[1,3]", "srun", "--mpi=pmi2", *COMMAND, "run", "-p", "x"]
    done = apart.finish(*words, environ=ON_HOSTS | {"PIPEINFER_JOIN_TIMEOUT": "600"}, timeout_s=120)
    line = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")][-1]
    assert line.startswith(f"pipeinfer: rank 1 (host node3) cannot start: python: {text} -> ")
    assert done.returncode, done.stderr


@pytest.mark.skipif(NFT is None, reason="there is no nft (nftables)")
def test_a_firewall_that_lets_slurm_through(apart: Slurm) -> None:
    assert apart.hosts
    words = ["ip", "netns", "exec", apart.hosts.prefix + "node2", str(NFT)]
    rules = FIREWALL.format(verdict="drop").replace("dport 22", f"dport {apart.ports['node2']}")
    subprocess.run([*words, "-f", "-"], input=rules, text=True, check=True)
    try:
        ((host, check, text),) = problems(doctor(apart, 2))
    finally:
        subprocess.run([*words, "flush", "ruleset"], check=True)
    assert (host, check) == ("node1", "ports") and text.startswith("node2 cannot be reached from it on TCP port")
