"""Jobs under a real Slurm on this host: started by srun and sbatch, ended by deaths, scancel and Ctrl-C."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.observe.table import RESULTS
from tests.support.jobs import BY_MPICH, COMMAND, ROOT, finish
from tests.support.paces import pace_words, slow_target
from tests.support.slurm import PROGRAMS, Slurm, missing_programs, private_slurm

pytestmark = [
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
    pytest.mark.skipif(not BY_MPICH, reason="Open MPI needs Slurm's PMIx, which Debian's does not load"),
]

SRUN = ["srun", "-X", "--mpi=pmi2", "-n", "3"]
SHORT = ["run", "-p", "def fibonacci(n):", "-n", "24", "-s", "3", "-t", "1"]
LONG = ["run", "-p", "def fibonacci(n):", "-n", "1000", "--ignore-eos", "--policy", "iterative", "-t", "1"]
PACKAGE = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with private_slurm() as running:
        yield running
    assert running.processes() == []


def start_long(slurm: Slurm) -> subprocess.Popen[str]:
    """A job of three ranks that has begun to write its text, which takes minutes."""
    pace = pace_words(slurm.folder, slow_target(20.0))
    job = slurm.popen(*SRUN, *COMMAND, *LONG, *pace, environ=PACKAGE)
    assert job.stdout and select.select([job.stdout], [], [], 120)[0], "no text"
    return job


def pid_of(slurm: Slurm, rank: int) -> int:
    """The process of a rank: the oldest of those with its number, before any that it started."""
    return min(slurm.processes(f"SLURM_PROCID={rank}", "SLURM_STEP_NUM_TASKS=3"))


def submit(slurm: Slurm, log: Path, arguments: list[str], environ: dict[str, str] | None = None) -> str:
    """Queue a batch job of the repository and wait for its end. Returns its state; `log` has its standard error."""
    command = ["sbatch", "--parsable", "-o", f"{log}.out", "-e", str(log), *arguments]
    job = slurm.finish(*command, environ=PACKAGE | (environ or {}), cwd=ROOT)
    assert job.returncode == 0, job.stderr
    deadline = time.monotonic() + 300
    while True:  # sbatch --wait looks every few seconds only
        about = slurm.output("scontrol", "show", "job", job.stdout.strip())
        state = about.partition("JobState=")[2].split()[0]
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return state
        assert time.monotonic() < deadline, about
        time.sleep(0.1)


def wait_until_empty(slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while slurm.output("squeue", "--noheader") or slurm.processes("SLURM_STEP_NUM_TASKS=3"):
        assert time.monotonic() < deadline, "the job has ended, and something of it is left"
        time.sleep(0.1)


def test_srun_and_sbatch_give_the_text_that_mpirun_gives(slurm: Slurm, tmp_path: Path) -> None:
    text = finish(3, SHORT).stdout
    job = slurm.finish(*SRUN, *COMMAND, *SHORT, environ=PACKAGE)
    assert job.returncode == 0 and job.stdout == text and len(text) > 24, job.stderr
    assert "; 2 stage 1, layers" in job.stderr, "three ranks: a draft and two stages"
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\nexec srun -X --mpi=pmi2 "$@"\n')
    state = submit(slurm, tmp_path / "log", ["-n", "3", str(script), *COMMAND, *SHORT])
    assert state == "COMPLETED", (tmp_path / "log").read_text()
    assert (tmp_path / "log.out").read_text() == text
    assert "stage 1" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_named_and_the_job_ends(slurm: Slurm, rank: int) -> None:
    job = start_long(slurm)
    os.kill(pid_of(slurm, rank), signal.SIGKILL)
    errors = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("pipeinfer: ") and "ending the job" in line]
    assert len(lines) == 1 and lines[0].startswith(f"pipeinfer: rank {rank} (host ") and "layers" in lines[0], errors
    assert lines[0].endswith("died of SIGKILL; ending the job")
    wait_until_empty(slurm)


def test_a_rank_that_dies_before_the_others_have_come_ends_the_job(slurm: Slurm) -> None:
    late = 'test "$SLURM_PROCID" = 0 || sleep 100; exec "$@"'
    job = slurm.popen(*SRUN, "sh", "-c", late, "sh", *COMMAND, *SHORT, environ=PACKAGE)
    deadline = time.monotonic() + 60
    while len(slurm.processes("SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=3")) < 2:
        assert job.poll() is None and time.monotonic() < deadline, "rank 0 has started no watch"
        time.sleep(0.02)
    os.kill(pid_of(slurm, 0), signal.SIGABRT)
    errors = job.communicate(timeout=60)[1]
    # the sentinel may have seen on this host that the others live
    line = r"^pipeinfer: rank 0 \(host \S+\)(, or rank 1, rank 2, which had not joined yet,)? died"
    assert job.returncode != 0 and re.search(line, errors, re.MULTILINE), errors
    wait_until_empty(slurm)


@pytest.mark.parametrize("how", ["scancel", "Ctrl-C"])
def test_a_stopped_job_keeps_its_text(slurm: Slurm, how: str) -> None:
    job = start_long(slurm)
    if how == "scancel":
        slurm.finish("scancel", *slurm.output("squeue", "--noheader", "--format=%i").split())
    else:
        job.send_signal(signal.SIGINT)
    errors = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    assert "terminated; the text" in errors if how == "scancel" else "interrupted; the text" in errors, errors
    assert "tokens/s" in errors and "Traceback" not in errors, "the statistics of what was generated"
    wait_until_empty(slurm)


@pytest.mark.parametrize(("arguments", "words"), [(["--policy", "magic"], "magic"), (["-m", "none.gguf"], "none.gguf")])
def test_bad_input_is_one_line(slurm: Slurm, arguments: list[str], words: str) -> None:
    job = slurm.finish(*SRUN, *COMMAND, "run", "-p", "x", *arguments, environ=PACKAGE)
    assert job.returncode == 2 and job.stdout == "", job.stderr
    lines = [line for line in job.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(lines) == 1 and lines[0].startswith("pipeinfer: ") and words in lines[0]


def test_ranks_that_mpi_does_not_join_are_refused(slurm: Slurm) -> None:
    job = slurm.finish("srun", "--mpi=none", "-n", "3", *COMMAND, *SHORT, environ=PACKAGE)
    assert job.returncode == 2 and job.stdout == "", job.stderr
    lines = [line for line in job.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(lines) == 1 and "3 ranks" in lines[0] and "--mpi=pmi2" in lines[0]


def test_experiments_take_their_ranks_from_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    models = ROOT / "pipeinfer" / "models" / "demo"
    settings = {
        "PAIRS": f"{models}/target.gguf:{models}/draft.gguf",
        "RESULTS": str(tmp_path / "results.csv"),
        "FIGURES": str(tmp_path / "figures"),
        "QUESTIONS": "",
        "ABLATE": "",
        "TOKENS": "4",
        "REPEATS": "1",
        "CUT": "8",
        "SLURM_MPI_TYPE": "none",  # as srun leaves it behind where that is the site's default
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{slurm.environ['PATH']}",
    }
    state = submit(slurm, tmp_path / "log", ["-n", "2", "-c", "2", "experiments.sh"], settings)
    assert state == "COMPLETED", (tmp_path / "log").read_text()
    rows = RESULTS.read(tmp_path / "results.csv")
    assert {row["ranks"] for row in rows} == {2} and len(rows) == 3 * 3, "three prompts under three policies"
    assert list((tmp_path / "figures").iterdir())


def test_nothing_is_left_when_a_test_fails() -> None:
    with pytest.raises(ZeroDivisionError), private_slurm() as other:
        job = other.popen("srun", "-n", "2", "sleep", "1000")
        while len(other.processes("SLURM_STEP_NUM_TASKS=2")) < 2:
            assert job.poll() is None
            time.sleep(0.05)
        _ = 1 / 0
    assert other.processes() == [] and not other.folder.exists()


def test_daemons_end_with_the_tests_that_started_them() -> None:
    """Even when those are killed and can clean up nothing."""
    program = (
        "import time\nfrom tests.support.slurm import *\n"
        "with private_slurm() as slurm: print(slurm.folder); time.sleep(99)"
    )
    tests = subprocess.Popen([sys.executable, "-uc", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert tests.stdout
    other = Slurm(Path(tests.stdout.readline().strip()))
    assert len(other.processes()) >= len([name for name in PROGRAMS if name.endswith("d")])
    tests.kill()
    tests.wait()
    deadline = time.monotonic() + 60
    while other.processes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shutil.rmtree(other.folder)
