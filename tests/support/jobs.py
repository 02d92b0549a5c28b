"""Start real jobs: mpirun and the pipeinfer command, as a user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
COMMAND = [sys.executable, "-m", "pipeinfer"]


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
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(ROOT / ".pytest_cache"),  # what is kept of test models is not the user's
    }


def start(n_ranks: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launcher(n_ranks), *COMMAND, *arguments],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def finish(n_ranks: int, arguments: Sequence[str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run to the end; a job that hangs is killed and fails the test."""
    return subprocess.run(
        [*launcher(n_ranks), *COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=timeout_s,
    )


def run_json(n_ranks: int, arguments: Sequence[str], timeout_s: float = 300) -> dict[str, Any]:
    done = finish(n_ranks, ["run", "--json", *arguments], timeout_s)
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


def plain_tokens(
    model: Path, prompt: Sequence[int], n_predict: int, grammar: str = "", adapters: Sequence[str] = ()
) -> list[int]:
    """Plain llama-cpp-python, in a process of its own."""
    ids = ",".join(map(str, prompt))
    command = [sys.executable, "-m", "tests.support.plain_llama", str(model), str(n_predict), ids, grammar, *adapters]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])
    return tokens
