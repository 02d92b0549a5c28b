"""SIGINT, SIGTERM and SIGHUP at any moment, also while C code runs that never returns to Python, as MPI_Init may.

The interpreter's own handlers run between two Python instructions of the main thread, which may be minutes away. So the
byte that Python writes for every signal wakes a thread. Imports next to nothing, since it is used before all else.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

from pipeinfer.cluster.hosts.launch import end_job, show_cursor

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAD_FIRST_S = 0.3  # how long another rank waits, so that rank 0 tells the watch of a stop first


def on_signals(act: Callable[[int], object]) -> None:
    """Call `act(number)`, in a thread, for each of SIGNALS from now on, but for a SIGHUP that nohup ignores. To be
    called by the main thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threading.Thread(target=_listen, args=(reading, act), name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        # the default would raise KeyboardInterrupt anywhere
        signal.signal(number, signal.SIG_IGN if is_ignored else lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # scripts/pipeinfer blocks them
    if before >= 0:
        os.close(before)  # ends the thread that listened before


def end_at_once(rank: int) -> Callable[[int], None]:
    """The act on a signal before a process is part of a job, or without one: there is nothing to keep."""

    def end(number: int) -> None:
        if rank > 0:
            time.sleep(HEAD_FIRST_S)
        show_cursor()
        end_job(128 + number)

    return end


def _listen(reading: int, act: Callable[[int], object]) -> None:
    with open(reading, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] in SIGNALS:
                act(number[0])
