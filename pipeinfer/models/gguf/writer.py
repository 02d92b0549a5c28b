"""Write a GGUF file from layers of a model: metadata, where each tensor lies, data. Loads no library.

Not through the `gguf` package, whose import alone takes longer than cutting a slice of 30 MB (measured: 70 to 130 ms).
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.gguf.values import encode_bare_text

ALIGNMENT = 32
"""Of a file whose metadata name no other."""


def model_metadata(info: ModelInfo, layers: Sequence[int]) -> dict[str, bytes]:
    """`info`'s metadata for a model of these of its layers, in this order: key -> encoded value.

    Without the traces of a split; b"" for what the header leaves out (see `Value`).
    """
    return {
        key: raw
        for key, raw in info.layers.metadata_of(layers).items()
        if key != "general.alignment" and not key.startswith(("split.", "general.tensor_extra"))
    }


def encode_entry(key: str, value: bytes) -> bytes:
    return encode_bare_text(key) + value


def encode_header(entries: Sequence[bytes], tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """All that comes before the data of `tensors`, (name, as which data) each, which follow in this order."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries)), *entries]
    at = 0
    for name, tensor in tensors:
        shape = tensor.shape
        out += [encode_bare_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type, at)]
        at += padded(tensor.n_bytes)
    head = b"".join(out)
    return head.ljust(padded(len(head)), b"\0")


def write_gguf(file: BinaryIO, header: bytes, data: Iterable[Iterable[bytes | memoryview] | int]) -> None:
    """`data`: of each tensor in the header's order, in pieces; a number is a hole of so many bytes that takes no room,
    which the last one is not."""
    file.write(header)
    for pieces in data:
        if isinstance(pieces, int):
            file.seek(padded(pieces), os.SEEK_CUR)
        else:
            n_bytes = sum(file.write(piece) for piece in pieces)
            file.write(bytes(padded(n_bytes) - n_bytes))


def tensor_data(tensor: Tensor, piece_bytes: int) -> Iterator[memoryview]:
    """A tensor's data in pieces, each of which is gone when the next one comes; read rather than mapped, so that the
    model's pages never count as this process's memory. Raises UserError when its file has become shorter."""
    buffer = memoryview(bytearray(min(tensor.n_bytes, piece_bytes)))
    with open(tensor.path, "rb") as source:
        source.seek(tensor.offset)
        for start in range(0, tensor.n_bytes, len(buffer)):
            piece = buffer[: tensor.n_bytes - start]
            if source.readinto(piece) < len(piece):
                raise UserError(f"{tensor.path} became shorter while it was read; start again when it is complete")
            yield piece


def padded(n_bytes: int) -> int:
    return (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
