"""Rank 0's link to the supervisor above the job, if there is one. Knows no command."""

import hmac
import os
import sys
from multiprocessing.connection import Connection
from typing import TextIO

from pipeinfer.cluster.watch.attempts import own_attempt
from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.cluster.watch.rendezvous import connect
from pipeinfer.errors import UserError

NOTES, OUTPUT, ERRORS, FRONT = b"notes", b"output", b"errors", b"front"
"""What rank 0 says first of a link: that it has notes of what comes, or is standard output, to which launchers write
too, or standard error, of which Open MPI's hands on whole lines, or leads to who speaks with a service's clients."""

INTERRUPT = b"interrupt"
"""What the supervisor says where notes go: a chat's user has pressed Ctrl-C. Launchers end a job with the second."""

SAME_MODEL, OTHER_MODEL = b"same", b"other"
"""What the supervisor answers to rank 0, which says what model it has."""

OTHER_MODEL_TEXT = ("the model or its numerics are not those with which this job began, so what it began cannot go on; "
                    "start the job anew")  # fmt: skip

N_PROOF = 32


def seal(data: bytes, key: str) -> bytes:
    """With a proof that who says it has the key."""
    return hmac.digest(key.encode(), data, "sha256") + data


def unseal(sealed: bytes, key: str) -> bytes:
    """Raises ValueError where the proof is wrong."""
    if not hmac.compare_digest(seal(sealed[N_PROOF:], key), sealed):
        raise ValueError("who says this does not have the key")
    return sealed[N_PROOF:]


def send_output() -> None:
    """To the supervisor, where there is one. Raises UserError as `connect_supervisor`."""
    _send(OUTPUT, sys.stdout)


def send_errors() -> None:
    """The same for standard error."""
    _send(ERRORS, sys.stderr)


def _send(kind: bytes, stream: TextIO) -> None:
    if link := connect_supervisor(kind):
        stream.flush()
        os.dup2(link.fileno(), stream.fileno())
        link.close()


def connect_supervisor(kind: bytes) -> Connection | None:
    """None where there is none. Raises UserError when it does not answer: it has ended, or has started another job."""
    if (attempt := own_attempt()) is None:
        return None
    link = connect(attempt.rendezvous, attempt.number, Limits())
    try:
        if link is None:
            raise EOFError
        link.send_bytes(kind)
    except (OSError, EOFError):
        raise UserError("the supervisor of this job does not answer; start the job anew") from None
    return link
