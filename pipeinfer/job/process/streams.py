"""Standard output and standard error that may be closed, full, or left by their reader; input that may have no end; and
a terminal whose keys come as they are typed, Ctrl-C too, to a process that may have none of its own. Knows no lines.

A command writes without a look at errors; `lost_output` says afterwards what was lost, and `final_code` makes that the
exit code. A *guard*, a process in a session of its own, which no launcher kills, sets the terminal so that Ctrl-C and
Ctrl-Z are keys like others, and sets it back whatever ends.
"""

import contextlib
import errno
import io
import os
import select
import signal
import stat
import subprocess
import sys
import termios
from typing import IO, Any, AnyStr, TextIO

from pipeinfer.child import python_command
from pipeinfer.errors import UserError
from pipeinfer.launchers import forwarding_launcher, launcher_at_terminal, process_stat

READER_LEFT = 141  # the exit code that shells give a command that wrote to a closed pipe
MAX_LENGTH = 1 << 26  # bytes or characters: more than the longest contexts hold, and little enough for a host's memory


def complain(message: str) -> None:
    """Write a line about a fault or a warning to standard error. Rank 0 only."""
    print(f"pipeinfer: {message}", file=sys.stderr)


def read_limited(file: IO[AnyStr], name: str, limit: int = MAX_LENGTH) -> AnyStr:
    """All of an open file. Raises UserError, which calls the file `name`, when that is more than `limit`; OSError."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{name} is longer than {limit >> 20} MiB, the limit; give a shorter one")
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a descriptor that may take less at a time. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]


class Stream(io.TextIOWrapper):
    """A text stream that never raises because it cannot be written: `error` then says why, and the rest is dropped."""

    error: OSError | None = None
    has_text = False

    def write(self, text: str) -> int:
        self.has_text = True
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
        # the buffer is written once more at the end: give it a file that takes it
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return n_dropped


class ClosedStream(io.StringIO):
    """A stream that was closed before the command began."""

    @property
    def error(self) -> OSError | None:
        return OSError(errno.EBADF, "it is closed") if self.tell() else None


def take_streams() -> bool:
    """Replace the interpreter's streams by these; False when standard output is closed."""
    has_output, has_error = sys.stdout is not None, sys.stderr is not None
    _fill_descriptors()
    if _is_forwarded():
        _write_to_terminal()
    sys.stdout = _stream(1, sys.stdout) if has_output else ClosedStream()
    sys.stderr = _stream(2, sys.stderr) if has_error else ClosedStream()
    return has_output


def lost_output(stream: TextIO) -> OSError | None:
    """The error because of which output to a stream was lost, if any was."""
    return getattr(stream, "error", None)


def exit_code(error: OSError) -> int:
    return READER_LEFT if error.errno == errno.EPIPE else 2


def report_lost_output(error: OSError) -> int:
    """Print why standard output is not complete, unless its reader left. Returns the exit code."""
    if exit_code(error) == 2:
        complain(f"standard output: {error.strerror}; what was written there is not complete")
    return exit_code(error)


def final_code(code: int) -> int:
    """The exit code of a command that would have ended with `code`; prints what was lost, where that is possible."""
    sys.stdout.flush()
    if error := lost_output(sys.stdout):
        output_code = report_lost_output(error)
        code = code or output_code
    elif getattr(sys.stdout, "has_text", False) and _has_no_room():
        complain("standard output: its disk is full; what was written there may not be complete")
        code = code or 2
    sys.stderr.flush()
    error = lost_output(sys.stderr)
    # a reader that closed the pipe lost nothing
    return code or (2 if error and error.errno != errno.EPIPE else 0)


def _fill_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, or the next file that is opened would take their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _is_forwarded() -> bool:
    """Whether this is rank 0 of Open MPI, whose launcher passes on what it writes."""
    return os.environ.get("OMPI_COMM_WORLD_RANK") == "0"


def _write_to_terminal() -> None:
    """Open MPI's launcher passes on whole lines, and none after a signal: write to its terminal instead. Its own pipes
    stay open: a rank that has closed its output gets no input."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if launcher := launcher_at_terminal(number):
                terminal = os.open(f"/proc/{launcher}/fd/{number}", os.O_WRONLY | os.O_NOCTTY)
                os.dup(number)
                os.dup2(terminal, number)
                os.close(terminal)


def _has_no_room() -> bool:
    """Whether the disk is full to which Open MPI's launcher writes for this job: it tells nobody."""
    if _is_forwarded() and (launcher := forwarding_launcher()):
        with contextlib.suppress(OSError):
            path = f"/proc/{launcher}/fd/1"
            mode = os.stat(path).st_mode
            return os.path.samefile(path, "/dev/full") or (stat.S_ISREG(mode) and not os.statvfs(path).f_bavail)
    return False


def _stream(descriptor: int, before: TextIO) -> Stream:
    # a character that the encoding lacks ends no job
    errors = "replace" if before.errors == "strict" else before.errors
    by_line = descriptor == 2 or bool(before.line_buffering)
    return Stream(open(descriptor, "wb", closefd=False), before.encoding, errors, line_buffering=by_line)


STARTS_S, ENDS_S = 5.0, 2.0  # how long the guard may take to start, and to end
GUARD = "from pipeinfer.job.process.streams import guard; guard(int(sys.argv[1]), int(sys.argv[2]))"
SUSPEND = b"s"  # a message to the guard's standard input for a Ctrl-Z; its end: the other process has ended
LOOK_S = 0.1  # between the guard's looks at the terminal
LFLAG, CC = 3, 6  # indices of what tcgetattr returns
OFF = b"\0"


class RawTerminal:
    """From creation on until `close`, or until this process ends in any way."""

    def __init__(self, terminal: int, reader: int) -> None:
        """`reader`: the process that reads the terminal and forwards what it reads. Raises OSError."""
        self._guard = subprocess.Popen(
            python_command(GUARD, terminal, reader),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[terminal],
            start_new_session=True,
            cwd="/",
        )
        keys = b""
        if self._guard.stdout and select.select([self._guard.stdout], [], [], STARTS_S)[0]:
            keys = os.read(self._guard.stdout.fileno(), 2)
        self._interrupt, self._suspend = (keys[:1], keys[1:]) if len(keys) == 2 else (b"", b"")

    def act(self, keys: bytes) -> bytes:
        """Do what Ctrl-C and Ctrl-Z mean; returns the other keys."""
        for key in (self._interrupt, self._suspend):
            if not key.strip(b"\0") or key not in keys:
                continue
            keys = keys.replace(key, b"")
            if key == self._interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            elif self._guard.stdin:
                with contextlib.suppress(OSError):
                    os.write(self._guard.stdin.fileno(), SUSPEND)
        return keys

    def close(self) -> None:
        """Returns when the terminal is as before."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._guard.stdin:
                self._guard.stdin.close()
            self._guard.wait(ENDS_S)


def guard(terminal: int, reader: int) -> None:
    """The guard's program, until its standard input ends. `reader`: the process that reads the terminal. The keys of
    Ctrl-C and Ctrl-Z are written to standard output once the terminal is set."""
    with contextlib.suppress(termios.error):  # the terminal is gone
        _guard(terminal, reader)


def _guard(terminal: int, reader: int) -> None:
    before, ours, is_set = termios.tcgetattr(terminal), None, False
    while True:
        # a shell sets the terminal when the job is suspended, and again when it goes on
        if (now := termios.tcgetattr(terminal)) != ours and _has_terminal(reader):
            if now[LFLAG] & termios.ICANON:  # else only a part of ours was changed
                before = now
            termios.tcsetattr(terminal, termios.TCSANOW, _all_keys(now))
            ours = termios.tcgetattr(terminal)
        if not is_set:
            is_set = True
            with contextlib.suppress(OSError):  # the process that started this one is gone: standard input ends too
                os.write(1, b"".join(before[CC][key] for key in (termios.VINTR, termios.VSUSP)))
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        message = os.read(0, 1)
        if message and not _can_go_on(reader):
            continue
        if termios.tcgetattr(terminal) == ours:  # else a shell has it already
            termios.tcsetattr(terminal, termios.TCSANOW, before)
        if not message:
            return
        # its ranks go on: with SIGTSTP Open MPI's launcher would stop them, and not itself
        with contextlib.suppress(OSError):
            os.killpg(os.getpgid(reader), signal.SIGSTOP)


def _all_keys(attributes: list[Any]) -> list[Any]:
    keys = [*attributes]
    keys[LFLAG] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)  # ISIG stays: Ctrl-\ kills
    keys[CC] = [*attributes[CC]]
    for number, value in ((termios.VINTR, OFF), (termios.VSUSP, OFF), (termios.VMIN, 1), (termios.VTIME, 0)):
        keys[CC][number] = value
    return keys


def _can_go_on(pid: int) -> bool:
    """Whether a process is a shell's job: only a shell continues it once it is suspended."""
    with contextlib.suppress(OSError):
        return os.getpgid(pid) != os.getsid(pid)
    return False


def _has_terminal(pid: int) -> bool:
    """Whether a process runs, and in the foreground of its terminal if it has one."""
    state, _, group, _, _, foreground, *_ = process_stat(pid) or ["X"] * 6
    return state not in "TZX" and foreground in (group, "-1")
