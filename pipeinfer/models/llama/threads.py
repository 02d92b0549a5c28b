"""How many threads an evaluation uses: all while the cores are free, fewer while other processes want them.

The threads of an evaluation meet at a barrier after every operation and spin there. One that is preempted stops them
all for a time slice, so that two processes with a thread a core each get a hundredth of their speed. With as many
threads as it really gets cores a process keeps its share. Knows no model and no library; reads the process's and the
host's clocks."""

import math
import os
import resource
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

SPIN_COUNT = "20000"
"""About a millisecond: longer than threads that have their cores wait for each other, and than the gaps between two
evaluations; far shorter than libgomp's own default, so that it takes an evaluation, not seconds, to notice."""

WINDOW_S, LONG_WINDOW_S = 0.03, 0.12
"""Of evaluating, after which a decision to use fewer threads may be made, and is made anew. Threads that have cores may
sleep for a third of the time and be preempted by the system some 30 times a second; only the longer window tells that
from one busy process."""

DEPRIVED_SHARE = 0.6  # of the cores that the threads would fill: who gets less has competitors
LOST_MIN, LOST_SHARE = 0.25, 0.05  # cores, and the share of the threads, that may be lost without consequences
ROUNDING = 0.25  # of a core that is counted as a whole one
PATIENCE_S, PATIENCE_MAX_S = 0.25, 8.0  # between two looks at whether cores are free again
Free = Callable[[], float | None]


def spin_briefly(environ: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads spin for a moment only, unless the user has chosen. Must come before libgomp loads."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT


@dataclass(frozen=True, slots=True)
class Reading:
    """This process's clocks: wall, processor time of all its threads, and how often one of them was preempted."""

    wall_s: float
    cpu_s: float
    n_preempted: int


def read_process() -> Reading:
    # not psutil's: it counts the preemptions of the first thread only, and processor time in steps of 10 ms
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Reading(time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_nivcsw)


def read_free() -> float | None:
    """Idle seconds of the cores that this process may use since the system started; None if that is unknown."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    idle = [int(fields[4]) for fields in map(str.split, lines) if fields and fields[0] in mine]
    return sum(idle) / os.sysconf("SC_CLK_TCK") if idle else None


def threads_to_keep(n_threads: int, wall_s: float, cpu_s: float, n_preempted: int) -> int:
    """The number of threads that had cores, of `n_threads` that evaluated for `wall_s` seconds."""
    got = cpu_s / wall_s
    is_deprived = got < DEPRIVED_SHARE * n_threads and n_preempted > 2 + 25 * wall_s
    has_lost = n_threads - got > max(LOST_MIN, LOST_SHARE * n_threads)
    is_crowded = wall_s >= LONG_WINDOW_S and has_lost and n_preempted > (60 + 20 * n_threads) * wall_s
    if not is_deprived and not is_crowded:
        return n_threads
    return max(1, min(n_threads - 1, math.floor(got + ROUNDING)))


class ThreadShare:
    """The threads of one context: `begin` and `end` enclose each evaluation. `most` is where it starts.

    n_threads  at most, as long as other processes want the other cores"""

    def __init__(self, most: int, process: Callable[[], Reading] = read_process, free: Free = read_free) -> None:
        self.most = self.n_threads = most
        self._process, self._free = process, free
        self._reset()
        self._start: Reading | None = None
        self._looked_s, self._idle_s = 0.0, 0.0  # when cores were last looked at, and their idle time then
        self._patience_s = PATIENCE_S

    def begin(self) -> int:
        """Threads for the evaluation that begins now."""
        if self.most == 1:
            return 1
        self._start = self._process()
        if self.n_threads < self.most and self._start.wall_s - self._looked_s > self._patience_s:
            self._look(self._start.wall_s)
        return self.n_threads

    def end(self) -> None:
        """The evaluation has ended or failed."""
        if self.most == 1 or self._start is None:
            return
        if self.n_threads == 1:  # it waits for no other
            return
        start, now = self._start, self._process()
        self._wall_s += now.wall_s - start.wall_s
        self._thread_s += (now.wall_s - start.wall_s) * self.n_threads
        self._cpu_s += now.cpu_s - start.cpu_s
        self._n_preempted += now.n_preempted - start.n_preempted
        if self._wall_s < WINDOW_S:
            return
        n_used = round(self._thread_s / self._wall_s)
        n_threads = threads_to_keep(n_used, self._wall_s, self._cpu_s, self._n_preempted)
        if n_threads < n_used:
            self._reduce(n_threads, now.wall_s)
        elif self._wall_s < LONG_WINDOW_S:
            return
        self._reset()

    def _reset(self) -> None:
        # of the evaluations since the last decision; of the threads what they would compute if each had a core
        self._wall_s, self._thread_s, self._cpu_s, self._n_preempted = 0.0, 0.0, 0.0, 0

    def _reduce(self, n_threads: int, now_s: float) -> None:
        # soon after more were taken: they were not free for long, so be slower to believe it
        soon = now_s - self._looked_s < 4 * self._patience_s
        self._patience_s = min(2 * self._patience_s, PATIENCE_MAX_S) if soon else PATIENCE_S
        self.n_threads = n_threads
        self._looked_s, self._idle_s = now_s, self._free() or 0.0

    def _look(self, now_s: float) -> None:
        """Take as many more threads as cores have idled since the last look; if that is unknown, try."""
        idle_s = self._free()
        spare = (
            self.most if idle_s is None else math.floor((idle_s - self._idle_s) / (now_s - self._looked_s) + ROUNDING)
        )
        self._looked_s, self._idle_s = now_s, idle_s or 0.0
        self.n_threads = min(self.most, self.n_threads + max(0, spare))
