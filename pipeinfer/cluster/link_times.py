"""Time messages between two ranks: the offset of their clocks, and a link's bandwidth. Collective. Imports no MPI."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.wire import Buffer

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

MESSAGE_BYTES, N_MESSAGES = 1 << 22, 4  # of which the fastest tells a link's bandwidth


def clock_offset_s(link: "Link", clock: Callable[[], float], ranks: Iterable[int], n_rounds: int = 8) -> float:
    """Seconds to add to this rank's clock to get rank 0's; 0 unless it is one of `ranks`, whose clocks may differ. The
    round with the least delay counts."""
    offset_s, time_s = 0.0, np.zeros(1)
    for rank in ranks:
        if link.rank == 0:
            for _ in range(n_rounds):
                link.receive_awake(time_s, rank)
                time_s[0] = clock()
                link.send_awake(time_s, rank)
        elif link.rank == rank:
            offset_s = min(_ask_clock(link, clock, time_s) for _ in range(n_rounds))[1]
    return offset_s


def _ask_clock(link: "Link", clock: Callable[[], float], time_s: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(delay, offset) of one question to rank 0."""
    start_s = clock()
    link.send_awake(time_s, 0)
    link.receive_awake(time_s, 0)
    delay_s = clock() - start_s
    return delay_s, float(time_s[0]) - (start_s + delay_s / 2)


def bandwidth_gbit(link: "Link") -> float:
    """The bandwidth of the slowest link between neighbouring ranks, in Gbit/s. Needs two ranks."""
    buffer, slowest_s = np.zeros(MESSAGE_BYTES, np.uint8), 0.0
    for rank in range(1, link.size):
        if link.rank == rank - 1:
            slowest_s = max(slowest_s, min(_round_trip_s(link, buffer, rank) for _ in range(N_MESSAGES)))
        elif link.rank == rank:
            for _ in range(N_MESSAGES):
                link.receive_awake(buffer, rank - 1)
                link.send_awake(buffer, rank - 1)
    return 8e-9 * 2 * MESSAGE_BYTES / max(link.all_gather(slowest_s))


def _round_trip_s(link: "Link", buffer: Buffer, rank: int) -> float:
    start_s = time.perf_counter()
    link.send_awake(buffer, rank)
    link.receive_awake(buffer, rank)
    return time.perf_counter() - start_s
