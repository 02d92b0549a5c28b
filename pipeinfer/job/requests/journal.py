"""Notes of the output of incomplete texts, from which a later job goes on. Knows no engine.

A note is a line of JSON: `[key, seed]` begins a text anew, `[key, [token, …]]` adds output, `[key]` ends it. The key
names the request. `["numerics", name]` names the numerics with which all of them were begun, `["fitted", text]` is what
--fit chose, `["time", seconds]` is the time that chat templates see.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.streams import MAX_LENGTH, complain
from pipeinfer.job.process.supervised import (
    INTERRUPT,
    NO_ANSWER,
    NOTES,
    OTHER_MODEL,
    OTHER_MODEL_TEXT,
    OUTPUT,
    connect_supervisor,
    own_attempt,
    redirect,
)
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.outputs import is_stream, write_error

WHAT = "--resume"
NOTE = b'["'  # the beginning of each note: a last line that begins otherwise is not of this job, and is not cut off
Part: TypeAlias = str | int | Sequence[int]
SETTINGS = ("numerics", "fitted", "time")


class ModelId(NamedTuple):
    """All that texts depend on beside their requests, and what --fit chose, see `JobPlan`."""

    fingerprint: str
    numerics: str
    fitted: str = ""


def model_id(plan: JobPlan) -> ModelId:
    return ModelId(plan.model.fingerprint, plan.text_numerics, plan.fitted)


def kept_settings(path: Path | None) -> dict[str, Any]:
    """Of texts that go on, by supervisor or notes: the name of their numerics, `resumed`, and what --fit chose,
    `fitted`, empty where none goes on; the time that chat templates see, `now_s`, in seconds since 1970."""
    if path is None:
        if attempt := own_attempt():
            return {"resumed": attempt.numerics, "fitted": attempt.fitted, "now_s": attempt.now_s}
        return {"now_s": time.time()}
    journal = Journal()
    if os.path.isfile(path):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            for line in _lines(file):
                journal.take(line)
    settings = journal.settings if journal.texts else {}
    now_s = float(settings.get("time") or time.time())
    return {"resumed": settings.get("numerics", ""), "fitted": settings.get("fitted", ""), "now_s": now_s}


def open_journal(path: Path | None, model: ModelId, now_s: float) -> "Journal":
    """The file's; without one the supervisor's, if there is one. `now_s`: the time that chat templates see. Raises
    UserError as `JournalFile`, `LinkJournal`."""
    redirect(sys.stdout, OUTPUT)
    if path is None:
        link = connect_supervisor(NOTES)
        return LinkJournal(link, model) if link else Journal()
    return JournalFile(path, {"numerics": model.numerics, "fitted": model.fitted, "time": repr(now_s)})


class Journal:
    """Notes in memory alone. `texts`: the seed and the tokens of each incomplete text; `settings`: of all of them."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[int, list[int]]] = {}
        self.settings: dict[str, str] = {}

    def take(self, note: bytes) -> None:
        """Apply a note. Raises ValueError if it is none."""
        self._take(json.loads(note))

    def _take(self, parts: Any) -> None:
        match parts:
            case [str(name), str(value)] if name in SETTINGS:
                if name == "time":
                    float(value)  # raises ValueError
                self.settings[name] = value
            case [str(key)]:
                self.texts.pop(key, None)
            case [str(key), int(seed)]:
                self.texts[key] = seed, []
            case [str(key), [*tokens]] if key in self.texts and all(isinstance(each, int) for each in tokens):
                self.texts[key][1].extend(tokens)
            case _:
                raise ValueError("no note")

    def notes(self) -> Iterator[bytes]:
        """Notes of all incomplete texts."""
        for key, (seed, tokens) in self.texts.items():
            yield note_of(key, seed)
            yield note_of(key, tokens)

    def begin(self, key: str, request: GenerationRequest) -> GenerationRequest:
        """The request with its noted seed, and its noted output but for the last token; none with log-probabilities."""
        seed, tokens = self.texts.get(key, (request.sampling.seed, []))
        output = tuple(tokens[:-1]) if request.sampling.n_logprobs < 0 else ()
        self._note(key, seed)
        if output:
            self._note(key, output)
        return replace(request, sampling=replace(request.sampling, seed=seed), begun=output)

    def open(self, key: str, seed: int) -> None:
        """Note that a text begins, without output."""
        self._note(key, seed)

    def add_output(self, key: str, tokens: Sequence[int]) -> None:
        """Note further output of a text."""
        self._note(key, tokens)

    def end(self, key: str) -> None:
        """Note that a text is complete."""
        self._note(key)

    def _note(self, *parts: Part) -> None:
        self._take(parts)
        self.write(*parts)

    def write(self, *parts: Part) -> None:
        """Keep a note for a later job."""

    def close(self) -> None:
        """No note follows."""


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Those of a file of any length, with their ends. One without an end is its last, or too long for a note."""
    while line := file.readline(MAX_LENGTH):
        yield line


def note_of(*parts: Part) -> bytes:
    return json.dumps(parts, separators=(",", ":")).encode()


def open_alone(path: Path, what: str) -> int:
    """The descriptor of a file to which this job alone appends. `what`: the option that names it. Raises UserError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(path, what, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{what} {path}: another job is writing it; wait for that, or name another file") from None
    except OSError:
        pass  # some network file systems have no locks
    return descriptor


class JournalFile(Journal):
    """A file of notes to which this job alone appends. It is removed when all its texts are complete."""

    def __init__(self, path: Path, settings: Mapping[str, str]) -> None:
        """`settings`: this job's. Raises UserError for a file of other content, or of another job."""
        super().__init__()
        self.path, self._job_settings, self._is_full = path, settings, False
        if is_stream(path):
            raise UserError(f"{WHAT} {path} is no file; the notes are for the next job, which has to read them")
        self._fd = open_alone(path, WHAT)
        try:
            with open(os.dup(self._fd), "rb") as file:
                self._read(file)
        except OSError as error:
            raise write_error(path, WHAT, error) from None

    def _read(self, file: IO[bytes]) -> None:
        """Take the notes, and cut off a last one that an interruption has torn. Raises UserError, OSError."""
        n_whole = 0
        for number, line in enumerate(_lines(file), start=1):
            if not line.endswith(b"\n") and len(line) < MAX_LENGTH and NOTE.startswith(line[: len(NOTE)]):
                os.ftruncate(self._fd, n_whole)
                return
            n_whole += len(line)
            try:
                self.take(line)
            except ValueError:
                raise UserError(f"{WHAT} {self.path} line {number} is no note of a job; name another file") from None

    def write(self, *parts: Part) -> None:
        if self._is_full:
            return
        new = [pair for pair in self._job_settings.items() if self.settings.get(pair[0], "") != pair[1]]
        self.settings |= new  # with the first text that begins
        lines = b"".join(note_of(*note) + b"\n" for note in (*new, parts))
        try:
            if os.write(self._fd, lines) < len(lines):  # the rest has no room: a note behind it could not be read
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._is_full = True
            complain(f"{write_error(self.path, WHAT, error)}; output is not noted from now on")

    def close(self) -> None:
        if not self.texts:
            with contextlib.suppress(OSError):  # its folder may be read-only
                self.path.unlink()
        os.close(self._fd)


class LinkJournal(Journal):
    """Notes that the supervisor keeps. If it is lost the job ends, since it starts another one elsewhere."""

    def __init__(self, link: Connection, model: ModelId) -> None:
        """Raises UserError where the texts are of another model, or the supervisor has ended."""
        super().__init__()
        self._link = link
        try:
            link.send_bytes(f"{model.fingerprint}-{model.numerics}\n{model.fitted}".encode())
            if link.recv_bytes() == OTHER_MODEL:
                raise UserError(OTHER_MODEL_TEXT)
            while note := link.recv_bytes():
                self.take(note)
        except (OSError, EOFError):
            raise UserError(NO_ANSWER) from None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while self._link.recv_bytes() == INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
        if not self._link.closed:
            complain("the supervisor of this job is lost")
            os.kill(os.getpid(), signal.SIGTERM)

    def write(self, *parts: Part) -> None:
        with contextlib.suppress(OSError):
            self._link.send_bytes(note_of(*parts))

    def close(self) -> None:
        self._link.close()
