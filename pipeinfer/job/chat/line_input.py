"""Lines of a user: from a terminal, with editing and a history, or from a pipe. Knows no commands."""

import contextlib
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from pipeinfer.errors import UserError
from pipeinfer.job.process.signals import SIGNALS
from pipeinfer.job.process.streams import MAX_LENGTH

POLL_S = 0.1
READ_BYTES = 1 << 16
PASTE_S = 0.05
"""How long the rest of a pasted text may take to arrive."""


class Lines(Protocol):
    @property
    def n_read(self) -> int:
        """Bytes of standard input up to here, if they may come again."""
        ...

    def read(self, prompt: str) -> str | None:
        """The next line, without its end; None at the end of input. Raises UserError, and KeyboardInterrupt on a
        Ctrl-C."""
        ...

    def next_is(self, word: str) -> bool:
        """Whether the next line is `word`; if so it is removed. Does not wait."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


class TerminalLines:
    """Lines of this process's terminal, edited by readline."""

    n_read = 0

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

    def next_is(self, word: str) -> bool:
        return False  # what is typed ahead is readline's; a terminal has Ctrl-C

    def close(self) -> None:
        pass


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class PipedLines:
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

    def close(self) -> None:
        pass

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
