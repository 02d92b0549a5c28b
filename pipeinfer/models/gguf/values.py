"""Metadata values as a GGUF file has them. Knows no key."""

import struct
from collections.abc import Sequence

from pipeinfer.models.gguf.header import ARRAY, FLOAT32, SCALARS, STRING, UINT32, Scalar


def encode_number(number: int | float) -> bytes:
    return struct.pack("<II", UINT32, number) if isinstance(number, int) else struct.pack("<If", FLOAT32, number)


def encode_array(item_type: int, items: Sequence[Scalar]) -> bytes:
    head = struct.pack("<IIQ", ARRAY, item_type, len(items))
    return head + struct.pack(f"<{len(items)}{SCALARS[item_type][1]}", *items)


def encode_text(text: str) -> bytes:
    return struct.pack("<I", STRING) + encode_bare_text(text)


def encode_bare_text(text: str) -> bytes:
    """A text whose type is known."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
