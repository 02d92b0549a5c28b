"""One rank comes late to a step that all ranks take together: those who wait cost nothing and hear what happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.job.process.test_ends import complaints
from tests.support.jobs import environment, launcher, until
from tests.support.late import LATE_S

N_RANKS, N_TICKS = 3, os.sysconf("SC_CLK_TCK")
SOON_S = LATE_S / 2  # well before who is late has come
BUSY_SHARE = 0.3
N_TRIES = 4
STEPS = ["all_gather", "broadcast", "clock_offset_s", "finalize"]


def start(step: str, late_rank: int, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """The job, and the ranks' processes, all of which have come to the step."""
    run = ["run", "-p", "def f(x):\n", "-n", "4"]
    job = subprocess.Popen(
        [*launcher(N_RANKS), sys.executable, "-m", "tests.support.late", step, str(late_rank), str(folder), *run],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    marks = [folder / str(rank) for rank in range(N_RANKS)]
    until(lambda: all(mark.exists() for mark in marks))
    time.sleep(0.3)
    return job, [int(mark.read_text()) for mark in marks]


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / N_TICKS


def shares_of_a_core(pids: Sequence[int]) -> list[float]:
    """What each process uses, over a second."""
    before_s, since_s = [cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(1.0)
    return [(cpu_s(pid) - used_s) / (time.monotonic() - since_s) for pid, used_s in zip(pids, before_s, strict=True)]


@pytest.mark.skipif(not Path("/proc").exists(), reason="cores are counted through /proc")
@pytest.mark.parametrize("step", STEPS)
def test_ctrl_c_ends_a_job_whose_ranks_wait_for_one_that_is_late(step: str, tmp_path: Path) -> None:
    late = 0 if step == "broadcast" else 2
    job, pids = start(step, late, tmp_path)
    waiting = [pid for rank, pid in enumerate(pids) if rank != late]
    shares = min((shares_of_a_core(waiting) for _ in range(2)), key=max)  # some may end what they did before
    os.killpg(job.pid, signal.SIGINT)
    since_s = time.monotonic()
    _, errors = job.communicate(timeout=LATE_S)
    took_s = time.monotonic() - since_s
    assert max(shares) < BUSY_SHARE, f"who waits costs {max(shares):.2f} of a core"
    assert took_s < SOON_S, errors
    assert job.returncode == 130 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("step", "number", "victim"),
    [
        ("clock_offset_s", signal.SIGKILL, 2),
        ("all_gather", signal.SIGKILL, 2),
        ("all_gather", signal.SIGSEGV, 1),
        ("all_gather", signal.SIGKILL, 0),
    ],
)
def test_a_ranks_death_is_heard_by_those_who_wait(
    step: str, number: signal.Signals, victim: int, tmp_path: Path
) -> None:
    """`all_gather` comes before the ranks have joined the watch. Another rank, which the launcher kills by the same
    signal, may have ended before the victim on a busy host: one of a few jobs has to name the victim."""
    tries = N_TRIES if (step, number) == ("all_gather", signal.SIGKILL) else 1
    lines = list[str]()
    while len(lines) < tries and not any(f"rank {victim} (host" in line for line in lines):
        lines.append(line_of_death(step, number, victim, tmp_path / str(len(lines))))
    assert f"rank {victim} (host" in lines[-1], lines


def line_of_death(step: str, number: signal.Signals, victim: int, folder: Path) -> str:
    """What a job says whose rank is killed by this signal."""
    folder.mkdir()
    job, pids = start(step, 2, folder)
    os.kill(pids[victim], number)
    since_s = time.monotonic()
    _, errors = job.communicate(timeout=LATE_S)
    assert time.monotonic() - since_s < SOON_S and job.returncode
    (line,) = complaints(errors)
    assert f"died of {number.name}; ending the job" in line
    return line
