"""The results of a batch, a JSON object a line, each appended as a whole when it is there. Knows no requests."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.process.complain import complain
from pipeinfer.observe.texts.json_text import json_text
from pipeinfer.outputs import write_error

WHAT = "--output"
BEGINNING = b'{"id": "'
"""Of each line: what begins otherwise is not this job's to cut off."""


class BatchOutput:
    """An open file that this job alone appends to."""

    def __init__(self, path: Path) -> None:
        """Raises UserError when it cannot be written, is no file, or another job writes it."""
        self.path = path
        self._was_there = path.exists()
        self._n_whole, self._n_torn = 0, 0  # bytes that stay, and of what an interruption left behind them
        self._lacks_newline = False
        try:
            if self._was_there and not stat.S_ISREG(path.stat().st_mode):
                raise UserError(f"{WHAT} {path} is no file; results are added to a file, so that a job can be resumed")
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_error(path, WHAT, error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise UserError(f"{WHAT} {path}: another job is writing it; wait for that, or name another file") from None
        except OSError:
            pass  # some network file systems have no locks

    def ids(self) -> Iterator[tuple[int, str]]:
        """(line, id) of each result. What an interruption left of the last one is passed over, a result that lacks its
        newline alone is none of that. Leaves the file as it is.

        Raises UserError for a line that is no result.
        """
        self._n_whole, self._n_torn, self._lacks_newline = 0, 0, False
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, line in enumerate(file, start=1):
                id = _id_in(line)
                self._lacks_newline = not line.endswith(b"\n")
                written = line.rstrip(b"\0")  # a power cut may leave a file longer than what was written
                if id is None and self._lacks_newline and BEGINNING.startswith(written[: len(BEGINNING)]):
                    self._n_torn, self._lacks_newline = len(line), False
                    return
                if id is None:
                    raise UserError(f"{WHAT} {self.path} line {number} is no result of a batch; name another file, or "
                                    "remove the line")  # fmt: skip
                self._n_whole += len(line)
                yield number, id

    def go_on(self) -> None:
        """Make the file end with a whole line, before a result is added. Raises UserError when there is no room."""
        if self._n_torn:
            complain(f"{self.path}: what stands behind the last whole line, {self._n_torn} bytes, is cut off")
            os.ftruncate(self._fd, self._n_whole)
        elif self._lacks_newline:
            self._append(b"\n")
        self._n_torn, self._lacks_newline = 0, False

    def write(self, result: dict[str, Any]) -> None:
        """Append one result, whose first field is its id. Raises UserError when there is no room."""
        self._append(f"{json_text(result)}\n".encode())

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise write_error(self.path, WHAT, error) from None

    def close(self) -> None:
        """A file that was made for nothing does not stay."""
        if not self._was_there and not os.fstat(self._fd).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _id_in(line: bytes) -> str | None:
    """None if it is no whole result."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict) and isinstance(found.get("id"), str):
            return str(found["id"])
    return None
