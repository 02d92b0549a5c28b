"""Read a file or a stream that may have no end, such as a device or a pipe, up to a limit. Knows no prompts."""

from typing import IO, AnyStr

from pipeinfer.errors import UserError

MAX_LENGTH = 1 << 26
"""Bytes or characters: more than the longest contexts hold, and little enough for a host's memory."""


def read_limited(file: IO[AnyStr], name: str, limit: int = MAX_LENGTH) -> AnyStr:
    """All of an open file. Raises UserError, which calls the file `name`, when that is more than `limit`; OSError."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise UserError(f"{name} is longer than {limit >> 20} MiB, the limit for prompts; give a shorter one")
    return data
