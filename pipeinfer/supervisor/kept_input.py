"""Standard input of a job that may be started again: all that comes is kept, and each attempt reads it from its
beginning. Knows no command."""

import contextlib
import os
import threading
from typing import IO

READ_BYTES = 1 << 16


class KeptInput:
    """Reads from creation on. `file`: which keeps it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._n_kept, self._has_ended = 0, False
        self._comes = threading.Condition()
        threading.Thread(target=self._keep, daemon=True).start()

    def feed(self, pipe: IO[bytes]) -> None:
        """A new attempt has this pipe as its standard input."""
        threading.Thread(target=self._feed, args=(pipe,), daemon=True).start()

    def _keep(self) -> None:
        while not self._has_ended:
            try:
                data = os.read(0, READ_BYTES)
            except OSError:
                data = b""
            with self._comes:
                self._n_kept += os.pwrite(self._file.fileno(), data, self._n_kept)
                self._has_ended = not data
                self._comes.notify_all()

    def _feed(self, pipe: IO[bytes]) -> None:
        n_fed = 0
        with contextlib.suppress(OSError), pipe:  # the attempt has ended
            while True:
                with self._comes:
                    self._comes.wait_for(lambda: self._n_kept > n_fed or self._has_ended)  # noqa: B023 (called here)
                if not (data := os.pread(self._file.fileno(), READ_BYTES, n_fed)):
                    return
                pipe.write(data)
                pipe.flush()
                n_fed += len(data)
