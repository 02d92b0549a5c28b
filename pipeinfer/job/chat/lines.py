"""Lines of a user: from this process's terminal or the launcher's, with editing and a history, or from a pipe. readline
needs a terminal: for another process's it gets a pseudo-terminal, whose keys are fed to it while a line is read, and
whose output goes to standard error. Knows no commands."""

import codecs
import contextlib
import fcntl
import importlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipeinfer.errors import UserError
from pipeinfer.job.process.signals import SIGNALS
from pipeinfer.job.process.stdin import end_input
from pipeinfer.job.process.streams import MAX_LENGTH, RawTerminal, write_all
from pipeinfer.job.process.supervised import ERRORS, own_attempt, redirect
from pipeinfer.launchers import is_terminal, launcher_at_terminal

POLL_S = 0.1
READ_BYTES = 1 << 16
PASTE_S = 0.05  # how long the rest of a pasted text may take to arrive
ALL_SHOWN = b"\0"  # is written after readline's output, to mark its end
LEAVES = b"\x15\x04"  # the keys that clear the line and end the input
BEGINS_S, ENDS_S = 0.5, 1.0  # how long readline may take to start a line, and to end one
LOOK_S = 0.005
N_SIZE_BYTES = 8
ENDS = re.compile(rb"\x1b\[20[01]~|[\r\n]")
PASTE, PASTE_END = b"\x1b[200~", b"\x1b[201~"


class Lines:
    @property
    def n_read(self) -> int:
        """Bytes of standard input up to here, if they may come again."""
        return 0

    def read(self, prompt: str) -> str | None:
        """The next line without its end; None: no more. Raises UserError, and KeyboardInterrupt on a Ctrl-C."""
        raise NotImplementedError

    def next_is(self, word: str) -> bool:
        """Whether the next line is `word`; if so it is removed. Does not wait."""
        return False  # what is typed ahead is readline's; a terminal has Ctrl-C

    def close(self) -> None:
        """Restore the terminal."""


class TerminalLines(Lines):
    """Lines of this process's terminal, edited by readline."""

    def __init__(self, leaves: Callable[[], bool]) -> None:
        self._leaves = leaves
        with contextlib.suppress(ImportError):
            readline = importlib.import_module("readline")  # from now on `input` has it
            readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted are one text

    def read(self, prompt: str) -> str | None:
        before = {number: signal.signal(number, _raise) for number in SIGNALS}
        is_read = threading.Event()
        threading.Thread(target=self._interrupt, args=(threading.get_ident(), is_read), daemon=True).start()
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)  # the shell's prompt begins on a line of its own
            return None
        finally:
            is_read.set()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, reader: int, is_read: threading.Event) -> None:
        """Repeat the signal: readline misses one that comes just before it waits."""
        while not is_read.wait(POLL_S):
            if self._leaves():
                signal.pthread_kill(reader, signal.SIGINT)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class PipedLines(Lines):
    """Lines of a descriptor, -1 for none: a file, a pipe, or a launcher that passes on its terminal. `joins`: lines
    that arrive together are one text, unless the first is a command. `n_taken`: bytes to skip."""

    def __init__(self, descriptor: int, leaves: Callable[[], bool], joins: bool = False, n_taken: int = 0) -> None:
        self._descriptor, self._leaves, self._joins = descriptor, leaves, joins
        self._n_taken, self._n_arrived = n_taken, 0
        self._data, self._ended, self._error = b"", descriptor < 0, ""
        self._polled_s = 0.0

    @property
    def n_read(self) -> int:
        return max(self._n_taken, self._n_arrived - len(self._data))

    def read(self, prompt: str) -> str | None:
        sys.stderr.write(prompt)  # standard output is for answers
        sys.stderr.flush()
        while b"\n" not in self._data and not self._ended:
            if self._leaves():
                return None
            self._fill(POLL_S)
            if len(self._data) > MAX_LENGTH:
                raise UserError(f"a line is longer than {MAX_LENGTH >> 20} MiB, the limit for prompts; give less")
        if self._error:
            raise UserError(self._error)
        if not self.n_read:
            self._data = self._data.removeprefix(codecs.BOM_UTF8)
        if not self._data:
            return None
        if self._joins and not self._data.startswith(b"/"):
            self._fill(PASTE_S)
            end = len(self._data) if self._ended else self._data.rfind(b"\n") + 1  # the rest may be half a character
            lines, self._data = self._data[:end], self._data[end:]
            return _text_of(lines).replace("\r\n", "\n").rstrip("\n")
        line, _, self._data = self._data.partition(b"\n")
        return _text_of(line).removesuffix("\r")

    def next_is(self, word: str) -> bool:
        now_s = time.monotonic()
        if now_s - self._polled_s >= POLL_S:
            self._polled_s = now_s
            self._fill(0.0)
        line, end, rest = self._data.partition(b"\n")
        if not end or line.strip() != word.encode():
            return False
        self._data = rest
        return True

    def _fill(self, timeout_s: float) -> None:
        if self._ended or len(self._data) > MAX_LENGTH or not select.select([self._descriptor], [], [], timeout_s)[0]:
            return
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except OSError as error:
            data, self._error = b"", f"standard input cannot be read: {error.strerror}; give what to say there"
        self._ended = not data
        self._data += data[max(0, self._n_taken - self._n_arrived) :]
        self._n_arrived += len(data)


def _text_of(line: bytes) -> str:
    """Raises UserError for bytes that are not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{line[error.start]:02x}"
        raise UserError(f"a line of standard input is not UTF-8 text ({byte}); write it in UTF-8") from None


def end_of_line(keys: bytes) -> int:
    """The offset behind the first line; -1 if it has not ended. A pasted text of several lines is one line."""
    is_pasted = False
    for match in ENDS.finditer(keys):
        if match[0] in (PASTE, PASTE_END):
            is_pasted = match[0] == PASTE
        elif not is_pasted:
            return match.end()
    return -1


class KeyLines(TerminalLines):
    """Lines of another process's terminal, edited by readline here. `terminal`: its descriptor, -1 if it is on another
    host. `raw`: has set it, and acts on Ctrl-C and Ctrl-Z. `n_taken`: bytes of standard input to skip."""

    def __init__(self, leaves: Callable[[], bool], terminal: int, raw: RawTerminal | None, n_taken: int) -> None:
        self._n_read = n_taken
        self._terminal, self._raw = terminal, raw
        self._buffer, self._has_ended, self._arrival = b"", False, threading.Condition()
        self._shown = threading.Event()
        self._keys, (self._feeds, self._edits) = os.dup(0), os.openpty()
        attributes = termios.tcgetattr(self._edits)
        attributes[0] &= ~termios.IXON  # that is up to the user's terminal
        termios.tcsetattr(self._edits, termios.TCSANOW, attributes)
        self._fit()
        with self._in_place():
            super().__init__(leaves)
        threading.Thread(target=self._hold, daemon=True).start()
        threading.Thread(target=self._show, daemon=True).start()

    @property
    def n_read(self) -> int:
        return self._n_read

    def read(self, prompt: str) -> str | None:
        is_read = threading.Event()
        feeding = threading.Thread(target=self._feed, args=(threading.get_ident(), is_read), daemon=True)
        self._fit()
        try:
            with self._in_place():
                feeding.start()
                return super().read(prompt)
        finally:
            is_read.set()
            os.write(self._edits, ALL_SHOWN)
            self._shown.wait(ENDS_S)
            self._shown.clear()
            feeding.join(ENDS_S)

    def next_is(self, word: str) -> bool:
        with self._arrival:
            end = end_of_line(self._buffer)
            if end < 0 or self._buffer[:end].strip() != word.encode():
                return False
            self._take(end)
        return True

    def close(self) -> None:
        if self._raw:
            self._raw.close()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Standard input and output are the pseudo-terminal within the block, so that `input` uses readline."""
        sys.stdout.flush()
        before = os.dup(0), os.dup(1)
        try:
            os.dup2(self._edits, 0)
            os.dup2(self._edits, 1)
            yield
        finally:
            sys.stdout.flush()
            for number, each in enumerate(before):
                os.dup2(each, number)
                os.close(each)

    def _hold(self) -> None:
        n_over = self._n_read
        while not self._has_ended:
            try:
                data = os.read(self._keys, READ_BYTES)
            except OSError:
                data = b""
            new, n_over = data[n_over:], max(0, n_over - len(data))
            new = self._raw.act(new) if self._raw else new
            with self._arrival:
                self._has_ended = not data
                if len(self._buffer) < MAX_LENGTH:
                    self._buffer += new
                self._arrival.notify_all()

    def _take(self, n: int) -> bytes:
        keys, self._buffer = self._buffer[:n], self._buffer[n:]
        self._n_read += n
        return keys

    def _feed(self, reader: int, is_read: threading.Event) -> None:
        """Feed keys to readline, up to the end of a line."""
        deadline = time.monotonic() + BEGINS_S
        while not self._is_editing() and not is_read.is_set() and time.monotonic() < deadline:
            time.sleep(LOOK_S)  # until then keys would be shown twice
        line = b""
        while not is_read.is_set():
            with self._arrival:
                self._arrival.wait_for(lambda: self._buffer or self._has_ended, POLL_S)
                end = end_of_line(line + self._buffer)
                keys = self._take(len(self._buffer) if end < 0 else end - len(line))
            if self._fit():
                signal.pthread_kill(reader, signal.SIGWINCH)
            if keys:
                _write(self._feeds, keys)
                line += keys
            elif self._has_ended:
                _write(self._feeds, LEAVES)
            if end >= 0 or (self._has_ended and not keys):
                is_read.wait(ENDS_S)  # if readline goes on, that key did not end the line
                line = b""

    def _is_editing(self) -> bool:
        return not termios.tcgetattr(self._edits)[3] & termios.ICANON

    def _show(self) -> None:
        while data := os.read(self._feeds, READ_BYTES):
            _write(2, data.replace(ALL_SHOWN, b""))
            if ALL_SHOWN in data:
                self._shown.set()

    def _fit(self) -> bool:
        """Set the terminal's size. Returns whether it has changed."""
        if self._terminal < 0:
            return False
        with contextlib.suppress(OSError):
            size, before = (
                fcntl.ioctl(each, termios.TIOCGWINSZ, bytes(N_SIZE_BYTES)) for each in (self._terminal, self._edits)
            )
            fcntl.ioctl(self._edits, termios.TIOCSWINSZ, size)
            return size != before
        return False


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        write_all(descriptor, data)


def open_lines(leaves: Callable[[], bool], n_taken: int = 0) -> Lines:
    """The lines of standard input: from this process's terminal, the launcher's, or a pipe. `leaves`: whether to stop
    waiting for a line. `n_taken`: bytes that an earlier job has read. Raises UserError if the supervisor is lost."""
    if sys.stdin is None:
        return PipedLines(-1, leaves)
    launcher = launcher_at_terminal()
    if sys.stdin.isatty() and sys.stdout.isatty() and not launcher:
        return TerminalLines(leaves)
    attempt = own_attempt()
    if attempt and attempt.sends_keys:
        redirect(sys.stderr, ERRORS)
        return KeyLines(leaves, -1, None, n_taken)
    with contextlib.suppress(OSError):
        if launcher and not attempt and is_terminal(launcher, 2):  # where lines are shown while they are edited
            terminal = os.open(f"/proc/{launcher}/fd/0", os.O_RDWR | os.O_NOCTTY)
            return KeyLines(leaves, terminal, RawTerminal(terminal, launcher), n_taken)
    end_input(is_whole=False)
    return PipedLines(0, leaves, attempt.is_typed if attempt else bool(launcher), n_taken)
