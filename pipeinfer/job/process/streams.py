"""Standard output and standard error that may be closed, full, or left by their reader. Knows no command.

A command writes as if all were well; what became of it is asked afterwards (`lost`), and `settle` makes it the exit
code.
"""

import errno
import io
import os
import sys
from typing import TextIO

READER_LEFT = 141  # what shells give for a command that wrote to a closed pipe


class Stream(io.TextIOWrapper):
    """A text stream that never raises because it cannot be written: `error` then says why, and the rest is dropped."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            return self._lose(error, len(text))

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error, 0)

    def _lose(self, error: OSError, n_dropped: int) -> int:
        self.error = self.error or error
        # what is buffered is written once more at the end: give it something that takes it
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return n_dropped


class Closed(io.StringIO):
    """A stream that was closed before the command began."""

    @property
    def error(self) -> OSError | None:
        return OSError(errno.EBADF, "it is closed") if self.tell() else None


def take_streams() -> bool:
    """Put such streams in the places of the interpreter's; False when standard output is closed."""
    has_output, has_error = sys.stdout is not None, sys.stderr is not None
    _fill_descriptors()
    sys.stdout = _stream(1, sys.stdout) if has_output else Closed()
    sys.stderr = _stream(2, sys.stderr) if has_error else Closed()
    return has_output


def lost(stream: TextIO) -> OSError | None:
    """Why something that was written to a stream did not arrive."""
    return getattr(stream, "error", None)


def exit_code(error: OSError) -> int:
    return READER_LEFT if error.errno == errno.EPIPE else 2


def said_of_output(error: OSError) -> int:
    """Say why standard output is not complete, unless its reader left. Returns the exit code."""
    if exit_code(error) == 2:
        print(f"pipeinfer: standard output: {error.strerror}; what was written there is not complete",
              file=sys.stderr)  # fmt: skip
    return exit_code(error)


def settle(code: int) -> int:
    """The exit code of a command that would have ended with `code`; says what was lost, where that can be said."""
    sys.stdout.flush()
    if error := lost(sys.stdout):
        said = said_of_output(error)
        code = code or said
    sys.stderr.flush()
    error = lost(sys.stderr)
    # who closed the pipe did not want to read on: that is no loss
    return code or (2 if error and error.errno != errno.EPIPE else 0)


def _fill_descriptors() -> None:
    """Open what is closed of 0, 1 and 2, or the next file that is opened would get what is written there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _stream(descriptor: int, before: TextIO) -> Stream:
    # a character that the encoding lacks ends no job
    errors = "replace" if before.errors == "strict" else before.errors
    return Stream(
        open(descriptor, "wb", closefd=False), before.encoding, errors,
        line_buffering=descriptor == 2 or bool(before.line_buffering),
    )  # fmt: skip
