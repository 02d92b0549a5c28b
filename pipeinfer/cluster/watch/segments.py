"""Shared memory that MPI leaves in /dev/shm when its ranks are killed, about 1 MB a rank: marked, found and removed.

Every rank marks the segments it uses, so that a later start on this host knows them as this program's; those that have
a name only while MPI starts are known by it. Nothing is removed that a living process maps or has open. Knows /proc and
the kernel's leases; standard library alone.
"""

from __future__ import annotations

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
"""What UCX and MPICH 4 make while MPI starts: some have names for milliseconds only, before anybody marks them."""

BRIEF_AGE_S = 0.2  # how old one must be: its maker may not have it open yet


RANK_BYTES = 1_400_000
"""What MPICH takes of it for a rank; where there is less a bus error ends ranks (measured: 3 ranks want 4 MB)."""


def short_of_room(n_ranks: int) -> str:
    """A line where so many ranks will find too little shared memory here; else empty."""
    with contextlib.suppress(OSError):
        found = os.statvfs(FOLDER)
        free = found.f_bavail * found.f_frsize
        if free < RANK_BYTES * n_ranks:
            return (
                f"{FOLDER} has {free / 1e6:.1f} MB free, and MPI needs about {RANK_BYTES * n_ranks / 1e6:.1f} MB of it "
                f"for {n_ranks} ranks: where that is missing ranks die of a bus error; make it larger (of a container "
                "with --shm-size), or remove what is left there"
            )
    return ""


def segments_of(pid: int) -> set[Path]:
    """The segments that a process of this user maps or has open now."""
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
    """Mark what this process uses as this program's, in this process namespace: in others we cannot see who uses it."""
    with contextlib.suppress(OSError, AttributeError):
        for path in segments_of(os.getpid()):
            os.setxattr(path, MARK, _namespace())


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Mark what this process uses as soon as it does, and at the end of the block: it may be killed at any moment."""
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
    """Remove what killed jobs of this user left on this host."""
    with contextlib.suppress(OSError, AttributeError):
        remove_dead(path for path in FOLDER.iterdir() if _is_marked(path))
    for path in (path for name in BRIEF_NAMES for path in FOLDER.glob(name)):
        with contextlib.suppress(OSError, AttributeError):
            _remove_unopened(path)


def remove_dead(paths: Iterable[Path]) -> bool:
    """Remove those that no living process uses; True when all of them are gone."""
    left = {path for path in paths if path.exists()}
    if not left:
        return True
    used = set[Path]().union(*(segments_of(pid) for pid in _own_processes()))
    for path in left - used:
        with contextlib.suppress(OSError):
            path.unlink()
    return not left & used


def _remove_unopened(path: Path) -> None:
    """Remove a file of this user's that no process maps or has open, in other namespaces neither.

    The kernel says so: it leases a file to write only to whoever alone has it. Raises OSError if it does not.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        state = os.fstat(file)
        if state.st_uid == os.getuid() and time.time() - state.st_ctime > BRIEF_AGE_S:
            # whoever opens it now waits, and we get a signal: not the one that would end us
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


def _own_processes() -> list[int]:
    owned = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                owned.append(int(folder.name))
    return owned
