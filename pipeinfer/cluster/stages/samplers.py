"""Threads that choose tokens while the last stage evaluates its next run (SiPipe, section 5.1). Knows no MPI.

The logits are copied, because the model overwrites them with the next run's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.core.interfaces import FloatArray

N_BUFFERS = 2
"""Runs that are sampled at a time, at most. A stage that is further ahead waits for the oldest."""


@dataclass(slots=True, eq=False)
class _Open:
    """A run without a verdict."""

    work: list[Future[None]]
    finish: Callable[[], Any]
    buffer: npt.NDArray[np.float32] | None


class Samplers:
    """`next_is_here`: whether the stage could begin another run now. If not, it samples by itself: threads would gain
    nothing."""

    def __init__(self, n_threads: int, next_is_here: Callable[[], bool]) -> None:
        self.n_threads, self.next_is_here = n_threads, next_is_here
        self._pool = ThreadPoolExecutor(n_threads, "sampler")
        self._open: deque[_Open] = deque()
        self._free = [np.empty(0, np.float32) for _ in range(N_BUFFERS)]

    @property
    def wanted(self) -> bool:
        """Whether the next run is left to the threads: verdicts keep the order of the runs."""
        return bool(self._open) or self.next_is_here()

    def submit(
        self, logits: FloatArray, rows: Sequence[int], answer: Callable[[int, FloatArray], None],
        finish: Callable[[], Any],
    ) -> None:  # fmt: skip
        """Threads call `answer(row, its logits)` for these rows of logits (n_rows, n_vocab); `ready` then returns what
        `finish` returns. The logits may be changed once this returns."""
        if not self._free:
            oldest = next(opened for opened in self._open if opened.buffer is not None)
            wait(oldest.work)
            self._release(oldest)
        n_vocab = logits.shape[1]
        buffer = self._free.pop()
        if len(buffer) < len(rows) * n_vocab:
            buffer = np.empty(len(rows) * n_vocab, np.float32)
        own = buffer[: len(rows) * n_vocab].reshape(len(rows), n_vocab)
        for index, row in enumerate(rows):
            own[index] = logits[row]

        def work(first: int) -> None:
            for index in range(first, len(rows), self.n_threads):
                answer(rows[index], own[index])

        shares = [self._pool.submit(work, first) for first in range(min(self.n_threads, len(rows)))]
        self._open.append(_Open(shares, finish, buffer))

    def ready(self) -> Any | None:
        """The oldest run's result, once it is sampled; raises what `answer` raised."""
        if not self._open or not all(share.done() for share in self._open[0].work):
            return None
        oldest = self._open.popleft()
        self._release(oldest)
        for share in oldest.work:
            share.result()
        return oldest.finish()

    def _release(self, opened: _Open) -> None:
        if opened.buffer is not None:
            self._free.append(opened.buffer)
            opened.buffer = None

    def close(self) -> None:
        """Return when all runs are sampled."""
        self._pool.shutdown()
