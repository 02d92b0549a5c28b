"""Many bytes from one rank to another, such as layers: in pieces of bounded memory, with a checksum behind them.

Knows what bytes follow each other, not what they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pipeinfer.cluster.messages.records import Buffer
from pipeinfer.cluster.transport import Link, Tag
from pipeinfer.errors import UserError

CHUNK_BYTES = 8 << 20
"""Both ends hold two of them."""

LENGTH = np.dtype(np.int64)
"""What a message begins with: how many bytes follow, or FAILED."""

FAILED = -1

CHECKSUM = np.dtype(np.uint32)
"""CRC-32 of all bytes: against faults, at 6 GB/s where SHA-256, which ranks that know each other need not, had 1.8."""


def n_chunks(n_bytes: int) -> int:
    return -(-n_bytes // CHUNK_BYTES)


def send_chunks(link: Link, rank: int, pieces: Iterable[bytes | memoryview], on_sent: Callable[[int], object]) -> None:
    """Send these pieces to a rank that is in `receive_chunks` for as many bytes. `on_sent` hears of every further bytes
    that are out.

    Raises the UserError that getting a piece raises, when the other rank has been told.
    """
    checksum, sent = 0, [link.comm.Isend(_message(0), rank, Tag.STREAM)]
    buffers = [_message(CHUNK_BYTES), _message(CHUNK_BYTES)]
    try:
        for number, length in enumerate(_filled(buffers, pieces)):
            buffer = buffers[number % 2]
            checksum = zlib.crc32(buffer[LENGTH.itemsize : LENGTH.itemsize + length].data, checksum)
            _set_length(buffer, length)
            sent.append(link.comm.Isend(buffer[: LENGTH.itemsize + length], rank, Tag.STREAM))
            link.wait_awake(sent.pop(0))  # so the other buffer is free
            on_sent(length)
    except UserError:
        for request in sent:
            link.wait_awake(request)
        link.wait_awake(link.comm.Isend(_message(0, FAILED), rank, Tag.STREAM))
        raise
    last = _message(CHECKSUM.itemsize)
    last[LENGTH.itemsize :] = np.frombuffer(CHECKSUM.type(checksum).tobytes(), np.uint8)
    for request in (*sent, link.comm.Isend(last, rank, Tag.STREAM)):
        link.wait_awake(request)


def receive_chunks(link: Link, rank: int, n_bytes: int) -> Iterator[memoryview]:
    """What `send_chunks` of that rank sends, in pieces, each of which is gone when the next one comes.

    Takes everything in, also if the caller gives up before the end. Raises UserError when the other rank failed, or the
    bytes are not those that were sent.
    """
    left, checksum, failed = n_chunks(n_bytes) + 2, 0, False  # the first one is empty, the last the checksum
    posted = []

    def post() -> None:
        buffer = _message(CHUNK_BYTES)
        posted.append((link.comm.Irecv(buffer, rank, Tag.STREAM), buffer))

    post()
    try:
        while left:
            left -= 1
            request, buffer = posted.pop(0)
            link.wait_awake(request)
            length = int(buffer[: LENGTH.itemsize].view(LENGTH)[0])
            if length == FAILED:
                failed, left = True, 0
                break
            content = buffer[LENGTH.itemsize : LENGTH.itemsize + length]
            if left:
                post()
            else:
                failed = content.tobytes() != CHECKSUM.type(checksum).tobytes()
            if left and length:
                checksum = zlib.crc32(content.data, checksum)
                yield content.data
    finally:
        while left and posted:
            left -= 1
            request, buffer = posted.pop(0)
            link.wait_awake(request)
            if buffer[: LENGTH.itemsize].view(LENGTH)[0] == FAILED:
                break
            if left:
                post()
    if failed:
        raise UserError(f"what rank {rank} sends of the model is not whole; start again, and see what it says")


def _message(n_bytes: int, length: int | None = None) -> Buffer:
    buffer = np.empty(LENGTH.itemsize + n_bytes, np.uint8)
    _set_length(buffer, n_bytes if length is None else length)
    return buffer


def _set_length(buffer: Buffer, length: int) -> None:
    buffer[: LENGTH.itemsize].view(LENGTH)[0] = length


def _filled(buffers: list[Buffer], pieces: Iterable[bytes | memoryview]) -> Iterator[int]:
    """Fill the buffers in turn; how many bytes each one has got."""
    number = at = 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            n = min(len(data), CHUNK_BYTES - at)
            buffers[number % 2][LENGTH.itemsize + at : LENGTH.itemsize + at + n] = data[:n]
            data, at = data[n:], at + n
            if at == CHUNK_BYTES:
                yield at
                number, at = number + 1, 0
    if at:
        yield at
