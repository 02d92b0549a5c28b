"""Write a GGUF file: metadata, where each tensor lies, data; and reserve large pages for one in memory. Knows no key.
Not through the `gguf` package, whose import alone takes longer than cutting a slice of 30 MB (measured: 70 to 130
ms)."""

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import thread_time
from typing import BinaryIO

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import ARRAY, FLOAT32, SCALARS, UINT32, Scalar, Tensor
from pipeinfer.text import size_text

ByteRange = tuple[int, int]  # (first byte, byte after the last)

ALIGNMENT = 32  # the default of files whose metadata have none


def encode_number(number: int | float) -> bytes:
    return struct.pack("<II", UINT32, number) if isinstance(number, int) else struct.pack("<If", FLOAT32, number)


def encode_array(item_type: int, items: Sequence[Scalar]) -> bytes:
    head = struct.pack("<IIQ", ARRAY, item_type, len(items))
    return head + struct.pack(f"<{len(items)}{SCALARS[item_type][1]}", *items)


def encode_text(text: str) -> bytes:
    """A text without its type, as keys and names are."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_entry(key: str, value: bytes) -> bytes:
    return encode_text(key) + value


def encode_header(entries: Sequence[bytes], tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """All bytes before the data of `tensors`, (name, form of the data), which follow in this order."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries)), *entries]
    at = 0
    for name, tensor in tensors:
        shape = tensor.shape
        out += [encode_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type, at)]
        at += padded(tensor.n_bytes)
    head = b"".join(out)
    return head.ljust(padded(len(head)), b"\0")


def write_gguf(file: BinaryIO, header: bytes, data: Iterable[Iterable[bytes | memoryview] | int]) -> None:
    """`data`: each tensor's pieces in the header's order; a number is a hole of so many bytes, which takes no room. The
    last one is no hole."""
    file.write(header)
    for pieces in data:
        if isinstance(pieces, int):
            file.seek(padded(pieces), os.SEEK_CUR)
        else:
            n_bytes = sum(file.write(piece) for piece in pieces)
            file.write(bytes(padded(n_bytes) - n_bytes))


def tensor_data(tensor: Tensor, piece_bytes: int) -> Iterator[memoryview]:
    """A tensor's data in pieces, each valid until the next; read rather than mapped, so that the model's pages never
    count as this process's memory. Raises UserError if its file cannot be read, or has become shorter."""
    buffer = memoryview(bytearray(min(tensor.n_bytes, piece_bytes)))
    try:
        with open(tensor.path, "rb") as source:
            source.seek(tensor.offset)
            for start in range(0, tensor.n_bytes, len(buffer)):
                piece = buffer[: tensor.n_bytes - start]
                if source.readinto(piece) < len(piece):
                    raise UserError(f"{tensor.path} became shorter while it was read; start again when it is complete")
                yield piece
    except OSError as error:
        raise UserError(f"{tensor.path} cannot be read: {error.strerror}; check the file and its disk") from None


def padded(n_bytes: int) -> int:
    return (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@contextlib.contextmanager
def written(fd: int, place: str, n_bytes: int, way_out: str) -> Iterator[BinaryIO]:
    """A file to write. Raises UserError where it cannot be written whole. `n_bytes`: its size without holes."""
    try:
        with open(fd, "wb", closefd=False) as file:
            yield file
    except OSError as error:
        amounts = ""
        if error.errno == errno.ENOSPC:
            disk = os.fstatvfs(fd)
            n_most = disk.f_bavail * disk.f_frsize + os.fstat(fd).st_blocks * 512
            amounts = f" ({size_text(n_bytes)} are needed, {size_text(n_most)} left)"
        raise UserError(f"no room in {place}{amounts}: {error.strerror}; {way_out}") from None


def memory_file(name: str, n_bytes: int, ranges: Iterable[ByteRange], write: Callable[[int], object]) -> int:
    """The descriptor of a file in memory that `write` fills, with large pages for `ranges`. Raises what that does."""
    fd = os.memfd_create(f"pipeinfer-{name}", os.MFD_CLOEXEC)
    try:
        reserve_large_pages(fd, n_bytes, ranges)
        write(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


HUGE_PAGE = 2 << 20
FIRST_BYTES, PIECE_BYTES = 4 * HUGE_PAGE, 16 * HUGE_PAGE  # gathered in one uninterrupted call: some milliseconds
MAX_SLOWDOWN = 3.0
"""Getting a large page takes half as long as writing it, unless it is memory that a virtual machine has given back to
its host: then it took 10 to 20 times as long (measured), small pages did not, and decoding from these took 5% longer.
From this factor on small ones are cheaper."""

PROT_NONE, PROT_READ_WRITE = 0, 3
MAP_SHARED_FIXED, MAP_PRIVATE_ANONYMOUS = 0x11, 0x22
MADV_COLLAPSE = 25


def reserve_large_pages(fd: int, n_bytes: int, ranges: Iterable[ByteRange]) -> bool:
    """Make an empty memory file n_bytes long, with large pages for `ranges`, ascending, that will be written.

    Call it before writing: pages with a byte in them are gathered in a tenth of the time of full ones, and writing is
    faster too (measured); the kernel refuses those without any. Best effort: False if not all are large because the
    kernel (before Linux 6.1), its settings or memory do not allow it, or it is slow here; the others are small."""
    if os.uname().sysname != "Linux":
        return False
    write_s = 0.0  # a byte
    try:
        os.ftruncate(fd, n_bytes)
        for first, end in _pieces(n_bytes, ranges):
            start_s = thread_time()
            if not _gather(fd, first, end):
                return False
            took_s = thread_time() - start_s
            write_s = write_s or _write_s(fd, first, end)
            if took_s > MAX_SLOWDOWN * write_s * (end - first):
                return False
    except OSError:  # no room: writing will say so
        return False
    return True


def _pieces(n_bytes: int, ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """The large pages that overlap a range and end within the file, in pieces."""
    size = FIRST_BYTES
    for first, end in _joined(ranges):
        end = min(end, n_bytes // HUGE_PAGE * HUGE_PAGE)
        while first < end:
            yield first, min(first + size, end)
            first, size = first + size, PIECE_BYTES


def _joined(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """Whole large pages, each once."""
    first = end = 0
    for start, stop in ranges:
        start, stop = start // HUGE_PAGE * HUGE_PAGE, -(-stop // HUGE_PAGE) * HUGE_PAGE
        if start > end:
            yield first, end
            first = start
        end = max(end, stop)
    yield first, end


def _write_s(fd: int, first: int, end: int) -> float:
    """The shortest time to write a byte of these large pages, which are and remain zero."""
    zeros, times = b"\0" * HUGE_PAGE, []
    for start in range(first, end, HUGE_PAGE):
        start_s = thread_time()
        os.pwrite(fd, zeros, start)
        times.append(thread_time() - start_s)
    return min(times) / HUGE_PAGE


def _gather(fd: int, first: int, end: int) -> bool:
    """Only an aligned mapping can be gathered, so a temporary one is made."""
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
