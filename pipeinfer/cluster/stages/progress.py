"""Asynchronous progress: large messages move while this rank computes. Knows no run and no MPI.

MPI moves a message only when it is called, over TCP about 16 KB a call. A rank that evaluates a chunk of a prompt calls
it between layers at most, so over slow links transfers would wait for computation. A thread calls it instead, and
sleeps when nothing large is on its way.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE_BYTES = 128 << 10
"""Size of a run from which the thread works: others of that size may be on their way."""

N_LOOKS, PAUSE_S = 16, 1e-3
"""A link of 1 Gbit/s delivers 8 pieces in a pause; the thread costs 2% of a core."""


class Progress:
    """`look` lets MPI move messages, from any thread; None: they move only when tested for."""

    def __init__(self, look: Callable[[], object] | None) -> None:
        self._look = look
        self._is_wanted = threading.Event()
        self._has_thread = False

    @contextmanager
    def beside(self, n_bytes: int) -> Iterator[None]:
        """Move messages while the caller evaluates a run of so many bytes."""
        if self._look is None or n_bytes < LARGE_BYTES:
            yield
            return
        if not self._has_thread:
            threading.Thread(target=self._move, args=(self._look,), name="progress", daemon=True).start()
            self._has_thread = True
        self._is_wanted.set()
        try:
            yield
        finally:
            self._is_wanted.clear()

    def _move(self, look: Callable[[], object]) -> None:
        while self._is_wanted.wait():
            for _ in range(N_LOOKS):
                look()
            time.sleep(PAUSE_S)


NO_PROGRESS = Progress(None)
