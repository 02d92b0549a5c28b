"""One start of the job, of which there may be more: a launcher in a process group of its own, why it ended, and its
streams. Each start reads its input from the beginning, and what it writes again is left out. Decides nothing."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeinfer.cluster.watch.protocol import ENDING, SUPERVISOR, mark_of, write_line
from pipeinfer.job.process.supervised import Attempt, end_attempts
from pipeinfer.launchers import is_stopped

READ_BYTES = 1 << 16
AHEAD_BYTES = 1 << 20  # how far the input is read ahead of the attempts: it may have no end


class KeptInput:
    """Standard input, read from creation on into `file`, for each attempt from its beginning. `act`: does what some
    keys mean, and returns the others. `error`: why it cannot be kept."""

    def __init__(self, file: IO[bytes], act: Callable[[bytes], bytes] = bytes) -> None:
        self._act = act
        self._fd, self.error = os.dup(file.fileno()), ""  # threads use it as long as the process lives
        self._n_kept, self._n_fed, self._has_ended = 0, 0, False
        self._changes = threading.Condition()
        threading.Thread(target=self._keep, daemon=True).start()

    def feed(self, link: socket.socket) -> None:
        """Write all of it to a new attempt."""
        threading.Thread(target=self._feed, args=(link,), daemon=True).start()

    def _keep(self) -> None:
        while not self._has_ended and not self.error:
            with self._changes:
                self._changes.wait_for(lambda: self._n_kept < self._n_fed + AHEAD_BYTES)
            try:
                data = os.read(0, READ_BYTES)
            except OSError:
                data = b""
            with self._changes:
                self._has_ended = not data
                data = self._act(data)
                while data and not self.error:
                    try:
                        n = os.pwrite(self._fd, data, self._n_kept)
                    except OSError as error:
                        self.error = str(error.strerror)
                        break
                    self._n_kept, data = self._n_kept + n, data[n:]
                self._changes.notify_all()

    def _feed(self, link: socket.socket) -> None:
        n_fed = 0
        with contextlib.suppress(OSError), link:  # the attempt has ended
            while True:
                with self._changes:
                    self._changes.wait_for(lambda: self._n_kept > n_fed or self._has_ended)  # noqa: B023 (called here)
                if not (data := os.pread(self._fd, READ_BYTES, n_fed)):
                    return link.shutdown(socket.SHUT_WR)
                link.sendall(data)
                n_fed += len(data)
                with self._changes:
                    self._n_fed = max(self._n_fed, n_fed)
                    self._changes.notify_all()


class KeptOutput:
    """Standard output, which rank 0 sends over a link, since launchers write to theirs too. Each attempt sends the text
    from its beginning: what was written before is left out. `whole`: a result with figures that differ each time, so it
    is written when the job has ended in order."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.error: OSError | None = None  # why no more can be written
        self._n_written = 0
        self._held = bytearray()
        self._lock = threading.Lock()  # an attempt that was lost may still write when the next one begins

    @property
    def is_writing(self) -> bool:
        """Whether data wait for their reader."""
        return self._lock.locked()

    def drop(self) -> None:
        """Leave out a whole result: its attempt was lost."""
        self._held = bytearray()

    def begin(self) -> Callable[[bytes], None]:
        """A new attempt's: writes what is new of the data that it sends."""
        n_received, held = 0, self._held

        def take(data: bytes) -> None:
            nonlocal n_received
            if self.whole:
                held.extend(data)
                return
            with self._lock:
                new = data[max(0, self._n_written - n_received) :]
                n_received += len(data)
                self._write(new)

        return take

    def end(self) -> None:
        with self._lock:
            self._write(bytes(self._held))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        self._n_written += len(data)
        try:
            while rest and not self.error:
                rest = rest[os.write(1, rest) :]
        except OSError as error:
            self.error = error


LOOK_S = 0.005
LAUNCHER_LOOK_S, STANDS_S = 1.0, 5.0  # between looks whether the launcher is stopped; how long it may be
ENDS_S = 2.0  # how long a launcher may take to end its ranks on all hosts, before it is killed
DRAINS_S = 1.0  # how long the last output of a killed job may take to arrive
PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
DEATH = re.compile(rf"pipeinfer: (.*){ENDING}")
TITLE = re.compile(r"rank (\d+) \(host ([^,)]+)")  # as `watch.protocol.title` writes it
RULE = re.compile(rb"\s*(={40,}|-{40,})\s*")  # with such a line MPICH and Open MPI begin to report a death
ENDS = re.compile(rb"RUNNING AT|exit|terminat|abort", re.IGNORECASE)  # of a job, in such reports
REPORTED = re.compile(rb"RUNNING AT (\S+)|with PID \d+ on node (\S+) exited")


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a job ended. `rank`, `host`: where; below 0 and empty if unknown."""

    why: str
    rank: int = -1
    host: str = ""

    @property
    def is_unreachable(self) -> bool:
        """Whether the host cannot be reached."""
        return "cannot be reached any more" in self.why


def loss_in(line: str, mark: str) -> Loss | None:
    """The watch's message in a line on standard error, which may begin with a prompt and what a user types. `mark`:
    what such a line has at its end."""
    if not (line.rstrip().endswith(mark) and (death := DEATH.search(line))):
        return None
    named = TITLE.match(death[1])
    return Loss(death[1], int(named[1]), named[2]) if named else Loss(death[1])


class Job:
    """Runs from creation on. `loss`: set as soon as the watch reports one. `reported`: what the launcher reports, which
    may end the watch before that can report anything."""

    def __init__(self, attempt: Attempt, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Called by the main thread, since the launcher ends with the thread that starts it. Raises OSError."""
        self.attempt, self._is_over = attempt, False
        self._mark = mark_of(attempt.job)
        self.loss: Loss | None = None
        self.reported: Loss | None = None
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        die = prctl and (lambda: prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM))
        more: dict[str, Any] = {"env": {**environ, SUPERVISOR: attempt.text()}, "preexec_fn": die}
        none, pipe, errors = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            words, stdin=none, stdout=pipe, stderr=errors, start_new_session=True, **more
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def signal(self, number: int) -> None:
        """Send it to the launcher, which may be suspended."""
        with contextlib.suppress(OSError):
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)

    def wait(self, must_end: Callable[[], bool]) -> int:
        """Return when the job has ended, is lost or `must_end`, and nothing of it is left on this host. Returns its
        exit code as shells give it."""
        goes_s = look_s = time.monotonic()
        while self._process.poll() is None and not self.loss and not self._is_over:
            time.sleep(LOOK_S)
            self._is_over = must_end()
            if (now_s := time.monotonic()) < look_s:
                continue
            look_s = now_s + LAUNCHER_LOOK_S
            if not (stopped := self._stopped()):
                goes_s = now_s
            elif now_s > goes_s + STANDS_S:
                self.loss = Loss(f"process {stopped} of the launcher stands still: it is stopped")
        code = self._end()
        self._reader.join(timeout=DRAINS_S)
        return code

    def _stopped(self) -> int:
        """A process of the launcher on this host that is stopped, so that no end of a rank is reported; 0: none is."""
        pid, children = self._process.pid, ""
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return next(filter(is_stopped, (pid, *map(int, children.split()))), 0)

    def _end(self) -> int:
        deadline = time.monotonic() + ENDS_S
        self.signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not end_attempts(self.attempt.job, self.attempt.number + 1):
            write_line("processes of the job that was lost do not end; their output is ignored from now on")
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _read(self, stream: IO[bytes]) -> None:
        """Copy what the launcher writes until the job is lost or over: after that it reports its own actions. Its
        report of a death is left out."""
        line = report = b""
        while data := os.read(stream.fileno(), READ_BYTES):
            for part in data.splitlines(keepends=True):
                if self.loss or self._is_over:
                    break
                is_rule = RULE.fullmatch(part)
                if report and is_rule and not ENDS.search(report):  # it is over, and no report
                    self._copy(report + part)
                    report = b""
                elif report or is_rule:
                    report += part
                else:
                    self._copy(part)
                line += part
                if line.endswith(b"\n"):
                    self.loss, line = loss_in(line.decode("utf-8", "replace"), self._mark), b""
        if died := REPORTED.search(report):
            host = (died[1] or died[2]).decode("utf-8", "replace")
            self.reported = Loss(f"a process of the job on host {host} has ended")
        elif not self.loss:
            self._copy(report)

    def _copy(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(2, data.replace(self._mark.encode(), b""))
