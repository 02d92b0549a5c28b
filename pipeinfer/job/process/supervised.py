"""What a process knows of the supervisor that started its job, and rank 0's links to it. A lost job is started again;
each start, an attempt, marks its processes by an environment variable, which also says where the supervisor is."""

import contextlib
import hmac
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from pipeinfer.cluster.watch.protocol import SUPERVISOR, Limits
from pipeinfer.cluster.watch.rendezvous import Rendezvous, connect
from pipeinfer.errors import UserError

LOOK_EVERY_S, ENDS_S = 0.01, 5.0
NOTES, INPUT, OUTPUT, ERRORS, FRONT, EXIT = b"notes", b"input", b"output", b"errors", b"front", b"exit"
"""Kinds of links, rank 0's first message: the journal's notes; standard input, since MPICH's launcher ends a job that
reads it later than it comes, and Open MPI's passes on no end; standard output, to which launchers write too; standard
error, of which Open MPI forwards whole lines only; the messages of a service; the job's exit code."""

INTERRUPT = b"interrupt"  # on a link for notes: a chat's user has pressed Ctrl-C; launchers end a job with the second
SAME_MODEL, OTHER_MODEL = b"same", b"other"  # the supervisor's answers to the model that rank 0 names

NO_ANSWER = "the supervisor of this job does not answer; start the job anew"
OTHER_MODEL_TEXT = (
    "the model or its numerics are not those with which this job began, so what it began cannot go on; "
    "start the job anew"
)

N_PROOF = 32


@dataclass(frozen=True, slots=True)
class Attempt:
    """`job`: the same for all attempts of a supervisor. `number`: from 1; as a rank to the supervisor. `has_input`: the
    supervisor keeps the standard input; `is_typed`: a user types it; `sends_keys`: key by key. `numerics`: those of the
    first attempt, or empty; `fitted`: what --fit chose for the last one; `now_s`: the time that chat templates see,
    since 1970."""

    job: str
    number: int
    rendezvous: Rendezvous
    has_input: bool = False
    is_typed: bool = False
    sends_keys: bool = False
    numerics: str = ""
    fitted: str = ""
    now_s: float = 0.0

    def text(self) -> str:
        return json.dumps(asdict(self))


def own_attempt() -> Attempt | None:
    """This process's; None without a supervisor."""
    return _read_attempt(os.environ.get(SUPERVISOR, ""))


def _read_attempt(text: str) -> Attempt | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        fields = json.loads(text)
        where = fields.pop("rendezvous")
        return Attempt(**fields, rendezvous=Rendezvous(**where | {"addresses": tuple(where["addresses"])}))
    return None


def end_attempts(job: str, before: int) -> bool:
    """Kill the job's attempts below a number on this host, and wait for their end. False: some are left."""
    deadline = time.monotonic() + ENDS_S
    while pids := [pid for pid in _processes_of(job, before) if pid != os.getpid()]:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _processes_of(job: str, before: int) -> list[int]:
    mark, pids = f"{SUPERVISOR}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            values = (folder / "environ").read_bytes().split(b"\0")
            text = next((each[len(mark) :] for each in values if each.startswith(mark)), b"")
            attempt = _read_attempt(text.decode("utf-8", "replace")) if job.encode() in text else None
            if attempt and attempt.job == job and attempt.number < before:
                pids.append(int(folder.name))
    return pids


def connect_supervisor(kind: bytes) -> Connection | None:
    """A link of this kind; None without a supervisor. Raises UserError when it does not answer: it has ended, or has
    started another attempt."""
    if (attempt := own_attempt()) is None:
        return None
    link = connect(attempt.rendezvous, attempt.number, Limits())
    try:
        if link is None:
            raise EOFError
        link.send_bytes(kind)
    except (OSError, EOFError):
        raise UserError(NO_ANSWER) from None
    return link


def redirect(stream: TextIO, kind: bytes) -> None:
    """Send a stream to the supervisor, if there is one. Raises UserError as `connect_supervisor`."""
    if link := connect_supervisor(kind):
        stream.flush()
        os.dup2(link.fileno(), stream.fileno())
        link.close()


def tell_exit(code: int) -> None:
    """The job has done all that it is for, and ends with this exit code: losses do not matter any more. The supervisor,
    if there is one, knows it afterwards."""
    sys.stdout.flush()
    with contextlib.suppress(UserError, OSError, EOFError):
        if link := connect_supervisor(EXIT):
            with link:
                link.send_bytes(str(code).encode())
                link.poll(ENDS_S)  # an answer


def seal(data: bytes, key: str) -> bytes:
    """The data after a proof that the sender has the key."""
    return hmac.digest(key.encode(), data, "sha256") + data


def unseal(sealed: bytes, key: str) -> bytes:
    """Raises ValueError where the proof is wrong."""
    if not hmac.compare_digest(seal(sealed[N_PROOF:], key), sealed):
        raise ValueError("the sender does not have the key")
    return sealed[N_PROOF:]
