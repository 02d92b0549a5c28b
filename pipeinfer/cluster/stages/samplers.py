"""Threads that answer for the last stage while it evaluates its next run (SiPipe, section 5.1). Knows no MPI.

The logits are copied into buffers of their own: the model writes the next run's over them.
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
"""Runs that are being answered at most. A stage that is further ahead waits for the oldest."""


@dataclass(slots=True, eq=False)
class _Open:
    """A run without a verdict."""

    work: list[Future[None]]
    finish: Callable[[], Any]
    buffer: npt.NDArray[np.float32] | None


class Samplers:
    """`next_is_here`: whether the stage could begin another run now. While it could not, it answers by itself: nobody
    would gain by another thread's doing so."""

    def __init__(self, n_threads: int, next_is_here: Callable[[], bool]) -> None:
        self.n_threads, self.next_is_here = n_threads, next_is_here
        self._pool = ThreadPoolExecutor(n_threads, "sampler")
        self._open: deque[_Open] = deque()
        self._free = [np.empty(0, np.float32) for _ in range(N_BUFFERS)]

    @property
    def wanted(self) -> bool:
        """Whether the next run shall be left to them: verdicts keep the order of the runs."""
        return bool(self._open) or self.next_is_here()

    def submit(
        self, logits: FloatArray, rows: Sequence[int], answer: Callable[[int, FloatArray], None],
        finish: Callable[[], Any],
    ) -> None:  # fmt: skip
        """Threads call `answer(row, its logits)` for each of these rows of logits (n_rows, n_vocab); what `finish` then
        returns comes out of `ready`. The logits may be changed when this has returned."""
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
        """What the oldest run came to, once it is answered; raises what answering raised."""
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
        """Return when all is answered."""
        self._pool.shutdown()
