"""A supervised job is started again when it is lost. Each start, an attempt, marks its processes by an environment
variable, which also says where rank 0 finds the supervisor. Standard library alone."""

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeinfer.cluster.watch.rendezvous import Rendezvous

VARIABLE = "PIPEINFER_SUPERVISOR"
LOOK_EVERY_S, ENDS_S = 0.01, 5.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """`job`: the same for all attempts of a supervisor. `number`: which of them, which rank 0 tells it as its rank.
    `is_typed`: standard input is what a user types; `sends_keys`: key by key. `numerics`: the name of those of the
    first one; empty where none has come so far."""

    job: str
    number: int
    rendezvous: Rendezvous
    is_typed: bool = False
    sends_keys: bool = False
    numerics: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))


def own_attempt() -> Attempt | None:
    """Of this process; None where nobody supervises it."""
    return _attempt_in(os.environ.get(VARIABLE, ""))


def _attempt_in(text: str) -> Attempt | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        said = json.loads(text)
        where = said.pop("rendezvous")
        return Attempt(**said, rendezvous=Rendezvous(**where | {"addresses": tuple(where["addresses"])}))
    return None


def end_attempts(job: str, before: int) -> bool:
    """Kill the processes of this job's attempts below a number on this host, and wait for their end. False if some are
    left."""
    deadline = time.monotonic() + ENDS_S
    while found := [pid for pid in _of_job(job, before) if pid != os.getpid()]:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def _of_job(job: str, before: int) -> list[int]:
    mark, found = f"{VARIABLE}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            values = (folder / "environ").read_bytes().split(b"\0")
            text = next((each[len(mark) :] for each in values if each.startswith(mark)), b"")
            attempt = _attempt_in(text.decode("utf-8", "replace")) if job.encode() in text else None
            if attempt and attempt.job == job and attempt.number < before:
                found.append(int(folder.name))
    return found
