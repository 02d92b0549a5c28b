"""What to say when a file could not be written whole: what it needs, and what there is. Knows no model."""

import errno
import os

from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text


def no_room(fd: int, place: str, n_bytes: int, error: OSError, way_out: str) -> UserError:
    """`fd`: of the file, as far as it was written; `n_bytes`: what of it takes room."""
    amounts = "" if error.errno != errno.ENOSPC else f" ({size_text(n_bytes)} are needed, {size_text(_left(fd))} left)"
    return UserError(f"no room in {place}{amounts}: {error.strerror}; {way_out}")


def _left(fd: int) -> int:
    """Bytes that this file can have at most."""
    disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize + os.fstat(fd).st_blocks * 512
