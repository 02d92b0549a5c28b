"""One start of the job: a launcher in a process group of its own, what it writes, why it ended. Decides nothing."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from pipeinfer.cluster.watch.attempts import VARIABLE, Attempt, end_attempts
from pipeinfer.cluster.watch.protocol import write_line
from pipeinfer.supervisor.kept_input import KeptInput

LOOK_S = 0.005
ENDS_S = 2.0
"""How long a launcher may take to end its ranks on all hosts, before it is killed."""

DRAINS_S = 1.0
"""How long what a killed job has written may take to arrive."""

READ_BYTES = 1 << 16
PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
DEATH = re.compile(r"pipeinfer: (.*); ending the job")
TITLE = re.compile(r"rank (\d+) \(host ([^,)]+)")
"""As `watch.protocol.title` writes it."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a job ended. `rank`, `host`: where; below 0 and empty where that is not known. `is_cut`: nobody gets to the
    host any more."""

    why: str
    rank: int = -1
    host: str = ""

    @property
    def is_cut(self) -> bool:
        return "cannot be reached any more" in self.why


def loss_in(line: str) -> Loss | None:
    """What the watch says in a line on standard error, on which a prompt and what is typed may stand before it."""
    if not (found := DEATH.search(line)):
        return None
    named = TITLE.match(found[1])
    return Loss(found[1], int(named[1]), named[2]) if named else Loss(found[1])


class Output:
    """Standard output. Launchers write there too, so rank 0 sends its own by a link.

    Each attempt writes the text from its beginning on: what has been written is left out. `whole`: it is written when
    the job has ended in order, since its figures differ each time.
    """

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.error: OSError | None = None
        """Why no more can be written."""
        self._n_written = 0
        self._held = bytearray()

    def begin(self) -> Callable[[bytes], None]:
        """For an attempt: takes what it writes."""
        n_come = 0
        self._held.clear()

        def take(data: bytes) -> None:
            nonlocal n_come
            if self.whole:
                self._held += data
                return
            new = data[max(0, self._n_written - n_come) :]
            n_come += len(data)
            self._write(new)

        return take

    def end(self) -> None:
        self._write(bytes(self._held))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        self._n_written += len(data)
        try:
            while left and not self.error:
                left = left[os.write(1, left) :]
        except OSError as error:
            self.error = error


class Job:
    """Runs from creation on."""

    def __init__(
        self, attempt: Attempt, words: Sequence[str], environ: Mapping[str, str], stdin: KeptInput | None
    ) -> None:
        """Started by the main thread, with which the launcher ends. Raises OSError."""
        self.attempt, self.loss, self._is_over = attempt, None, False
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**environ, VARIABLE: attempt.text()}, start_new_session=True,
            preexec_fn=prctl and (lambda: prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)),
        )  # fmt: skip
        if stdin and self._process.stdin:
            stdin.feed(self._process.stdin)
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    loss: Loss | None
    """Known as soon as the watch has said it."""

    def signal(self, number: int) -> None:
        """To the launcher, which may stand still."""
        with contextlib.suppress(OSError):
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)

    def wait(self, is_over: Callable[[], bool]) -> int:
        """Until the job has ended, or is lost, or `is_over`, and nothing of it is left on this host. Returns its exit
        code, as shells give it."""
        while self._process.poll() is None and not self.loss and not self._is_over:
            time.sleep(LOOK_S)
            self._is_over = is_over()
        code = self._end()
        self._reader.join(timeout=DRAINS_S)
        return code

    def _end(self) -> int:
        deadline = time.monotonic() + ENDS_S
        self.signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not end_attempts(self.attempt.job, self.attempt.number + 1):
            write_line("processes of the job that was lost do not end; what they still say is not heard")
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _read(self, stream: IO[bytes]) -> None:
        """Pass on what is said until the job is lost or over: after that launchers tell at length what they do."""
        line = b""
        while data := os.read(stream.fileno(), READ_BYTES):
            for part in data.splitlines(keepends=True):
                if self.loss or self._is_over:
                    break
                with contextlib.suppress(OSError):
                    os.write(2, part)
                line += part
                if line.endswith(b"\n"):
                    self.loss, line = loss_in(line.decode("utf-8", "replace")), b""
