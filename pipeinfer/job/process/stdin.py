"""Standard input of rank 0: a supervisor's, or under Open MPI, whose launcher (5.0.11) passes on what it reads, and not
its end. Knows the launcher's /proc; decodes nothing."""

import contextlib
import ctypes
import os
import select
import stat
import threading
import time
from pathlib import Path

from pipeinfer.cluster.hosts.launch import is_by_open_mpi
from pipeinfer.job.process.streams import complain, write_all
from pipeinfer.job.process.supervised import INPUT, connect_supervisor, own_attempt
from pipeinfer.launchers import forwarding_launcher, process_stat

READ_BYTES = 1 << 16
LOOK_S, REST_S, NOTICE_S = 0.1, 1.0, 5.0
"""Between looks at the launcher; how long it rests, with nothing left to read, when all it has read has come; and how
long nothing comes until a line says that there may be no end."""

SPLICE_F_NONBLOCK = 2
CPU_TICKS = slice(11, 13)  # fields of `process_stat`


def take_input() -> None:
    """From now on standard input is the supervisor's, if there is one that keeps it. Raises UserError."""
    attempt = own_attempt()
    if attempt and attempt.has_input and (link := connect_supervisor(INPUT)):
        threading.Thread(target=_copy, args=(os.dup(link.fileno()), _new_input()), daemon=True).start()
        link.close()


def end_input(is_whole: bool) -> None:
    """From now on standard input ends where the launcher's does. `is_whole`: it is read to its end, so a line says what
    to do where that cannot be known."""
    if is_by_open_mpi() and not own_attempt() and stat.S_ISFIFO(os.fstat(0).st_mode):
        source = os.dup(0)
        threading.Thread(target=_feed, args=(source, _new_input(), is_whole), daemon=True).start()


def _new_input() -> int:
    """A pipe to standard input, which programs may open by its name, as they cannot open sockets."""
    ends, feeds = os.pipe()
    os.dup2(ends, 0)
    os.close(ends)
    return feeds


def _copy(source: int, feeds: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        while data := os.read(source, READ_BYTES):
            write_all(feeds, data)
    os.close(feeds)


def _feed(source: int, feeds: int, is_whole: bool) -> None:
    """Copy input until it has ended."""
    launcher, notice_s = _Launcher(), time.monotonic() + NOTICE_S if is_whole else float("inf")
    with contextlib.suppress(OSError):  # nobody reads it any more
        while True:
            if select.select([source], [], [], LOOK_S)[0]:
                if not (data := os.read(source, READ_BYTES)):
                    break
                write_all(feeds, data)
                launcher.is_at_work()
            elif launcher.has_no_more():
                break
            elif not launcher.pid and time.monotonic() > notice_s:
                complain("standard input has no end yet; Open MPI's mpirun may not pass it on: name a file")
                notice_s = float("inf")
    os.close(feeds)


class _Launcher:
    """The one that reads the job's standard input. `pid`: 0 where it is on another host."""

    def __init__(self) -> None:
        self.pid, self._ticks = forwarding_launcher(), list[str]()
        self.is_at_work()

    def is_at_work(self) -> None:
        self._rests_s = time.monotonic()

    def has_no_more(self) -> bool:
        """Whether it has read all of its input and passed it on, after looks every LOOK_S."""
        ticks, before = process_stat(self.pid)[CPU_TICKS], self._ticks
        self._ticks = ticks
        if not self.pid or ticks != before or self._runs() or not _is_at_end(Path(f"/proc/{self.pid}/fd/0")):
            self.is_at_work()
        return time.monotonic() > self._rests_s + REST_S

    def _runs(self) -> bool:
        """Whether a thread of it runs, or waits for a core."""
        with contextlib.suppress(OSError):
            stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
            return any(each.rpartition(")")[2].split()[0] != "S" for each in stats)
        return True


def _is_over(pipe: int) -> bool:
    """Whether a pipe, which is closed, is empty and has no writer; poll(2) does not know that of writers before."""
    scratch = os.pipe()
    try:
        return int(ctypes.CDLL(None).tee(pipe, scratch[1], 1, SPLICE_F_NONBLOCK)) == 0
    finally:
        for each in (pipe, *scratch):
            os.close(each)


def _is_at_end(path: Path) -> bool:
    """Whether nothing is left to read of a process's open file: a file, a pipe, or /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        mode = (status := path.stat()).st_mode
        if stat.S_ISREG(mode):
            about = path.parents[1] / "fdinfo" / path.name
            return int(about.read_text().split()[1]) >= status.st_size  # its first line is `pos:`
        if stat.S_ISFIFO(mode):
            return _is_over(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return stat.S_ISCHR(mode) and os.path.samefile(path, os.devnull)
    return False
