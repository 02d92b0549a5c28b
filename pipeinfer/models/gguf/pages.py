"""Large pages for a file in memory. Knows file descriptors, no models."""

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from time import thread_time

HUGE_PAGE = 2 << 20
FIRST_BYTES, PIECE_BYTES = 4 * HUGE_PAGE, 16 * HUGE_PAGE
"""Gathered in one call, which nothing interrupts: some milliseconds."""

DEAR = 3.0
"""Getting a large page takes half as long as writing it, unless it is memory that a virtual machine has given back to
its host: then it took 10 to 20 times as long (measured), small pages did not, and decoding from these took 5% longer.
From this factor on it is cheaper to write small ones."""

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_SHARED_FIXED, MAP_PRIVATE_ANONYMOUS = 0x11, 0x22
MADV_COLLAPSE = 25

Span = tuple[int, int]
"""(first byte, byte after the last)"""


def reserve_large_pages(fd: int, n_bytes: int, spans: Iterable[Span]) -> bool:
    """Make an empty memory file n_bytes long, with large pages where `spans`, which ascend, will be written.

    To be done before: pages with a byte in them are gathered in a tenth of the time of full ones, and writing is faster
    too (measured); the kernel refuses those without any. Best effort: False where not all are large because the kernel
    (before Linux 6.1), its settings or memory do not allow it, or the machine makes it dear; the others will be small.
    """
    if os.uname().sysname != "Linux":
        return False
    write_s = 0.0  # a byte
    try:
        os.ftruncate(fd, n_bytes)
        for first, end in _pieces(n_bytes, spans):
            start_s = thread_time()
            if not _gather(fd, first, end):
                return False
            took_s = thread_time() - start_s
            write_s = write_s or _write_s(fd, first, end)
            if took_s > DEAR * write_s * (end - first):
                return False
    except OSError:  # no room: writing will say so
        return False
    return True


def _pieces(n_bytes: int, spans: Iterable[Span]) -> Iterator[Span]:
    """What is to be gathered, in large pages: all that have something of a span, and end within the file."""
    size = FIRST_BYTES
    for first, end in _joined(spans):
        end = min(end, n_bytes // HUGE_PAGE * HUGE_PAGE)
        while first < end:
            yield first, min(first + size, end)
            first, size = first + size, PIECE_BYTES


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Whole large pages, each once."""
    first = end = 0
    for start, stop in spans:
        start, stop = start // HUGE_PAGE * HUGE_PAGE, -(-stop // HUGE_PAGE) * HUGE_PAGE
        if start > end:
            yield first, end
            first = start
        end = max(end, stop)
    yield first, end


def _write_s(fd: int, first: int, end: int) -> float:
    """Seconds that a byte of these large pages, which are zero and remain so, takes to be written at best."""
    zeros, times = b"\0" * HUGE_PAGE, []
    for start in range(first, end, HUGE_PAGE):
        start_s = thread_time()
        os.pwrite(fd, zeros, start)
        times.append(thread_time() - start_s)
    return min(times) / HUGE_PAGE


def _gather(fd: int, first: int, end: int) -> bool:
    """Only an aligned mapping can be gathered, so one is made for the purpose and removed again."""
    for start in range(first, end, HUGE_PAGE):
        os.pwrite(fd, b"\0", start)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    failed, n_bytes = ctypes.c_void_p(-1).value, end - first
    n_reserved = n_bytes + HUGE_PAGE
    base = libc.mmap(None, n_reserved, PROT_NONE, MAP_PRIVATE_ANONYMOUS, -1, 0)
    if base == failed:
        return False
    aligned = -(-base // HUGE_PAGE) * HUGE_PAGE
    done = libc.mmap(aligned, n_bytes, PROT_READ_WRITE, MAP_SHARED_FIXED, fd, first) != failed and (
        libc.madvise(aligned, n_bytes, MADV_COLLAPSE) == 0 or ctypes.get_errno() == errno.EAGAIN
    )
    libc.munmap(base, n_reserved)
    return bool(done)
