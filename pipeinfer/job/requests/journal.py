"""What has come of texts that are not complete, noted so that a later job goes on with them. Knows no engine.

A note is a line of JSON: `[key, seed]` begins a text anew, `[key, [token, …]]` is what came, `[key]` ends it. The key
names what was asked. `["numerics", name]` says with which numerics all of them were begun.
"""

import contextlib
import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from pipeinfer.cluster.watch.attempts import own_attempt
from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.process.complain import complain
from pipeinfer.job.process.limited import MAX_LENGTH
from pipeinfer.job.process.supervised import (
    INTERRUPT,
    NOTES,
    OTHER_MODEL,
    OTHER_MODEL_TEXT,
    connect_supervisor,
    send_output,
)
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.outputs import write_error

WHAT = "--resume"
NOTE = b'["'
"""What each note begins with: what begins otherwise is not this job's to cut off."""

Part: TypeAlias = str | int | Sequence[int]
ModelId: TypeAlias = tuple[str, str]  # fingerprint and numerics: what texts depend on but requests


def model_id(plan: JobPlan) -> ModelId:
    """Of texts that go on: with the numerics with which they were begun."""
    return plan.model.fingerprint, plan.text_numerics


def kept_numerics(path: Path | None) -> str:
    """The name of the numerics with which what goes on was begun: of this job under its supervisor, or of the notes in
    a file; empty where nothing goes on."""
    if path is None:
        attempt = own_attempt()
        return attempt.numerics if attempt else ""
    journal = Journal()
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        for line in file.read(MAX_LENGTH).splitlines():
            journal.take(line)
    return journal.numerics if journal.texts else ""


class Journal:
    """Notes that nobody keeps. `texts`: of each that is not complete its seed and the tokens that came."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[int, list[int]]] = {}
        self.numerics = ""

    def take(self, note: bytes) -> None:
        """Raises ValueError for what is none."""
        self._take(json.loads(note))

    def _take(self, what: Any) -> None:
        match what:
            case ["numerics", str(name)]:
                self.numerics = name
            case [str(key)]:
                self.texts.pop(key, None)
            case [str(key), int(seed)]:
                self.texts[key] = seed, []
            case [str(key), [*tokens]] if key in self.texts and all(isinstance(each, int) for each in tokens):
                self.texts[key][1].extend(tokens)
            case _:
                raise ValueError("no note")

    def notes(self) -> Iterator[bytes]:
        """Of all texts that are not complete."""
        for key, (seed, tokens) in self.texts.items():
            yield note_of(key, seed)
            yield note_of(key, tokens)

    def begin(self, key: str, asked: GenerationRequest) -> GenerationRequest:
        """The request with the seed and the output that were noted of it. The last token comes again, so that there
        is one to come; a text with log-probabilities, which are not noted, comes again as a whole."""
        seed, tokens = self.texts.get(key, (asked.sampling.seed, []))
        begun = tuple(tokens[:-1]) if asked.sampling.n_logprobs < 0 else ()
        self._note(key, seed)
        if begun:
            self._note(key, begun)
        return replace(asked, sampling=replace(asked.sampling, seed=seed), begun=begun)

    def open(self, key: str, seed: int) -> None:
        """A text of which nothing has come."""
        self._note(key, seed)

    def came(self, key: str, tokens: Sequence[int]) -> None:
        self._note(key, tokens)

    def ended(self, key: str) -> None:
        self._note(key)

    def _note(self, *what: Part) -> None:
        self._take(what)
        self.write(*what)

    def write(self, *what: Part) -> None:
        """Keep a note of it for a later job."""

    def close(self) -> None:
        """Nothing more is noted."""


def note_of(*what: Part) -> bytes:
    return json.dumps(what, separators=(",", ":")).encode()


def open_journal(path: Path | None, model: ModelId) -> Journal:
    """The supervisor's, where there is one and no file is named: of texts of this model. Raises UserError, as
    `JournalFile` and `LinkJournal` do."""
    send_output()
    link = None if path else connect_supervisor(NOTES)
    return JournalFile(path, model[1]) if path else LinkJournal(link, model) if link else Journal()


class JournalFile(Journal):
    """A file of notes that this job alone appends to. It is removed when all its texts are complete."""

    def __init__(self, path: Path, numerics: str) -> None:
        """`numerics`: the name of those of this job. Raises UserError when it cannot be written, has something else, or
        another job writes it."""
        super().__init__()
        self.path, self._is_full = path, False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(os.dup(self._fd), "rb") as file:
                notes = file.read(MAX_LENGTH + 1)
        except BlockingIOError:
            raise UserError(f"{WHAT} {path}: another job is writing it; wait for that, or name another file") from None
        except OSError as error:
            raise write_error(path, WHAT, error) from None
        if len(notes) > MAX_LENGTH:
            raise UserError(f"{WHAT} {path} is longer than {MAX_LENGTH >> 20} MiB; name another file")
        *lines, torn = notes.split(b"\n")
        self._take_all([*lines, *([] if NOTE.startswith(torn[: len(NOTE)]) else [torn])])
        if torn:
            os.ftruncate(self._fd, len(notes) - len(torn))
        self._numerics = numerics

    def _take_all(self, lines: Iterable[bytes]) -> None:
        for number, line in enumerate(lines, start=1):
            try:
                self.take(line)
            except ValueError:
                raise UserError(f"{WHAT} {self.path} line {number} is no note of a job; name another file") from None

    def write(self, *what: Part) -> None:
        if self._is_full:
            return
        notes = [note_of(*what)]
        if self.numerics != self._numerics:  # with the first text that is begun
            self.numerics = self._numerics
            notes.insert(0, note_of("numerics", self._numerics))
        try:
            os.write(self._fd, b"".join(note + b"\n" for note in notes))
        except OSError as error:
            self._is_full = True
            complain(f"{write_error(self.path, WHAT, error)}; what comes from now on is not noted")

    def close(self) -> None:
        if not self.texts:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


class LinkJournal(Journal):
    """Notes that the supervisor keeps. Where it is lost the job ends: it starts another one elsewhere."""

    def __init__(self, link: Connection, model: ModelId) -> None:
        """Raises UserError where the texts are of another model."""
        super().__init__()
        self._link = link
        link.send_bytes("-".join(model).encode())
        if link.recv_bytes() == OTHER_MODEL:
            raise UserError(OTHER_MODEL_TEXT)
        while note := link.recv_bytes():
            self.take(note)
        threading.Thread(target=self._await_end, daemon=True).start()

    def _await_end(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while self._link.recv_bytes() == INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
        if not self._link.closed:
            complain("the supervisor of this job is lost")
            os.kill(os.getpid(), signal.SIGTERM)

    def write(self, *what: Part) -> None:
        with contextlib.suppress(OSError):
            self._link.send_bytes(note_of(*what))

    def close(self) -> None:
        self._link.close()
