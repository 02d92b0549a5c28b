"""A job ends as it should whenever it is interrupted or one of its processes is killed.

Real jobs of 1 to 4 ranks are struck at a random moment: by a Ctrl-C as a terminal sends it, which must end the command
with 130 within 2 s, or by SIGKILL of one of their processes (the launcher, its proxy, a rank, the sentinel). After
either there must be no traceback, no crash, no process, no half file, and no shared memory once the next job has
started. Segments of other jobs on the machine are not told apart: run these tests alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs import environment, installed_script, launcher

pytestmark = pytest.mark.long

COMMAND = [str(installed_script(Path(tempfile.mkdtemp())))]
N_INTERRUPTS, N_KILLS = 100, 100
LATEST_S = 8.0  # when a job is struck
INTERRUPT_S, KILL_S = 2.0, 10.0
LEFT_S = 4.0  # for the sentinel to clear up after the command has returned
BAD_WORDS = ("Traceback", "Segmentation", "core dumped", "Error in", "Fatal", "died of SIGSEGV")
BANNERS = ("BAD TERMINATION", "assert (!closed)", "YOUR APPLICATION TERMINATED")
SHARED = Path("/dev/shm")
TELLING = ("State", "PPid", "SigPnd", "ShdPnd", "SigBlk")  # of /proc/PID/status
LONG = ["-p", "def read_lines(path):\n", "--ignore-eos"]


@dataclass(frozen=True)
class Trial:
    """One job and how it is struck. `victim` is a share of the way through the list of the job's processes."""

    n_ranks: int
    arguments: list[str]
    moment_s: float
    interrupt: bool
    victim: float


def choose(number: int, interrupt: bool) -> Trial:
    rng = random.Random(f"{interrupt}/{number}")
    n_ranks = rng.randint(1, 4)
    commands = [["run", *LONG, "-n", "6000", "-c", "7000"]] * 4
    commands.append(["bench", "-p", "64", "-n", "64", "-r", "200", "--results", "results.csv"])
    if n_ranks > 1:
        commands.append(["measure", "-o", "half.toml"])
    return Trial(n_ranks, rng.choice(commands), rng.uniform(0, LATEST_S), interrupt, rng.random())


def surroundings() -> dict[str, str]:
    """The command finds this Python first."""
    return environment() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def marked(mark: str) -> list[int]:
    """Every process that this job started, however far it has moved from its parents."""
    return sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_of(folder, mark))


def _is_of(process: Path, mark: str) -> bool:
    try:
        is_marked = f"INTERRUPTS_MARK={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
        return is_marked and (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_a_question(pid: int) -> bool:
    """Whether a process is what a shell asks before it becomes the program: without it the job is as well."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"/bin/sh\0")


def doing(pid: int) -> str:
    """What a process is and waits for, as far as the kernel says."""

    def read(name: str) -> str:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            return Path(f"/proc/{pid}/{name}").read_text(errors="replace").replace("\0", " ")
        return ""

    told = [line for line in read("status").splitlines() if line.partition(":")[0] in TELLING]
    return f"process {pid}, {read('cmdline').strip()}, in {read('wchan')}: {', '.join(told)}"


def wait_until(done: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


def strike(trial: Trial, job: subprocess.Popen[str], mark: str) -> str:
    """Returns what was struck."""
    if trial.interrupt:
        os.killpg(job.pid, signal.SIGINT)
        return "the terminal's process group"
    processes = [pid for pid in marked(mark) if not _is_a_question(pid)]
    victim = processes[int(trial.victim * len(processes))]
    name = Path(f"/proc/{victim}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:60]
    os.kill(victim, signal.SIGKILL)
    return f"{name} ({processes.index(victim) + 1} of {len(processes)})"


def perform(trial: Trial, folder: Path) -> tuple[list[str], str]:
    """(what is wrong, what was struck and said)."""
    mark = uuid.uuid4().hex
    job = subprocess.Popen(
        [*launcher(trial.n_ranks), *COMMAND, *trial.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=surroundings() | {"INTERRUPTS_MARK": mark},
        cwd=folder,
        start_new_session=True,
    )
    try:
        out, errors = job.communicate(timeout=trial.moment_s)
        return ([] if job.returncode == 0 else ["failed by itself"]), f"ended before: {out}\n{errors}"
    except subprocess.TimeoutExpired:
        pass
    struck, wrong = "nothing", list[str]()
    try:
        struck = strike(trial, job, mark)
    except (ProcessLookupError, FileNotFoundError, IndexError):  # it ended meanwhile
        wrong.append("could not strike")
    start_s, limit_s = time.monotonic(), INTERRUPT_S if trial.interrupt else KILL_S
    try:
        out, errors = job.communicate(timeout=5 * limit_s)
    except subprocess.TimeoutExpired:
        wrong.append(f"hangs: {'; '.join(map(doing, marked(mark)))}")
        end(mark)
        out, errors = job.communicate()
    took_s = time.monotonic() - start_s
    if took_s > limit_s:
        wrong.append(f"took {took_s:.1f} s")
    if trial.interrupt and job.returncode not in (130, -signal.SIGINT):  # a shell shows 130 for both
        wrong.append(f"exit code {job.returncode}")
    if not trial.interrupt and job.returncode == 0:
        wrong.append("exit code 0")
    wrong += [word for word in BAD_WORDS if word in errors]
    wrong += [word for word in BANNERS if trial.interrupt and word in out + errors]
    if not wait_until(lambda: not marked(mark), LEFT_S):
        wrong.append(f"left behind: {'; '.join(map(doing, marked(mark)))}")
        end(mark)
    wrong += [f"left {path.name}" for path in folder.iterdir() if path.name != "results.csv"]
    return wrong, f"{struck}\n--- output\n{out[-1500:]}\n--- errors\n{errors[-3000:]}"


def end(mark: str) -> None:
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def no_segment_is_left() -> Iterator[None]:
    before = set(SHARED.iterdir())
    yield
    subprocess.run([*COMMAND, "run", "-p", "x", "-n", "1"], env=surroundings(), capture_output=True)  # which sweeps
    assert not set(SHARED.iterdir()) - before


@pytest.mark.parametrize("number", range(N_INTERRUPTS))
def test_an_interrupted_job_ends(tmp_path: Path, number: int) -> None:
    check(choose(number, interrupt=True), tmp_path)


@pytest.mark.parametrize("number", range(N_KILLS))
def test_a_job_with_a_killed_process_ends(tmp_path: Path, number: int) -> None:
    check(choose(number, interrupt=False), tmp_path)


def check(trial: Trial, folder: Path) -> None:
    wrong, about = perform(trial, folder)
    assert not wrong, f"{'; '.join(wrong)}; {trial}, struck: {about}"
