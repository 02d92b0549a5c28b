"""Slices in a directory of a node's disk: verified before use, written whole or not at all. Knows no tensors. A cached
slice is its GGUF and, behind it, a seal: the digest of the states of the files that it was cut from, and one of samples
of the slice. A slice with a wrong seal is rewritten."""

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import BLOCK_BYTES, Extent, FileState, SourceFile, sample_digest

SEAL = b"pipeinfer slice 1".ljust(32)
SEAL_BYTES = len(SEAL) + 32 + 32  # then the digest of the sources and that of the samples
N_BLOCKS, MAX_STEP_BYTES = 4096, 256 << 10
"""Every block of files up to 16 MB is read, 16 MB of larger ones, and a block of any 256 KB."""

Write = Callable[[int, str], None]  # (file descriptor, place for an error): writes the slice. Raises UserError


@dataclass(frozen=True, slots=True)
class CachedSlice:
    """The file of a slice: it begins with `head`, has `n_bytes` before its seal, and was cut from the files of one of
    `sources`: the first are those that it is cut from now, the others the same files on other hosts."""

    path: Path
    head: bytes
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
            if os.pread(fd, len(self.head), 0) != self.head or seal[:32] != SEAL or seal[64:] != self._samples(fd):
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


# Temporary files: a writer locks its own as long as it lives, so that others can tell when it died. -------------------


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, str]]:
    """A locked file beside `path`, to be renamed to it; removed if it was not."""
    fd, temporary = _make_temporary(path)
    try:
        yield fd, temporary
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _make_temporary(path: Path) -> tuple[int, str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_suffix(), dir=path.parent)
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is swept either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, temporary
            os.close(fd)  # another process swept it before it was locked
    except OSError as error:
        raise _unwritable(path.parent, error) from None


def _suffix() -> str:
    """With the host's name: others may not see its locks."""
    return f".{socket.gethostname()}.part"


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers on this host: those without a lock."""
    for path in folder.glob(f".*{_suffix()}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _unwritable(folder: Path, error: OSError) -> UserError:
    way_out = "give another directory or none to keep slices in memory"
    return UserError(f"slice cache {folder} cannot be written: {error.strerror}; {way_out}")
