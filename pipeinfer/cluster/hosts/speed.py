"""How fast this host reads memory and multiplies, timed for a moment by as many threads as a rank will have. Knows no
model and no MPI."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeinfer.core.interfaces import FloatArray

N_BYTES = 1 << 25
"""That each thread reads at a time: more than caches near a core hold."""

N_SIDE = 384
"""Of the matrices that are multiplied."""

TIMED_S = 0.15
OF_READING, OF_MULTIPLYING = 0.77, 0.5
"""What inference reaches of these: STREAM reaches 75 to 80% of a memory's peak and inference some 60%; quantised
kernels reach half of what floats in matrices do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What inference reaches, as far as such a test can tell."""

    bytes_per_s: float
    flop_per_s: float


def measure_speed(n_threads: int) -> Speed:
    """In some 0.3 s. The ranks of a host are to measure at the same time: what they reach together is the host's."""
    blocks = [np.ones(N_BYTES // 4, np.float32) for _ in range(n_threads)]
    squares = [np.ones((N_SIDE, N_SIDE), np.float32) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as threads:
        read_s = _best_s(threads, lambda block: block.dot(block), blocks)
        multiply_s = _best_s(threads, lambda square: square @ square, squares)
    return Speed(
        OF_READING * n_threads * N_BYTES / read_s,
        OF_MULTIPLYING * n_threads * 2 * N_SIDE**3 / multiply_s,
    )


def _best_s(threads: ThreadPoolExecutor, work: Callable[[FloatArray], object], parts: Sequence[FloatArray]) -> float:
    """Of the quickest of several rounds in which every thread does its part."""
    best_s, start_s = float("inf"), time.perf_counter()
    while time.perf_counter() - start_s < TIMED_S or best_s == float("inf"):
        round_s = time.perf_counter()
        list(threads.map(work, parts))
        best_s = min(best_s, time.perf_counter() - round_s)
    return best_s
