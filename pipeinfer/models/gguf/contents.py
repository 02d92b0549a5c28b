"""Detect changed files, by their identity on this host and by samples of their contents; and slices that are kept on a
disk, which are checked so. Knows no GGUF and no tensors. An identity (`FileState`) changes with every write and costs
nothing, but means nothing on another host. A digest of samples is the same everywhere, and differs for other weights,
without reading all of them."""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import ModelFault, UserError
from pipeinfer.unfinished import beside, open_locked, sweep

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


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}")


class SourceFile:
    """A file from which a loaded model computes; `check` detects changes. One that was renamed over is still read."""

    def __init__(self, path: Path, digest_of: Callable[[int], bytes], state: FileState | None = None) -> None:
        """`digest_of` samples the open file. Raises UserError when the file is not the one of `state` any more."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from None
        opened = FileState.of(self._fd)
        self._n_bytes, self._mtime_ns = opened.n_bytes, opened.mtime_ns
        self._touched = opened.mtime_ns, 0.0  # a later time of writing, and when that was first seen
        self._digest_of = digest_of
        try:
            self._digest = digest_of(self._fd)
            if state is not None and opened != state:
                raise _changed(path)
        except (UserError, EOFError, OSError) as error:
            self.close()
            raise _unreadable(path, error) if isinstance(error, OSError) else _changed(path) from None

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


# -- slices in a directory of a node's disk: verified before use, written whole or not at all. A cached slice is its
# GGUF and, behind it, a seal: the digest of the states of the files that it was cut from, and one of samples of the
# slice. A slice with a wrong seal is rewritten.

SEAL = b"pipeinfer slice 1".ljust(32)
SEAL_BYTES = len(SEAL) + 32 + 32  # then the digest of the sources and that of the samples
N_BLOCKS, MAX_STEP_BYTES = 4096, 256 << 10
"""Every block of files up to 16 MB is read, 16 MB of larger ones, and a block of any 256 KB."""

Write = Callable[[int, str], None]  # (file descriptor, place for an error): writes the slice. Raises UserError


@dataclass(frozen=True, slots=True)
class CachedSlice:
    """The file of a slice: it begins with `header` and has `n_bytes` before its seal. `sources`: the states of the
    model's files on the hosts where it may have been cut; the first are of the files that it would be cut from now."""

    path: Path
    header: bytes
    n_bytes: int
    sources: Sequence[Sequence[FileState]]

    def open(self, write: Write, on_notice: Callable[[str], object]) -> SourceFile:
        """The file, verified, or written by `write`. Leftovers of killed writers are removed. Raises UserError."""
        sweep(self.path.parent)
        fault = self._fault()
        if fault:
            on_notice(f"slice {self.path} {fault}; it is written anew")
        if fault is not None:
            self._write(write)
        return SourceFile(self.path, self._samples)

    @property
    def is_good(self) -> bool:
        return self._fault() is None

    def _fault(self) -> str | None:
        """Why the file cannot be used; "" if it is missing or of older sources, None if it can."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        try:
            n_bytes = os.fstat(fd).st_size
            if n_bytes != self.n_bytes + SEAL_BYTES:
                return f"has {n_bytes} bytes, not {self.n_bytes + SEAL_BYTES}"
            seal = os.pread(fd, SEAL_BYTES, self.n_bytes)
            if os.pread(fd, len(self.header), 0) != self.header or seal[:32] != SEAL or seal[64:] != self._samples(fd):
                return "is damaged"
            return None if seal[32:64] in map(_digest_of, self.sources) else ""
        except (OSError, EOFError) as error:
            return f"cannot be read ({error})"
        finally:
            os.close(fd)

    def _samples(self, fd: int) -> bytes:
        return sample_digest(fd, slice_samples(self.n_bytes))

    def _write(self, write: Write) -> None:
        with _temporary(self.path) as (fd, temporary):
            write(fd, f"the slice cache {self.path.parent}")
            try:
                os.pwrite(fd, SEAL + _digest_of(self.sources[0]) + self._samples(fd), self.n_bytes)
                os.replace(temporary, self.path)
            except OSError as error:
                raise _unwritable(self.path.parent, error) from None


def _digest_of(sources: Sequence[FileState]) -> bytes:
    return hashlib.sha256(repr([(s.n_bytes, s.mtime_ns, s.inode) for s in sources]).encode()).digest()


def slice_samples(n_bytes: int) -> Iterator[Extent]:
    """The blocks of a slice of n_bytes that its digest covers, the last one included."""
    step = min(MAX_STEP_BYTES, max(BLOCK_BYTES, n_bytes // N_BLOCKS // BLOCK_BYTES * BLOCK_BYTES))
    for start in range(0, n_bytes, step):
        yield start, min(BLOCK_BYTES, n_bytes - start)
    yield max(0, n_bytes - BLOCK_BYTES), min(BLOCK_BYTES, n_bytes)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, Path]]:
    """A locked file beside `path`, to be renamed to it; removed if it was not."""
    temporary = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_locked(temporary)
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    try:
        yield fd, temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        os.close(fd)


def _unwritable(folder: Path, error: OSError) -> UserError:
    way_out = "give another directory or none to keep slices in memory"
    return UserError(f"slice cache {folder} cannot be written: {error.strerror}; {way_out}")
