"""Start real jobs: mpirun and the pipeinfer command, as a user does."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
COMMAND = [sys.executable, "-m", "pipeinfer"]
WARM = ROOT / "tests" / "support" / "warm.py"
SET_BY_PROGRAM = {"GGML_NO_BACKTRACE", "OPENBLAS_NUM_THREADS"}


def installed_script(folder: Path) -> Path:
    """The script as it is installed: beside a Python, this one."""
    (folder := folder / "bin").mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)
    return Path(shutil.copy(ROOT / "scripts" / "pipeinfer", folder))


def launcher(n_ranks: int) -> list[str]:
    """What starts `n_ranks` ranks on this machine, whichever MPI is installed."""
    if n_ranks == 1:
        return []
    assert MPIRUN, "no mpirun: install the mpich or the openmpi package"
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
    extra = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "open-mpi" in version else []
    return [MPIRUN, *extra, "-np", str(n_ranks)]


BY_MPICH = MPIRUN is None or "--oversubscribe" not in launcher(2)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_PROGRAM} | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),  # what is kept of test models is not the user's
    }


def warm_command(arguments: Sequence[str]) -> list[str]:
    """In place of COMMAND, in less than half of its time; COMMAND itself if a test has changed the environment, which
    modules look at when they are imported. The processes of the job are not those that the launcher started.
    `arguments`: of the job."""
    if _variables() != UNCHANGED:
        return COMMAND
    return [sys.executable, "-ISs", str(WARM), _warm(any("torch" in word for word in arguments))]


@cache
def _warm(with_torch: bool) -> str:
    """The process that forks ranks, which ends with this one: where it listens."""
    folder = mkdtemp(prefix="pipeinfer-warm-")
    command = [sys.executable, "-m", "tests.support.warm", path := f"{folder}/listens", *["torch"] * with_torch]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )
    atexit.register(_end, process, folder)
    assert process.stdout and process.stdout.readline() == "ready\n", "no warm process"
    return path


def _end(process: subprocess.Popen[str], folder: str) -> None:
    process.communicate()
    shutil.rmtree(folder)


def _variables() -> dict[str, str]:
    return {name: value for name, value in environment().items() if not name.startswith("PYTEST_")}


UNCHANGED = _variables()


def start(n_ranks: int, arguments: Sequence[str], warm: bool = False, **options: Any) -> subprocess.Popen[str]:
    """`warm`: by `warm_command`."""
    return subprocess.Popen(
        [*launcher(n_ranks), *(warm_command(arguments) if warm else COMMAND), *arguments],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def finish(
    n_ranks: int, arguments: Sequence[str], timeout_s: float = 120, warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run to the end; a job that hangs is killed and fails the test. Without `warm` ranks import what they need."""
    return subprocess.run(
        [*launcher(n_ranks), *(warm_command(arguments) if warm else COMMAND), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=timeout_s,
    )


def run_json(n_ranks: int, arguments: Sequence[str], timeout_s: float = 300, warm: bool = True) -> dict[str, Any]:
    done = finish(n_ranks, ["run", "--json", *arguments], timeout_s, warm)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def command_of(pid: int) -> bytes:
    """The words of a process, each with a zero byte behind it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def but_waiting(errors: str) -> list[str]:
    """The lines of standard error, but those of ranks that wait for others at a slow start."""
    return [
        line for line in errors.splitlines() if not re.match(r"pipeinfer: (waiting for|rank \d.* has waited) ", line)
    ]


def repacks(job: Mapping[str, Any]) -> bool:
    """Whether a job's exact numerics, such as exact-q8_0.32-1f3a, are with repacked weights."""
    return "." in job["numerics_name"]


def plain_tokens_after(model: Path, job: Mapping[str, Any], n_predict: int, grammar: str = "") -> list[int]:
    """As `plain_tokens`, after a job's prompt, with weights repacked if they were there."""
    return plain_tokens(model, job["prompt_tokens"], n_predict, grammar, repacked=repacks(job))


def plain_tokens(
    model: Path,
    prompt: Sequence[int],
    n_predict: int,
    grammar: str = "",
    adapters: Sequence[str] = (),
    repacked: bool = False,
) -> list[int]:
    """Plain llama-cpp-python, in a process of its own."""
    words = [str(model), str(n_predict), ",".join(map(str, prompt)), grammar, *adapters, *["--repacked"] * repacked]
    command = [sys.executable, "-m", "tests.support.plain_llama", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens
