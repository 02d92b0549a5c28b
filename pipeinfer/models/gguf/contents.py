"""Detect changed files: by their identity on this host, and by samples of their contents. Knows no GGUF. An identity
(`FileState`) changes with every write and costs nothing, but means nothing on another host. A digest of samples is the
same everywhere, and differs for other weights, without reading all of them."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import ModelFault, UserError

BLOCK_BYTES = 4096
CHECKS_OF_BLAME, BETWEEN_CHECKS_S = 5, 0.1
WRITE_S = 2.0  # the longest duration of one write, which sets the file's time when it begins
CHANGED_WHILE_COMPUTING = (
    "was truncated or overwritten while the job computed from it; restore the file and start again (a file that is "
    "renamed into its place does no harm)"
)
Extent = tuple[int, int]  # (first byte, number of bytes)


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's identity: changes on this host when it is written or replaced."""

    n_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | Path) -> "FileState":
        """Of an open file or a path. Raises OSError."""
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def spread(start: int, n_bytes: int, n_blocks: int) -> list[Extent]:
    """`n_blocks` blocks over [start, start + n_bytes), first and last included; all of it if that is no more."""
    if n_bytes <= n_blocks * BLOCK_BYTES:
        return [(start, n_bytes)]
    room = n_bytes - BLOCK_BYTES
    return [(start + room * i // (n_blocks - 1), BLOCK_BYTES) for i in range(n_blocks)]


def sample_digest(fd: int, extents: Iterable[Extent]) -> bytes:
    """32 bytes, the digest of these places of a file. Raises OSError, EOFError if the file ends before."""
    digest = hashlib.sha256()
    for start, n_bytes in extents:
        data = os.pread(fd, n_bytes, start)
        if len(data) != n_bytes:
            raise EOFError(f"byte {start + len(data)} is the end")
        digest.update(data)
    return digest.digest()


def check_unchanged(path: Path, state: FileState) -> None:
    """UserError unless the file at `path` is still the one whose header was read."""
    try:
        same = FileState.of(path) == state
    except OSError:
        same = False
    if not same:
        raise _changed(path)


def _changed(path: Path) -> UserError:
    return UserError(f"{path} was changed while it was read; start again when it is complete")


class SourceFile:
    """A file from which a loaded model computes; `check` detects changes. A file that another one was renamed over is
    still read as it was."""

    def __init__(self, path: Path, digest_of: Callable[[int], bytes], state: FileState | None = None) -> None:
        """`digest_of` samples the open file. Raises UserError when the file is not the one of `state` any more."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        opened = FileState.of(self._fd)
        self._n_bytes, self._mtime_ns = opened.n_bytes, opened.mtime_ns
        self._touched = opened.mtime_ns, 0.0  # a later time of writing, and when that was first seen
        self._digest_of = digest_of
        try:
            self._digest = digest_of(self._fd)
            if state is not None and opened != state:
                raise _changed(path)
        except (UserError, EOFError, OSError):
            self.close()
            raise _changed(path) from None

    def check(self) -> None:
        """ModelFault if the contents changed. Costs a system call, unless the file was touched."""
        try:
            state = FileState.of(self._fd)
        except OSError:
            raise self.fault() from None
        if (state.mtime_ns, state.n_bytes) == (self._mtime_ns, self._n_bytes):
            return
        self._check_contents()
        if state.mtime_ns != self._touched[0]:
            self._touched = state.mtime_ns, time.monotonic()
        elif time.monotonic() - self._touched[1] > WRITE_S:
            self._mtime_ns = state.mtime_ns  # touched, not changed

    def blame(self) -> None:
        """ModelFault if the contents changed, after results that no sound model computes. One write may take longer
        than a run, and write the samples last: several checks, over half a second."""
        for _ in range(CHECKS_OF_BLAME):
            self._check_contents()
            time.sleep(BETWEEN_CHECKS_S)

    def _check_contents(self) -> None:
        try:
            same = os.fstat(self._fd).st_size == self._n_bytes and self._digest_of(self._fd) == self._digest
        except (OSError, EOFError):
            same = False
        if not same:
            raise self.fault()

    def fault(self) -> ModelFault:
        return ModelFault(f"{self.path} {CHANGED_WHILE_COMPUTING}")

    def read(self, n_bytes: int, start: int) -> bytes:
        """ModelFault if the file ends before."""
        try:
            data = os.pread(self._fd, n_bytes, start)
        except OSError:
            data = b""
        if len(data) != n_bytes:
            raise self.fault()
        return data

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
