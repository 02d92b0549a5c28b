"""Files that are written beside what they become. A writer locks its own as long as it lives, so that others on its
host can tell when it died."""

import contextlib
import fcntl
import os
import secrets
import socket
from glob import escape, glob
from pathlib import Path

N_CHARACTERS = 40  # of the name: with the rest it must not be too long for a file system


def beside(path: Path) -> Path:
    """The path of a file that is to become `path`."""
    return path.with_name(f"{_prefix(path.name)}{secrets.token_hex(4)}{_suffix()}")


def open_locked(unfinished: Path) -> int:
    """The descriptor of this new file, which is locked until that is closed. Raises OSError."""
    while True:
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process swept it before it was locked


def sweep(folder: Path, name: str = "") -> None:
    """Remove what killed writers on this host left, of the file `name` or of all: what has no lock."""
    for each in glob(f"{escape(_prefix(name)) if name else '.'}*{escape(_suffix())}", root_dir=folder):
        with contextlib.suppress(OSError):
            fd = os.open(folder / each, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / each).unlink()
            finally:
                os.close(fd)


def _prefix(name: str) -> str:
    return f".{name[:N_CHARACTERS]}."


def _suffix() -> str:
    """With the host's name: others may not see its locks."""
    return f".{socket.gethostname()}.part"
