"""Shared memory that killed ranks leave on this host.

MPI leaves about 1 MB a rank in /dev/shm when its ranks are killed. Every rank marks the segments it uses, so that a
later start on this host recognises them; those with a name only while MPI starts are recognised by it. Nothing is
removed that a running process maps or has open. Knows /proc and file leases; standard library alone."""

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
MARK = "user.pipeinfer"  # an extended attribute; tmpfs has them since Linux 6.6, before nothing is marked or swept

LOOK_EVERY_S = 0.003

BRIEF_NAMES = ("ucx_shm_posix_*", "mpich_shar_tmp*")
"""Segments of UCX and MPICH 4 while MPI starts: some have names for milliseconds only, too short to be marked."""

BRIEF_AGE_S = 0.2  # younger ones stay: their creator may not have opened them yet
RANK_BYTES = 1_400_000  # MPICH's need for a rank; with less a bus error ends ranks (measured: 4 MB for 3 ranks)


def segments_of(pid: int) -> set[Path]:
    """The segments that a process of this user maps or has open."""
    names = []
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        names += [f"{FOLDER}/{name}" for line in maps if (name := line.partition(f" {FOLDER}/")[2])]
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                names.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return {Path(name) for name in names if name.startswith(f"{FOLDER}/") and not name.endswith(" (deleted)")}


def mark_own() -> None:
    """Mark the segments of this process with its process namespace: users in other namespaces cannot be seen."""
    with contextlib.suppress(OSError, AttributeError):
        for path in segments_of(os.getpid()):
            os.setxattr(path, MARK, _namespace())


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Mark the segments of this process throughout the block, because it may be killed at any moment."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            mark_own()

    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        mark_own()


def sweep() -> None:
    """Remove the segments that killed jobs of this user left on this host."""
    with contextlib.suppress(OSError, AttributeError):
        remove_dead(path for path in FOLDER.iterdir() if _is_marked(path))
    for path in (path for name in BRIEF_NAMES for path in FOLDER.glob(name)):
        with contextlib.suppress(OSError, AttributeError):
            _remove_unopened(path)


def remove_dead(paths: Iterable[Path]) -> bool:
    """Remove the segments that no process uses. True when all of them are gone."""
    present = {path for path in paths if path.exists()}
    if not present:
        return True
    used = set[Path]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                used |= segments_of(int(folder.name))
    for path in present - used:
        with contextlib.suppress(OSError):
            path.unlink()
    return not present & used


def _remove_unopened(path: Path) -> None:
    """Remove a file of this user's that no process maps or has open, in any namespace. The kernel grants a write lease
    only if nobody else has the file open. Raises OSError if it does not."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(file)
        if state.st_uid == os.getuid() and time.time() - state.st_ctime > BRIEF_AGE_S:
            # if another process opens it now, this one gets a signal: SIGURG, which is ignored by default
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            path.unlink()
    finally:
        os.close(file)


def _is_marked(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid() and os.getxattr(path, MARK) == _namespace()
    return False


def _namespace() -> bytes:
    return os.readlink("/proc/self/ns/pid").encode()
