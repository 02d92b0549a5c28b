"""Write files: made beside their place and renamed, so that each is complete or unchanged; and check before work that
they can be written, and are none of the files that are read. Knows no contents."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pipeinfer.errors import UserError

STREAM_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Files in these folders are streams that other processes hold, which a renamed file would not reach."""

NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


@contextlib.contextmanager
def whole_file(path: Path, what: str) -> Iterator[BinaryIO]:
    """A file to write to. It replaces `path` at the end of the block; if the block fails, `path` is unchanged. Until
    then it may have no name: `path_of` gives one. A device or a pipe is written directly. `what`: the file's name in
    messages, an option. Raises UserError, which names the file, for any OSError."""
    try:
        if is_stream(path):
            with path.open("wb", buffering=0) as file:
                yield file
        else:
            yield from _beside(path)
    except OSError as error:
        raise write_error(path, what, error) from None


def path_of(file: BinaryIO) -> Path:
    """The path by which this process, and no other, can read an open file."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def write_file(path: Path, what: str, data: bytes) -> None:
    """Write a file with this content as `whole_file` does."""
    with whole_file(path, what) as file:
        file.write(data)


def check_writable(path: Path, what: str) -> None:
    """Raises UserError when `whole_file` could not make the file; leaves nothing behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        place = Path(os.path.realpath(path))
        temporary = place.with_name(f".{secrets.token_hex(4)}")
        _open_new(place.parent, temporary).close()
        temporary.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, what, error) from None


def check_separate(outputs: Mapping[str, Path | None], inputs: Mapping[str, Iterable[Path]]) -> None:
    """Raises UserError when an output, by any name, is an input or another output. Keys: the options that name them."""
    users = {_identity(path): (option, "reads") for option, paths in inputs.items() for path in paths}
    users.pop(None, None)
    for option, path in outputs.items():
        identity = _identity(path) if path else None
        if identity in users:
            other, does = users[identity]
            raise UserError(f"{option} {path} is the file that {other} {does}; name another file")
        if identity:
            users[identity] = (option, "writes")


def working_folder() -> Path:
    """Raises UserError where it was removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UserError(f"the working directory: {error.strerror}; go to one that is there") from None


def write_error(path: Path, what: str, error: OSError) -> UserError:
    """The message for a file that could not be written."""
    folder = path.parent
    if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.isdir(folder):
        return UserError(f"{what} {path}: there is no folder {folder}; make it, or name another file")
    return UserError(f"{what} {path}: {error.strerror or error}; name a file where there is room and leave to write")


def _beside(path: Path) -> Iterator[BinaryIO]:
    place = Path(os.path.realpath(path))  # of a link the target is replaced
    temporary = place.with_name(f".{place.name[:40]}.{secrets.token_hex(4)}")
    try:
        with _open_new(place.parent, temporary) as file:
            if place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            yield file
            file.flush()
            if not temporary.exists():
                # only the call with a folder follows links; an absolute path does not use the folder
                os.link(path_of(file), temporary, src_dir_fd=file.fileno(), follow_symlinks=True)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _open_new(folder: Path, temporary: Path) -> BinaryIO:
    """A file without a name, which vanishes even if this process is killed; `temporary` on file systems without such
    files (network file systems)."""
    try:
        return open(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), "wb")
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in NO_UNNAMED_FILES:
            raise
    return temporary.open("xb")


def is_stream(path: Path) -> bool:
    """Whether the path names a device, a pipe or a socket, and no file."""
    # os.path's functions, which return False for names that no file can have
    return str(path.parent) in STREAM_FOLDERS or (
        os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
    )


def _identity(path: Path) -> tuple[int, int] | str | None:
    """Equal for all names of a file; None for streams, which several may use."""
    if is_stream(path):
        return None
    try:
        status = path.stat()
    except OSError:
        return os.path.realpath(path if path.is_absolute() else working_folder() / path)
    return status.st_dev, status.st_ino
