"""Threads that choose tokens while the last stage evaluates its next run (SiPipe, section 5.1). Knows no MPI.

The logits are copied, because the model overwrites them with the next run's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from pipeinfer.core.types import FloatArray

N_BUFFERS = 2
"""Runs that are sampled at a time, at most. A stage that is further ahead waits for the oldest."""


class Samplers:
    """`next_is_here`: whether the stage could begin another run now. If not, it samples by itself: threads would gain
    nothing."""

    def __init__(self, n_threads: int, next_is_here: Callable[[], bool]) -> None:
        self.n_threads, self.next_is_here = n_threads, next_is_here
        self._pool = ThreadPoolExecutor(n_threads, "sampler")
        self._open: deque[tuple[list[Future[None]], Callable[[], Any]]] = deque()

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
        busy = [work for work, _ in self._open if not _are_done(work)]
        if len(busy) >= N_BUFFERS:
            wait(busy[0])
        own = logits[list(rows)]

        def work(first: int) -> None:
            for index in range(first, len(rows), self.n_threads):
                answer(rows[index], own[index])

        shares = [self._pool.submit(work, first) for first in range(min(self.n_threads, len(rows)))]
        self._open.append((shares, finish))

    def ready(self) -> Any | None:
        """The oldest run's result, once it is sampled; raises what `answer` raised."""
        if not self._open or not _are_done(self._open[0][0]):
            return None
        work, finish = self._open.popleft()
        for share in work:
            share.result()
        return finish()

    def close(self) -> None:
        """Return when all runs are sampled."""
        self._pool.shutdown()


def _are_done(work: Sequence[Future[None]]) -> bool:
    return all(share.done() for share in work)
