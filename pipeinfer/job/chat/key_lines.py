"""What a user types at another process's terminal, key by key: edited as at one of this process's. Knows no commands.

readline wants a terminal, so it gets a pseudo-terminal: keys are fed to it while a line is read, and what it shows goes
to standard error.
"""

import contextlib
import fcntl
import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeinfer.job.chat.line_input import POLL_S, READ_BYTES, TerminalLines
from pipeinfer.job.process.limited import MAX_LENGTH
from pipeinfer.job.process.raw_terminal import RawTerminal

ALL_SHOWN = b"\0"
"""Written behind what readline shows, which has none."""

LEAVES = b"\x15\x04"
"""The keys for an empty line, and for its end as that of the input."""

BEGINS_S, ENDS_S = 0.5, 1.0
"""How long readline may take to begin with a line, and to end with one."""

LOOK_S = 0.005
N_SIZE_BYTES = 8
ENDS = re.compile(rb"\x1b\[20[01]~|[\r\n]")
PASTE, PASTE_END = b"\x1b[200~", b"\x1b[201~"


def end_of_line(keys: bytes) -> int:
    """Behind the first line; -1 where it has not ended. Ends of lines that are pasted are part of it."""
    is_pasted = False
    for found in ENDS.finditer(keys):
        if found[0] in (PASTE, PASTE_END):
            is_pasted = found[0] == PASTE
        elif not is_pasted:
            return found.end()
    return -1


class KeyLines(TerminalLines):
    """`terminal`: where the keys come from, a descriptor, -1 where it is on another host. `raw`: has set it, and acts
    on Ctrl-C and Ctrl-Z where nobody has done so before. `n_taken`: so many bytes of standard input are passed over."""

    def __init__(self, leaves: Callable[[], bool], terminal: int, raw: RawTerminal | None, n_taken: int) -> None:
        self.n_read = n_taken
        self._terminal, self._raw = terminal, raw
        self._held, self._has_ended, self._comes = b"", False, threading.Condition()
        self._shown = threading.Event()
        self._keys, (self._feeds, self._edits) = os.dup(0), os.openpty()
        attributes = termios.tcgetattr(self._edits)
        attributes[0] &= ~termios.IXON  # the user's terminal has it, or has not
        termios.tcsetattr(self._edits, termios.TCSANOW, attributes)
        self._fit()
        with self._in_place():
            super().__init__(leaves)
        threading.Thread(target=self._hold, daemon=True).start()
        threading.Thread(target=self._show, daemon=True).start()

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
        with self._comes:
            end = end_of_line(self._held)
            if end < 0 or self._held[:end].strip() != word.encode():
                return False
            self._take(end)
        return True

    def close(self) -> None:
        if self._raw:
            self._raw.close()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Standard input and output are the pseudo-terminal, as `input` wants them for readline."""
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
        """What comes, until it is read."""
        n_over = self.n_read
        while not self._has_ended:
            try:
                data = os.read(self._keys, READ_BYTES)
            except OSError:
                data = b""
            new, n_over = data[n_over:], max(0, n_over - len(data))
            new = self._raw.act(new) if self._raw else new
            with self._comes:
                self._has_ended = not data
                if len(self._held) < MAX_LENGTH:
                    self._held += new
                self._comes.notify_all()

    def _take(self, n: int) -> bytes:
        keys, self._held = self._held[:n], self._held[n:]
        self.n_read += n
        return keys

    def _feed(self, reader: int, is_read: threading.Event) -> None:
        """Keys to readline, line by line: what follows a line is for the next one."""
        deadline = time.monotonic() + BEGINS_S
        while not self._is_editing() and not is_read.is_set() and time.monotonic() < deadline:
            time.sleep(LOOK_S)  # until then keys would be shown twice
        line = b""
        while not is_read.is_set():
            with self._comes:
                self._comes.wait_for(lambda: self._held or self._has_ended, POLL_S)
                end = end_of_line(line + self._held)
                keys = self._take(len(self._held) if end < 0 else end - len(line))
            if self._fit():
                signal.pthread_kill(reader, signal.SIGWINCH)
            if keys:
                _write(self._feeds, keys)
                line += keys
            elif self._has_ended:
                _write(self._feeds, LEAVES)
            if end >= 0 or (self._has_ended and not keys):
                is_read.wait(ENDS_S)  # if it goes on, that key meant something else
                line = b""

    def _is_editing(self) -> bool:
        return not termios.tcgetattr(self._edits)[3] & termios.ICANON

    def _show(self) -> None:
        while data := os.read(self._feeds, READ_BYTES):
            _write(2, data.replace(ALL_SHOWN, b""))
            if ALL_SHOWN in data:
                self._shown.set()

    def _fit(self) -> bool:
        """To the terminal's size; whether that is another one than before."""
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
        while data:
            data = data[os.write(descriptor, data) :]
