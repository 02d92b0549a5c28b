"""Read the header of a GGUF file: metadata and where each tensor lies. Knows no architecture and loads no library.

Written for untrusted files: every length is checked against the file before it is used, so a damaged header ends in a
UserError, never in a crash. Arrays of strings (vocabularies) are skipped, not materialised.
"""

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import FileState, Span, sample_digest, spread

Scalar = int | float | bool | str

# The tables of the `gguf` package, which every rank would wait for: importing it takes 70 to 130 ms (measured). A test
# compares them. They may know more: the package lacks ggml's newest types.

# value type: its layout in a file
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

# ggml type: (elements in a block, bytes of a block)
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66),
    17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54),
    35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip

MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_ARRAY = 1 << 24
MAX_NAME_BYTES = 1 << 16
MAX_TENSOR_NAME_BYTES = 63  # ggml's
MAX_SMALL_ARRAY = 4096
"""Numeric arrays up to this length are kept; longer ones (token scores) belong to vocabularies."""
READ_BYTES = 1 << 20
N_SAMPLES = 3
"""Blocks of each tensor's data that a file's digest covers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place in its file. `shape` is in ggml's order: the length of a row first."""

    name: str
    shape: tuple[int, ...]
    type: int
    path: Path
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value. `raw` is its encoding, type included; `value` is None where the array was too long to keep."""

    type: int
    raw: bytes
    value: Scalar | tuple[Scalar, ...] | None
    item_type: int = -1
    n_items: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    state: FileState
    metadata: dict[str, Value]
    tensors: tuple[Tensor, ...]
    digest: str
    """Of the file's size, its header and samples of every tensor: equal on two hosts that hold the same file."""


class _Cursor:
    """Reads forward through a file; running over its end is a UserError.

    Read, not mapped: a file that is cut off at this moment must not end the process.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        self.at = 0
        self.state = FileState.of(fd)
        self.size = self.state.n_bytes
        self.data = bytearray()

    def take(self, n_bytes: int) -> int:
        """Advance by n_bytes; the position before."""
        start = self.at
        if not self.reach(start + n_bytes):
            raise UserError(f"{self.path} is damaged or cut off: its header wants {n_bytes} bytes at byte {start} of "
                            f"{self.size}; copy or download the file again")  # fmt: skip
        self.at = start + n_bytes
        return start

    def reach(self, end: int) -> bool:
        """Whether the file has `end` bytes; they are in `data` then."""
        while len(self.data) < end <= self.size:
            piece = os.pread(self.fd, max(READ_BYTES, end - len(self.data)), len(self.data))
            if not piece:
                return False
            self.data += piece
        return end <= len(self.data)

    def number(self, kind: int) -> int | float | bool:
        layout = SCALARS[kind]
        number: int | float | bool = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]
        return number

    def count(self, kind: int, limit: int, what: str) -> int:
        count = int(self.number(kind))
        if count > limit:
            raise UserError(f"{self.path} is damaged: {count} {what}, at most {limit} are possible; "
                            "copy or download the file again")  # fmt: skip
        return count

    def text(self, limit: int = MAX_ARRAY) -> str:
        n_bytes = self.count(10, limit, "bytes in a text")
        start = self.take(n_bytes)
        return self.data[start : start + n_bytes].decode("utf-8", "replace")

    def texts(self, count: int) -> list[bytes]:
        """Items of an array of texts, as they are."""
        start = self.at
        self.skip_texts(count)
        unpack, data, at, found = struct.Struct("<Q").unpack_from, self.data, start, []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            found.append(bytes(data[at + 8 : end]))
            at = end
        return found

    def skip_texts(self, count: int) -> None:
        unpack, data = struct.Struct("<Q").unpack_from, self.data
        at = self.at
        for _ in range(count):
            if at + 8 > len(data) and not self.reach(at + 8):
                break
            at += 8 + unpack(data, at)[0]
        self.at = min(at, self.size)
        self.take(at - self.at)


def read_header(path: Path) -> Header:
    """Parse one GGUF file; UserError if it is missing, unreadable, not a GGUF, damaged or cut off."""
    with _opened(path) as cursor:
        return _parse(cursor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Cursor]:
    try:
        with open(path, "rb", buffering=0) as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file (it does not start with 'GGUF'); give a .gguf model")
            yield _Cursor(file.fileno(), path)
    except FileNotFoundError:
        raise UserError(f"model file {path} does not exist on this host; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; give the .gguf file in it") from None
    except OSError as error:
        raise UserError(f"model file {path} cannot be read: {error.strerror}") from None


def metadata_spans(path: Path) -> dict[str, tuple[int, int]]:
    """Where each metadata entry lies in a file, key and value: [start, end) in bytes. Raises as `read_header`.

    For copying what `Value.raw` leaves out, such as the vocabulary.
    """
    read_header(path)
    spans: dict[str, tuple[int, int]] = {}
    with _opened(path) as cursor:
        cursor.take(16)  # magic, version, number of tensors
        for _ in range(cursor.count(10, MAX_KEYS, "metadata keys")):
            start = cursor.at
            key = cursor.text(MAX_NAME_BYTES)
            _read_value(cursor)
            spans[key] = (start, cursor.at)
    return spans


def read_texts(path: Path, key: str) -> list[bytes]:
    """The items of an array of texts in a file's metadata; none if there is no such array. Raises as `read_header`."""
    with _opened(path) as cursor:
        cursor.take(16)
        for _ in range(cursor.count(10, MAX_KEYS, "metadata keys")):
            name = cursor.text(MAX_NAME_BYTES)
            if name != key:
                _read_value(cursor)
            elif cursor.number(4) != ARRAY or cursor.number(4) != STRING:
                break
            else:
                return cursor.texts(cursor.count(10, MAX_ARRAY, "items in an array"))
    return []


def sample_spans(tensors: Iterable[Tensor]) -> list[Span]:
    """The places of one file that tell other weights from these."""
    return [span for tensor in tensors for span in spread(tensor.offset, tensor.n_bytes, N_SAMPLES)]


def _parse(cursor: _Cursor) -> Header:
    path, size = cursor.path, cursor.size
    cursor.take(4)
    version = cursor.number(4)
    if version not in (2, 3):
        raise UserError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) can be read, "
                        "convert the model again")  # fmt: skip
    n_tensors = cursor.count(10, MAX_TENSORS, "tensors")
    n_keys = cursor.count(10, MAX_KEYS, "metadata keys")
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = cursor.text(MAX_NAME_BYTES)
        if key in metadata:
            raise UserError(f"{path} is damaged: metadata key {key!r} comes twice; copy or download the file again")
        metadata[key] = _read_value(cursor)
    infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = _alignment(metadata, path)
    data_start = (cursor.at + alignment - 1) // alignment * alignment
    tensors = tuple(Tensor(name, shape, kind, path, data_start + offset, n_bytes)
                    for name, shape, kind, offset, n_bytes in infos)  # fmt: skip
    _check_extent(tensors, path, size)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    digest.update(cursor.data[: cursor.at])
    try:
        digest.update(sample_digest(cursor.fd, sample_spans(tensors)))
    except EOFError:
        raise UserError(f"{path} became shorter while it was read; start again when it is complete") from None
    return Header(path, cursor.state, metadata, tensors, digest.hexdigest())


def _read_value(cursor: _Cursor) -> Value:
    start = cursor.at
    kind = int(cursor.number(4))
    if kind in SCALARS:
        number = cursor.number(kind)
        return Value(kind, bytes(cursor.data[start : cursor.at]), number)
    if kind == STRING:
        text = cursor.text()
        return Value(kind, bytes(cursor.data[start : cursor.at]), text)
    if kind != ARRAY:
        raise UserError(f"{cursor.path} is damaged: metadata of type {kind}; copy or download the file again")
    item = int(cursor.number(4))
    count = cursor.count(10, MAX_ARRAY, "items in an array")
    if item == STRING and count <= MAX_SMALL_ARRAY:
        texts = tuple(cursor.text() for _ in range(count))
        return Value(kind, bytes(cursor.data[start : cursor.at]), texts, item, count)
    if item == STRING:
        cursor.skip_texts(count)
        return Value(kind, b"", None, item, count)
    if item not in SCALARS:
        raise UserError(f"{cursor.path} is damaged: array of type {item}; copy or download the file again")
    layout = SCALARS[item]
    items_at = cursor.take(count * struct.calcsize(layout))
    if count > MAX_SMALL_ARRAY:
        return Value(kind, b"", None, item, count)
    numbers = struct.unpack_from(f"<{count}{layout[1]}", cursor.data, items_at)
    return Value(kind, bytes(cursor.data[start : cursor.at]), numbers, item, count)


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int, int]:
    name = cursor.text(MAX_TENSOR_NAME_BYTES)
    if not name.isprintable():
        raise UserError(f"{cursor.path} is damaged: a tensor is named {name!r}; copy or download the file again")
    n_dims = cursor.count(4, 4, f"dimensions of {name}")
    shape = tuple(cursor.count(10, 1 << 40, f"elements in a row of {name}") for _ in range(n_dims))
    kind = int(cursor.number(4))
    offset = int(cursor.number(10))
    if kind not in BLOCKS:
        raise UserError(f"{cursor.path}: tensor {name} has the unknown type {kind}; quantise the model to another type")
    block, block_bytes = BLOCKS[kind]
    n_elements = 1
    for length in shape:
        n_elements *= length
    if n_elements == 0 or (shape and shape[0] % block):
        raise UserError(f"{cursor.path} is damaged: tensor {name} of shape {shape} does not fit its type {kind}; "
                        "copy or download the file again")  # fmt: skip
    return name, shape, kind, offset, n_elements // block * block_bytes


def _alignment(metadata: dict[str, Value], path: Path) -> int:
    alignment = metadata["general.alignment"].value if "general.alignment" in metadata else 32
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise UserError(f"{path} is damaged: alignment {alignment}; copy or download the file again")
    return alignment


def _check_extent(tensors: tuple[Tensor, ...], path: Path, size: int) -> None:
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise UserError(f"{path} is damaged: a tensor name comes twice; copy or download the file again")
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
    if end > size:
        raise UserError(f"{path} is cut off: {end - size} of {end} bytes are missing; copy or download the file again")
