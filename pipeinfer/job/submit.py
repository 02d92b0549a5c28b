"""`pipeinfer submit`: make a job's folder and script, queue it, and follow its output. Starts no MPI."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TextIO

from pipeinfer.cluster.sbatch import JobState, job_state, submit_script
from pipeinfer.cluster.slurm import SlurmJob, script_text
from pipeinfer.errors import UserError
from pipeinfer.outputs import write_file

LOOK_S, ASK_S = 0.25, 2.0
"""How often the job's files are looked at; how often Slurm is asked about it, which has more to do."""

SILENT_S = 600.0
"""How long Slurm may give no answer about a job that is followed: its controller may be busy, or be started again."""

MOST_FOLDERS = 10_000
VERSION_TIMEOUT_S = 20.0


def submit(job: SlurmJob, wait: bool) -> int:
    """Make the job's folder in `job.folder`; returns the exit code, with `wait` the job's. Raises UserError."""
    job = in_folder(job, _new_folder(job.folder, job.name))
    script = job.folder / "job.sh"
    try:
        write_file(script, "the job's script", script_text(job).encode())
        number = submit_script(script)
    except UserError:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise
    try:
        write_file(job.folder / "id", "the job's number", f"{number}\n".encode())
    except UserError as error:  # the job is in the queue all the same
        _tell(str(error))
    if not wait:
        print(f"{number} {job.folder}", flush=True)
        if "serve" in job.command[1:2]:
            _tell(f"once the server listens, {job.log_file} has its address, and how other machines get there (ssh -L "
                  "PORT:127.0.0.1:PORT NODE)")  # fmt: skip
        return 0
    _tell(f"job {number} in {job.folder}; scancel {number} ends it")
    return follow(number, job.text_file, job.log_file)


def in_folder(job: SlurmJob, folder: Path) -> SlurmJob:
    """The job with its folder in place of `{}` in its command's words."""
    return replace(job, folder=folder, command=tuple(word.replace(FOLDER, str(folder)) for word in job.command))


FOLDER = "\0"
"""Stands in a command's words for the job's folder, which is not there yet: no word can have it."""


def next_folder(base: Path, name: str) -> Path:
    """What the next job's folder would be called."""
    return next(path for path in _folders(base, name) if not path.exists())


def _folders(base: Path, name: str) -> list[Path]:
    return [base / f"{name}-{number}" for number in range(1, MOST_FOLDERS)]


def _new_folder(base: Path, name: str) -> Path:
    try:
        base.mkdir(parents=True, exist_ok=True)
        for folder in _folders(base, name):
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # perhaps just now, by another submission
                continue
    except OSError as error:
        raise UserError(f"--output {base}: {error.strerror}; name a directory that can be written") from None
    raise UserError(f"--output {base} has {MOST_FOLDERS} jobs called {name}; use another --job-name or --output")


def follow(number: str, text: Path, log: Path, state_of: Callable[[str], JobState] = job_state) -> int:
    """Copy a job's output until it has ended. Returns its exit code, or 128 + its signal, or 1 where Slurm knows
    neither. Raises UserError when Slurm does not answer any more."""
    tails = [_Tail(text, sys.stdout), _Tail(log, sys.stderr)]
    said, asked_s, answered_s = "", float("-inf"), time.monotonic()
    state = JobState("PENDING")
    while True:
        if time.monotonic() - asked_s >= ASK_S:
            asked_s = time.monotonic()
            try:
                state, answered_s = state_of(number), asked_s
            except UserError as error:
                if asked_s - answered_s > SILENT_S:
                    raise
                if str(error) != said:
                    said = str(error)
                    _tell(f"job {number} is not known to have ended: {said}")
                continue
            if state.name == "PENDING" and state.reason != said:
                said = state.reason
                _tell(f"job {number} waits: {said or 'Slurm has not said why'}")
        for tail in tails:  # once more after its end
            tail.hand_on()
        if state.ended:
            break
        time.sleep(LOOK_S)
    for tail in tails:
        tail.close()
    code = state.code or (128 + state.signal if state.signal else int(state.name not in ("COMPLETED", "")))
    if code:
        _tell(f"job {number} ended: {state.name.lower()}{f' ({state.reason})' if state.reason else ''}")
    return code


class _Tail:
    """What is new in a file that may not be there yet."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path, self.stream = path, stream
        self._file: BinaryIO | None = None

    def hand_on(self) -> None:
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        if self._file and (new := self._file.read()):
            self.stream.buffer.write(new)
            self.stream.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


def _tell(message: str) -> None:
    print(f"pipeinfer: {message}", file=sys.stderr, flush=True)


def is_open_mpi(mpirun: str = "") -> bool:
    """Whether an mpirun, ours by default, is Open MPI's."""
    try:
        done = subprocess.run(
            [mpirun or own_program("mpirun"), "--version"], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=VERSION_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"open mpi" in done.stdout.lower().replace(b"-", b" ")


def own_program(name: str) -> str:
    """A program that is installed beside this Python, by a path that is the same on a job's nodes; else its name."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else name
