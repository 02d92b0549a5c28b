"""Write a GGUF file from layers of a model: metadata, where each tensor lies, data. Loads no library.

Not through the `gguf` package, whose import alone takes longer than cutting a slice of 30 MB (measured: 70 to 130 ms).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.header import ARRAY, SCALARS, STRING, UINT32, Tensor, Value
from pipeinfer.models.gguf.model_info import ModelInfo

PER_LAYER_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_used_count",
                  "expert_feed_forward_length")  # fmt: skip
ALIGNMENT = 32
"""Of a file whose metadata name no other."""


def model_metadata(info: ModelInfo, layers: Sequence[int]) -> dict[str, bytes]:
    """`info`'s metadata for a model of these of its layers, in this order: key -> encoded value.

    Without the traces of a split; b"" for what the header leaves out (see `Value`).
    """
    arch = info.architecture
    found = {
        key: _of_layers(value, layers) if key.removeprefix(f"{arch}.") in PER_LAYER_KEYS else value.raw
        for key, value in info.metadata.items()
        if key != "general.alignment" and not key.startswith(("split.", "general.tensor_extra"))
    }
    return found | {f"{arch}.block_count": encode_count(len(layers))}


def _of_layers(value: Value, layers: Sequence[int]) -> bytes:
    """A value that all layers share stays as it is."""
    if not isinstance(value.value, tuple):
        return value.raw
    layout = f"<{len(layers)}{SCALARS[value.item_type][1]}"
    items = (value.value[layer] for layer in layers)
    return struct.pack("<IIQ", ARRAY, value.item_type, len(layers)) + struct.pack(layout, *items)


def encode_count(n: int) -> bytes:
    return struct.pack("<II", UINT32, n)


def encode_text(text: str) -> bytes:
    return struct.pack("<I", STRING) + _bare_text(text)


def encode_entry(key: str, value: bytes) -> bytes:
    return _bare_text(key) + value


def encode_header(entries: Sequence[bytes], tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """All that comes before the data of `tensors`, (name, as which data) each, which follow in this order."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries)), *entries]
    at = 0
    for name, tensor in tensors:
        shape = tensor.shape
        out += [_bare_text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type, at)]
        at += padded(tensor.n_bytes)
    head = b"".join(out)
    return head.ljust(padded(len(head)), b"\0")


def write_gguf(file: BinaryIO, header: bytes, data: Iterable[Iterable[bytes | memoryview]]) -> None:
    """`data`: of each tensor in the header's order, in pieces."""
    file.write(header)
    for pieces in data:
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


def _bare_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
