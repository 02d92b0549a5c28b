"""In which way the lines of a chat come: from this process's terminal, the launcher's, or a pipe. Reads none."""

import contextlib
import os
import sys
from collections.abc import Callable

from pipeinfer.cluster.watch.attempts import own_attempt
from pipeinfer.job.chat.key_lines import KeyLines
from pipeinfer.job.chat.line_input import Lines, PipedLines, TerminalLines
from pipeinfer.job.process.raw_terminal import RawTerminal, is_terminal, launcher_at_terminal
from pipeinfer.job.process.supervised import send_errors


def open_lines(leaves: Callable[[], bool], n_taken: int = 0) -> Lines:
    """Of standard input. `leaves`: whether to stop waiting for a line. `n_taken`: bytes that an earlier job has
    taken. Raises UserError where the supervisor of this job is lost."""
    if sys.stdin is None:
        return PipedLines(-1, leaves)
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalLines(leaves)
    if attempt := own_attempt():
        if attempt.sends_keys:
            send_errors()
            return KeyLines(leaves, -1, None, n_taken)
        return PipedLines(0, leaves, attempt.is_typed, n_taken)
    launcher = launcher_at_terminal()
    with contextlib.suppress(OSError):
        if launcher and is_terminal(launcher, 2):  # where lines are shown while they are edited
            terminal = os.open(f"/proc/{launcher}/fd/0", os.O_RDWR | os.O_NOCTTY)
            if "OMPI_COMM_WORLD_RANK" in os.environ:
                _write_to(terminal, launcher)
            return KeyLines(leaves, terminal, RawTerminal(terminal, launcher), n_taken)
    return PipedLines(0, leaves, bool(launcher), n_taken)


def _write_to(terminal: int, launcher: int) -> None:
    """Open MPI's launcher hands on whole lines: neither a prompt nor what is typed."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        if is_terminal(launcher, number):
            os.dup2(terminal, number)
