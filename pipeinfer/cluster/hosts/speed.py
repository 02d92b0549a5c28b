"""How fast this host reads memory and multiplies, timed with as many threads as a rank will have. Knows no model and no
MPI."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pipeinfer.core.types import FloatArray

N_BYTES = 1 << 25
"""Each thread's block: larger than the caches near a core."""

N_SIDE = 384
"""Size of the multiplied matrices."""

TIMED_S = 0.15

OF_READING, OF_MULTIPLYING = 0.77, 0.5
"""The shares that inference reaches: STREAM reaches 75 to 80% of a memory's peak and inference about 60%; quantised
kernels reach half of what float matrices do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Estimated speeds of inference."""

    bytes_per_s: float
    flop_per_s: float


def measure_speed(n_threads: int) -> Speed:
    """Takes about 0.3 s. The ranks of a host must measure at the same time: the sum of their speeds is the host's."""
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
    """Seconds of the fastest of several rounds in which every thread does its part."""
    best_s, start_s = float("inf"), time.perf_counter()
    while time.perf_counter() - start_s < TIMED_S or best_s == float("inf"):
        round_s = time.perf_counter()
        list(threads.map(work, parts))
        best_s = min(best_s, time.perf_counter() - round_s)
    return best_s
