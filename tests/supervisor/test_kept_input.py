"""What is kept of standard input: all of it, or it is said why not; and not more than is wanted."""

import contextlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeinfer.supervisor.job import AHEAD_BYTES, KeptInput
from tests.support.jobs import until


@pytest.fixture
def write() -> Iterator[Callable[[bytes], int]]:
    """To standard input."""
    before, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    os.set_blocking(writing, False)
    yield lambda data: os.write(writing, data)
    os.close(writing)
    os.dup2(before, 0)
    os.close(before)


def fed(kept: KeptInput, n: int) -> bytes:
    ours, theirs = socket.socketpair()
    kept.feed(theirs)
    with ours, ours.makefile("rb") as file:
        return file.read(n)


def test_each_attempt_reads_it_from_its_beginning(write: Callable[[bytes], int]) -> None:
    with tempfile.TemporaryFile() as file:
        kept = KeptInput(file)
        write(b"one two")
        assert fed(kept, 7) == fed(kept, 7) == b"one two"


def test_what_comes_without_end_is_left_where_it_is(write: Callable[[bytes], int]) -> None:
    with tempfile.TemporaryFile() as file:
        KeptInput(file)

        def has_more() -> bool:
            with contextlib.suppress(BlockingIOError):
                while True:
                    write(bytes(65536))
            return os.fstat(file.fileno()).st_size >= AHEAD_BYTES

        until(has_more)
        for _ in range(20):
            time.sleep(0.05)
            has_more()
        assert os.fstat(file.fileno()).st_size <= 2 * AHEAD_BYTES


def test_a_full_disk_is_an_error(write: Callable[[bytes], int], tmp_path: Path) -> None:
    """A write of a part comes before it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "file").open("w+b") as file:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            kept = KeptInput(file)
            write(bytes(5000))
            until(lambda: bool(kept.error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert kept.error == "File too large"
