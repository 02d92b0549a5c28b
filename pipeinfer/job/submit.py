"""`pipeinfer submit`: make a job's folder and script, queue it, and follow its output. Starts no MPI."""

import os
import shutil
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TextIO

from pipeinfer.cluster.slurm import INDEX, JobState, SlurmJob, job_state, script_text, submit_script
from pipeinfer.errors import UserError
from pipeinfer.job.process.streams import complain, lost_output
from pipeinfer.outputs import write_file

LOOK_S, ASK_S = 0.25, 2.0  # between looks at the job's files, and queries to Slurm, which has more to do
SILENT_S = 600.0  # so long Slurm may not answer about a job that is followed: its controller may be restarted
MOST_FOLDERS = 10_000


def submit(job: SlurmJob, wait: bool, source: Path | None = None) -> int:
    """Make the job's folder in `job.folder`; returns the exit code, with `wait` the job's. `source`: the requests that
    an array shares. Raises UserError."""
    parts = split_lines(source, job.n_array) if source and job.n_array else []
    job = in_folder(job, _new_folder(job.folder, job.name))
    script = job.folder / "job.sh"
    try:
        write_file(script, "the job's script", script_text(job).encode())
        script.chmod(0o700)  # its command may have keys
        for index, part in enumerate(parts):
            write_file(Path(str(job.folder / PART).replace(INDEX, str(index))), "a part of the requests", part)
        number = submit_script(script)
    except UserError:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise
    try:
        write_file(job.folder / "id", "the job's number", f"{number}\n".encode())
    except UserError as error:  # the job is in the queue all the same
        complain(str(error))
    if not wait:
        print(f"{number} {job.folder}", flush=True)
        if "serve" in job.command[1:2]:
            tells = f"{job.log_file} has its address, and how other machines get there"
            complain(f"once the server listens, {tells} (ssh -L PORT:127.0.0.1:PORT NODE)")
        return 0
    complain(f"job {number} in {job.folder}; scancel {number} ends it")
    return follow(number, job.text_file, job.log_file)


def in_folder(job: SlurmJob, folder: Path) -> SlurmJob:
    """The job with its folder in place of `{}` in its command's words."""
    return replace(job, folder=folder, command=tuple(word.replace(FOLDER, str(folder)) for word in job.command))


FOLDER = "\0folder\0"  # stands in a command's words for the job's folder, which is not there yet
PART = f"requests-{INDEX}.jsonl"  # the requests of one job of an array, in the folder


def split_lines(path: Path, n: int) -> list[bytes]:
    """`n` parts of a file, of nearly as many lines. Raises UserError where it cannot be read or has fewer lines."""
    try:
        lines = [line.rstrip(b"\n") + b"\n" for line in path.open("rb") if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; --array splits the file here, where it must be readable") from None
    if len(lines) < n:
        raise UserError(f"--array {n}: {path} has {len(lines)} requests; give at most so many")
    return [b"".join(lines[len(lines) * index // n : len(lines) * (index + 1) // n]) for index in range(n)]


def next_folder(base: Path, name: str) -> Path:
    """The name of the next job's folder."""
    return next(path for path in _folders(base, name) if not os.path.exists(path))


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
    neither. Raises UserError when Slurm stops answering."""
    tails = [_Tail(text, sys.stdout), _Tail(log, sys.stderr)]
    reported, query_s, answer_s = "", float("-inf"), time.monotonic()
    state = JobState("PENDING")
    while True:
        if time.monotonic() - query_s >= ASK_S:
            query_s = time.monotonic()
            try:
                state, answer_s = state_of(number), query_s
            except UserError as error:
                if query_s - answer_s > SILENT_S:
                    raise
                if str(error) != reported:
                    reported = str(error)
                    complain(f"job {number} is not known to have ended: {reported}")
                continue
            if state.name == "PENDING" and state.reason != reported:
                reported = state.reason
                complain(f"job {number} waits: {reported or 'Slurm has not said why'}")
        for tail in tails:  # once more after its end
            tail.copy()
        if lost_output(sys.stdout):
            complain(f"job {number} goes on, and writes {text}; scancel {number} ends it")
            return 0  # what was lost makes the exit code
        if state.ended:
            break
        time.sleep(LOOK_S)
    for tail in tails:
        tail.close()
    code = state.code or (128 + state.signal if state.signal else int(state.name not in ("COMPLETED", "")))
    if code:
        complain(f"job {number} ended: {state.name.lower()}{f' ({state.reason})' if state.reason else ''}")
    return code


class _Tail:
    """Copies new content of a file, which may not be there yet."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self.path, self.stream = path, stream
        self._file: BinaryIO | None = None
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def copy(self) -> None:
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        if self._file and (new := self._file.read()):
            self.stream.write(self._decoder.decode(new))
            self.stream.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
