"""Standard input of a job that may be started again: all that comes is kept, and each attempt reads it from its
beginning. Knows no command."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import IO

READ_BYTES = 1 << 16
AHEAD_BYTES = 1 << 20
"""What is read before an attempt wants it: what comes may have no end."""


class KeptInput:
    """Reads from creation on. `file`: which keeps it. `act`: does what some keys mean, and leaves the others. `error`:
    why it cannot be kept."""

    def __init__(self, file: IO[bytes], act: Callable[[bytes], bytes] = bytes) -> None:
        self._act = act
        self._fd, self.error = os.dup(file.fileno()), ""  # threads use it as long as the process lives
        self._n_kept, self._n_fed, self._has_ended = 0, 0, False
        self._comes = threading.Condition()
        threading.Thread(target=self._keep, daemon=True).start()

    def feed(self, pipe: IO[bytes]) -> None:
        """A new attempt has this pipe as its standard input."""
        threading.Thread(target=self._feed, args=(pipe,), daemon=True).start()

    def _keep(self) -> None:
        while not self._has_ended and not self.error:
            with self._comes:
                self._comes.wait_for(lambda: self._n_kept < self._n_fed + AHEAD_BYTES)
            try:
                data = os.read(0, READ_BYTES)
            except OSError:
                data = b""
            with self._comes:
                self._has_ended = not data
                data = self._act(data)
                while data and not self.error:
                    try:
                        n = os.pwrite(self._fd, data, self._n_kept)
                    except OSError as error:
                        self.error = str(error.strerror)
                        break
                    self._n_kept, data = self._n_kept + n, data[n:]
                self._comes.notify_all()

    def _feed(self, pipe: IO[bytes]) -> None:
        n_fed = 0
        with contextlib.suppress(OSError), pipe:  # the attempt has ended
            while True:
                with self._comes:
                    self._comes.wait_for(lambda: self._n_kept > n_fed or self._has_ended)  # noqa: B023 (called here)
                if not (data := os.pread(self._fd, READ_BYTES, n_fed)):
                    return
                pipe.write(data)
                pipe.flush()
                n_fed += len(data)
                with self._comes:
                    self._n_fed = max(self._n_fed, n_fed)
                    self._comes.notify_all()
