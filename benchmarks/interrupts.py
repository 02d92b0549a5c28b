"""Does a job end as it should, whenever it is interrupted or one of its processes is killed?

`python benchmarks/interrupts.py [--interrupts N] [--kills N] [--seed N] [--longest S]` starts real jobs of 1 to 4
ranks and strikes each at a random moment: a Ctrl-C as a terminal sends it, or SIGKILL to one of the job's processes
(the launcher, its proxy, a rank, the sentinel). A Ctrl-C must end the command with 130 within 2 s; after either there
must be no traceback, no crash, no banner of the launcher beyond its answer to the Ctrl-C, no process, no half file, and
no shared memory once the next job has started. Prints every failure with its command, moment and output; exit code 1
when there is one. Segments of other jobs on the machine are not told apart: run it alone, or in a mount namespace with
its own /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.jobs import ROOT, environment, launcher

COMMAND = [str(ROOT / "scripts" / "pipeinfer")]  # as it is installed
INTERRUPT_S = 2.0
KILL_S = 10.0
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


def choose(rng: random.Random, interrupt: bool, longest_s: float) -> Trial:
    n_ranks = rng.randint(1, 4)
    commands = [["run", *LONG, "-n", "6000", "-c", "7000"]] * 4
    commands.append(["bench", "-p", "64", "-n", "64", "-r", "200", "--results", "results.csv"])
    if n_ranks > 1:
        commands.append(["measure", "-o", "half.toml"])
    else:
        commands.append(["record", *LONG[:2], "-n", "3000", "-o", "half.json"])
        commands.append(["models", "grow", "--layers", "500", "-o", "half.gguf"])
    return Trial(n_ranks, rng.choice(commands), rng.uniform(0, longest_s), interrupt, rng.random())


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


def perform(trial: Trial, folder: Path) -> tuple[list[str], float, str]:
    """(what is wrong, seconds until the end, what was struck and said)."""
    mark = uuid.uuid4().hex
    job = subprocess.Popen(
        [*launcher(trial.n_ranks), *COMMAND, *trial.arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", env=surroundings() | {"INTERRUPTS_MARK": mark}, cwd=folder,
        start_new_session=True,
    )  # fmt: skip
    try:
        early = job.communicate(timeout=trial.moment_s)
    except subprocess.TimeoutExpired:
        early = None
    if early:
        return ([] if job.returncode == 0 else ["failed by itself"]), 0.0, f"ended before: {early[0]}\n{early[1]}"
    struck, wrong = "nothing", list[str]()
    try:
        struck = strike(trial, job, mark)
    except (ProcessLookupError, FileNotFoundError, IndexError):  # it ended meanwhile
        wrong.append("could not strike")
    start_s, limit_s = time.monotonic(), INTERRUPT_S if trial.interrupt else KILL_S
    try:
        out, errors = job.communicate(timeout=5 * limit_s)
    except subprocess.TimeoutExpired:
        wrong.append(f"hangs: {marked(mark)}")
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
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
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    wrong += [f"left {path.name}" for path in folder.iterdir() if path.name != "results.csv"]
    return wrong, took_s, f"{struck}\n--- output\n{out[-1500:]}\n--- errors\n{errors[-3000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--interrupts", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=8.0, help="The latest moment, seconds after the start.")
    given = parser.parse_args()
    kinds = [True] * given.interrupts + [False] * given.kills
    n_failed, times_s, segments = 0, {True: [0.0], False: [0.0]}, set(SHARED.iterdir())
    for number, interrupt in enumerate(kinds):
        trial = choose(random.Random(f"{given.seed}/{number}"), interrupt, given.longest)
        with tempfile.TemporaryDirectory() as folder:
            wrong, took_s, about = perform(trial, Path(folder))
        times_s[interrupt].append(took_s)
        print(
            f"{number}: {'Ctrl-C' if interrupt else 'SIGKILL'} at {trial.moment_s:.3f} s, np {trial.n_ranks} "
            f"{' '.join(trial.arguments[:1])}: {took_s:.2f} s {'; '.join(wrong) or 'ok'}", flush=True,
        )  # fmt: skip
        if wrong:
            n_failed += 1
            print(f"    {' '.join(trial.arguments)}\n    struck: {about}", flush=True)
    subprocess.run([*COMMAND, "run", "-p", "x", "-n", "1"], env=surroundings(), capture_output=True)  # which sweeps
    left = sorted(path.name for path in set(SHARED.iterdir()) - segments)
    slowest = {"Ctrl-C" if kind else "SIGKILL": round(max(seconds), 2) for kind, seconds in times_s.items()}
    print(f"{len(kinds)} jobs, {n_failed} failed; the slowest end in s: {slowest}; segments left: {left}")
    return 1 if n_failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
