"""Starts of jobs on hosts with a fault each (namespaces of this machine): what is said, and how soon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.doctor.test_doctor_hosts import FIREWALL, NFT
from tests.support.jobs import BY_MPICH, COMMAND, MPIRUN, ROOT, environment, launcher
from tests.support.ssh_hosts import SshHosts, missing, ssh_hosts

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no hosts can be made here: {WHY}")
RUN = ["run", "-p", "x", "-n", "4", "-t", "1", "--ignore-eos"]
SLOW = '#!/bin/sh\n[ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 ] || %s\nexec %s "$@"\n'
OTHER_PYTHON = """#!/bin/sh
[ "$1" = -S ] && shift
PYTHONSAFEPATH=1 PYTHONPATH={other} exec {python} "$@"
"""
LIMIT = {"PIPEINFER_JOIN_TIMEOUT": "120"}  # a job that waits for it is killed before
WAIT = "until [ -e {told} ]; do sleep 0.1; done"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[SshHosts]:
    with ssh_hosts(2, tmp_path) as made:
        yield made


def start(
    hosts: SshHosts, *words: str, program: list[str] | None = None, limit: dict[str, str] = LIMIT
) -> subprocess.Popen[str]:
    """A job with a rank on each, started on node1."""
    hosts_words = ["-hosts", "node1:1,node2:1", "-iface", "eth0"]
    if not BY_MPICH:
        hosts_words = ["--host", "node1:1,node2:1", "--bind-to", "none", "-x", "PYTHONPATH"]
    command = " ".join([str(MPIRUN), *hosts_words, "-np", "2", *(program or COMMAND), *(words or RUN)])
    environ = environment() | limit | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    inside, none, pipe = hosts.inside("node1", f"exec {command}"), subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(inside, stdin=none, stdout=pipe, stderr=pipe, text=True, env=environ)


def said(job: subprocess.Popen[str], beginning: str) -> str:
    """The first line of this program that begins so."""
    assert job.stderr
    while not (line := job.stderr.readline()).startswith(f"pipeinfer: {beginning}"):
        assert line, "nothing of it is said"
    return line.removeprefix("pipeinfer: ").rstrip()


def errors(hosts: SshHosts, job: subprocess.Popen[str], timeout_s: float = 60) -> list[str]:
    """The lines of this program."""
    try:
        text = job.communicate(timeout=timeout_s)[1]
    finally:
        job.kill()
        hosts.made.end_all()
    assert "Traceback" not in text, text
    return [line.removeprefix("pipeinfer: ") for line in text.splitlines() if line.startswith("pipeinfer: ")]


def faults(lines: list[str]) -> list[str]:
    """Without those of a slow start: that a rank is waited for, and what is found on its host."""
    return [line for line in lines if not line.startswith(("waiting for ", "node2: "))]


def test_a_slow_rank_is_named_and_its_host_is_no_suspect(two: SshHosts, tmp_path: Path) -> None:
    slow, told = tmp_path / "slow", tmp_path / "told"
    slow.write_text(SLOW % (WAIT.format(told=told), " ".join(COMMAND)))
    slow.chmod(0o755)
    job = start(two, program=[str(slow)])
    assert said(job, "waiting for ").endswith("rank 1 (host node2), 120 s at most (PIPEINFER_JOIN_TIMEOUT)")
    told.touch()
    lines = errors(two, job)
    assert job.returncode == 0, lines
    assert not any("node2:" in line and "no fault was found" not in line for line in lines), lines


def test_a_rank_that_hangs_is_told_from_one_that_is_not_there(two: SshHosts, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(SLOW % ("exec sleep 1000", " ".join(COMMAND)))
    slow.chmod(0o755)
    # a host without a fault is reported after 10 s, and a moment that what else is at work here makes longer
    job = start(two, program=[str(slow)], limit={"PIPEINFER_JOIN_TIMEOUT": "30"})
    lines = errors(two, job, 120)
    assert lines[1] == "node2: no fault was found; rank 1 runs there"
    assert lines[2].startswith("rank 1 (host node2) did not join within 30 s") and lines[1] in lines[2]
    assert len(lines) == 3


@pytest.mark.skipif(NFT is None, reason="there is no nft (nftables)")
@pytest.mark.skipif(not BY_MPICH, reason="Open MPI connects from node2 to node1, which is open")
def test_a_firewall_is_named_long_before_the_limit(two: SshHosts) -> None:
    """It lets only ssh in: the launcher's helper gets out."""
    words = ["ip", "netns", "exec", two.made.prefix + "node2", str(NFT), "-f", "-"]
    subprocess.run(words, input=FIREWALL.format(verdict="drop"), text=True, check=True)
    start_s, job = time.monotonic(), start(two)
    line = said(job, "node1: ports: ")
    passed_s = time.monotonic() - start_s
    job.terminate()  # it would wait for node2 for the rest of its limit
    errors(two, job)
    assert "node2 cannot be reached from it on TCP port" in line and " -> open TCP" in line
    assert passed_s < 60


def test_a_shared_memory_that_cannot_be_written_is_one_line(two: SshHosts) -> None:
    two.start("node2", "mount -t tmpfs -o ro none /dev/shm")
    two.await_all()
    job = start(two)
    (line,) = faults(errors(two, job))
    assert job.returncode
    assert line.startswith("rank 1 (host node2): shared memory: /dev/shm cannot be written: Read-only") and "->" in line


def test_a_single_rank_ends_with_the_same_line(two: SshHosts) -> None:
    script = f"mount -t tmpfs -o ro none /dev/shm && exec {' '.join([*COMMAND, *RUN])}"
    words = two.inside("node1", script)
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("pipeinfer: shared memory: /dev/shm cannot be written: Read-only") and "-> sudo" in line


def test_a_script_without_its_python_ends_the_job(two: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (script := tmp_path / "bin" / "pipeinfer").write_text((ROOT / "scripts" / "pipeinfer").read_text())
    script.chmod(0o755)
    (there := tmp_path / "there").mkdir()
    (there / "python3.99").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (there / "python3.99").chmod(0o755)
    (python := tmp_path / "bin" / "python3").symlink_to(there / "python3.99")
    two.start("node2", f"mount -t tmpfs none {there}")
    two.await_all()
    job = start(two, program=[str(script)])
    lines = faults(errors(two, job))
    assert job.returncode, lines
    assert lines[0].startswith(f"host node2: {python} is a link to {there}/python3.99, which cannot"), lines


def test_a_rank_that_another_python_ends_is_not_waited_for(two: SshHosts, tmp_path: Path) -> None:
    """Python itself says there that it has no such module, and the launcher waits on."""
    (other := tmp_path / "other").mkdir()
    (other / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.99.1'\n")
    here = Path(sys.executable)
    programs = shutil.copytree(here.parent, tmp_path / "programs", symlinks=True)  # the launcher's helper too
    (programs / here.name).unlink()
    (programs / here.name).write_text(OTHER_PYTHON.format(other=other, python=os.path.realpath(here)))
    (programs / here.name).chmod(0o755)
    two.start("node2", f"mount --bind {programs} {here.parent}")
    two.await_all()
    job = start(two)
    *_, line = lines = errors(two, job)
    assert job.returncode, lines
    assert (
        line.startswith("rank 1 (host node2) cannot start: python: Python 3.99.1, and here it is 3.") and "->" in line
    )


def test_ranks_within_scripts_may_start_late(tmp_path: Path) -> None:
    """No rank is the launcher's child."""
    script, told = tmp_path / "script", tmp_path / "told"
    as_child = SLOW.replace("exec ", "").replace('"$@"', '"$@"; exit $?')
    script.write_text(as_child % (WAIT.format(told=told), " ".join(COMMAND)))
    script.chmod(0o755)
    words, none, pipe = [*launcher(2), str(script), *RUN], subprocess.DEVNULL, subprocess.PIPE
    job = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, text=True, env=environment())
    said(job, "waiting for MPI to start; all ranks run on host")
    told.touch()
    _, rest = job.communicate(timeout=120)
    assert job.returncode == 0, rest


@pytest.mark.skipif(not BY_MPICH, reason="Open MPI ends the job itself")
@pytest.mark.parametrize(
    ("end", "line"),
    [
        ("exit 3", "1 of 2 ranks run on host node1: the start of others has failed; ending the job"),
        (
            f"exec sh -c '{WAIT}; exit 3'",
            "rank 1 (host node1) ended with exit code 3 before all have joined; ending the job",
        ),
    ],
)
def test_a_rank_of_this_host_that_has_ended_is_not_waited_for(
    two: SshHosts, tmp_path: Path, end: str, line: str
) -> None:
    script, told, begun = (tmp_path / name for name in ("script", "told", "begun"))
    begins = SLOW.replace("\nexec", f"\n{WAIT.format(told=begun)}; exec")  # rank 0 looks for a rank that has been there
    script.write_text(begins % (f"{{ touch {begun}; {end.format(told=told)}; }}", " ".join(COMMAND)))
    script.chmod(0o755)
    command = " ".join([str(MPIRUN), "-np", "2", str(script), *RUN])
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    words = two.inside("node1", f"exec {command}")
    job = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, text=True, env=environment() | LIMIT)
    if "{told}" in end:
        said(job, "waiting for ")
    told.touch()
    *_, last = errors(two, job)
    assert last == line and job.returncode
