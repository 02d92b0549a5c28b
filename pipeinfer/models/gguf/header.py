"""Read the header of a GGUF file, from its path or its first bytes: metadata and where each tensor lies. Knows no
architecture and loads no library. Written for untrusted files: every length is checked against the file before it is
used, so a damaged header ends in a UserError, never in a crash. Arrays of strings (vocabularies) are skipped, not
materialised."""

import contextlib
import hashlib
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import Extent, FileState, sample_digest, spread

Scalar = int | float | bool | str
T = TypeVar("T")

# The tables of the `gguf` package, which every rank would wait for: importing it takes 70 to 130 ms (measured). A test
# compares them. They may know more: the package lacks ggml's newest types.

# value type: its layout in a file
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

F32 = 0
# elements in a block, then the ggml types with such blocks: bytes of one
_TYPES = """
1 0:4 1:2 24:1 25:2 26:4 27:8 28:8 30:2
32 2:18 3:20 6:22 7:24 8:34 9:40 20:18 39:17
64 40:36 42:18
128 41:18
256 10:84 11:110 12:144 13:176 14:210 15:292 16:66 17:74 18:98 19:50 21:110 22:82 23:136 29:56 34:54 35:66
"""
_LINES = [line.replace(":", " ").split() for line in _TYPES.split("\n")[1:-1]]
BLOCKS = {
    int(type): (int(n), int(n_bytes))
    for n, *each in _LINES
    for type, n_bytes in zip(each[::2], each[1::2], strict=True)
}
"""GGML type -> (elements in a block, bytes of a block)."""

MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_ARRAY = 1 << 24
MAX_NAME_BYTES = 1 << 16
MAX_TENSOR_NAME_BYTES = 63  # ggml's
MAX_SMALL_ARRAY = 4096  # numeric arrays up to this length are read; longer ones (token scores) belong to vocabularies
READ_BYTES = 1 << 20
SETTLED_NS = 1_000_000_000  # after a change; before, another one may leave the file with the same time
N_SAMPLES = 3  # blocks of each tensor's data in a file's digest


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
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value. `raw` is its encoding, type included, and `value` the value; b"" and None for long arrays."""

    type: int
    raw: bytes
    value: Scalar | tuple[Scalar, ...] | None
    item_type: int = -1
    n_items: int = 0


@dataclass(frozen=True, slots=True)
class FileHead:
    """The bytes of a GGUF file before its weights, for hosts without it. `state`: of the file where it is."""

    path: Path
    data: bytes
    state: FileState


@dataclass(frozen=True, slots=True)
class Header:
    """spans: the bytes [start, end) of each metadata entry, key and value
    digest: of the file's size, its header and samples of every tensor: equal on two hosts with the same file; empty
            for a `FileHead`"""

    path: Path
    state: FileState
    metadata: dict[str, Value]
    spans: dict[str, tuple[int, int]]
    tensors: tuple[Tensor, ...]
    digest: str


class _Cursor:
    """Reads forward through a file, or its head; running over its end is a UserError. Read, not mapped: a file that is
    truncated at this moment must not end the process."""

    def __init__(self, path: Path, state: FileState, data: bytes = b"", fd: int = -1) -> None:
        self.path, self.state, self.size, self.fd = path, state, state.n_bytes, fd
        self.at, self.data = 0, bytearray(data)

    def take(self, n_bytes: int) -> int:
        """Advance by n_bytes; the position before."""
        start = self.at
        if not self.reach(start + n_bytes):
            end = f"its header wants {n_bytes} bytes at byte {start} of {self.size}"
            raise UserError(f"{self.path} is damaged or cut off: {end}; copy or download the file again")
        self.at = start + n_bytes
        return start

    def reach(self, end: int) -> bool:
        """Whether the file has `end` bytes, which `data` has then."""
        while self.fd >= 0 and len(self.data) < end <= self.size:
            piece = os.pread(self.fd, max(READ_BYTES, end - len(self.data)), len(self.data))
            if not piece:
                return False
            self.data += piece
        return end <= len(self.data)

    def number(self, value_type: int) -> int | float | bool:
        layout = SCALARS[value_type]
        number: int | float | bool = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]
        return number

    def count(self, value_type: int, limit: int, things: str) -> int:
        count = int(self.number(value_type))
        if count > limit:
            raise self.damaged(f"{count} {things}, at most {limit} are possible")
        return count

    def text(self, limit: int = MAX_ARRAY) -> str:
        n_bytes = self.count(10, limit, "bytes in a text")
        start = self.take(n_bytes)
        return self.data[start : start + n_bytes].decode("utf-8", "replace")

    def skip_texts(self, count: int) -> None:
        unpack, data = struct.Struct("<Q").unpack_from, self.data
        at = self.at
        for _ in range(count):
            if at + 8 > len(data) and not self.reach(at + 8):
                break
            at += 8 + unpack(data, at)[0]
        self.at = min(at, self.size)
        self.take(at - self.at)

    def damaged(self, fault: str) -> UserError:
        return damaged(self.path, fault)


def damaged(path: Path, fault: str) -> UserError:
    return UserError(f"{path} is damaged: {fault}; copy or download the file again")


def value_of(metadata: Mapping[str, Value], key: str, default: T) -> T:
    """The value of a key if it has the default's type (for a float also an int), else the default."""
    value = metadata[key].value if key in metadata else None
    types = (int, float) if isinstance(default, float) else type(default)
    return cast(T, value) if isinstance(value, types) else default


def read_header(source: Path | FileHead) -> Header:
    """Parse one GGUF file; UserError if it is missing, unreadable, not a GGUF, damaged or truncated."""
    if isinstance(source, Path):
        with contextlib.suppress(OSError):  # which is said when it is opened
            state = FileState.of(source)
            if time.time_ns() - state.mtime_ns > SETTLED_NS:
                return _read_unchanged(source, state)
    with _opened(source) as cursor:
        return _parse(cursor)


@lru_cache(maxsize=16)
def _read_unchanged(path: Path, state: FileState) -> Header:
    """A start reads the header of the same file several times, and each takes some 50 ms with a large vocabulary."""
    with _opened(path) as cursor:
        return _parse(cursor)


def read_texts(path: Path, key: str) -> list[bytes]:
    """The items of an array of texts in a file's metadata; none if there is no such array. Raises as `read_header`."""
    with _opened(path) as cursor:
        _, metadata, spans = _read_metadata(cursor)
        if key not in metadata or metadata[key].item_type != STRING:
            return []
        unpack, data, texts = struct.Struct("<Q").unpack_from, cursor.data, []
        at = spans[key][0] + 8 + len(key.encode()) + 16  # lengths of key and array, types of array and item
        for _ in range(metadata[key].n_items):
            end = at + 8 + unpack(data, at)[0]
            texts.append(bytes(data[at + 8 : end]))
            at = end
        return texts


@contextlib.contextmanager
def _opened(source: Path | FileHead) -> Iterator[_Cursor]:
    if isinstance(source, FileHead):
        yield _Cursor(source.path, source.state, source.data)
        return
    try:
        if source.is_fifo():  # without a writer it cannot even be opened
            raise UserError(f"{source} is a pipe, and a model is read from many places; give a .gguf file")
        with open(source, "rb", buffering=0) as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{source} is not a GGUF file (it does not start with 'GGUF'); give a .gguf model")
            yield _Cursor(source, FileState.of(file.fileno()), fd=file.fileno())
    except FileNotFoundError:
        raise UserError(f"model file {source} does not exist on this host; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{source} is a directory; give the .gguf file in it") from None
    except OSError as error:
        raise UserError(f"model file {source} cannot be read: {error.strerror}") from None


def sample_extents(tensors: Iterable[Tensor]) -> list[Extent]:
    """The samples of one file by which its weights are told from others."""
    return [extent for tensor in tensors for extent in spread(tensor.offset, tensor.n_bytes, N_SAMPLES)]


def _read_metadata(cursor: _Cursor) -> tuple[int, dict[str, Value], dict[str, tuple[int, int]]]:
    """(number of tensors, values, spans)"""
    cursor.take(4)
    version = cursor.number(4)
    if version not in (2, 3):
        readable = "versions 2 and 3 (little-endian) can be read"
        raise UserError(f"{cursor.path} has GGUF version {version}; {readable}, convert the model again")
    n_tensors = cursor.count(10, MAX_TENSORS, "tensors")
    n_keys = cursor.count(10, MAX_KEYS, "metadata keys")
    metadata: dict[str, Value] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(n_keys):
        start, key = cursor.at, cursor.text(MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.damaged(f"metadata key {key!r} comes twice")
        metadata[key] = _read_value(cursor)
        spans[key] = start, cursor.at
    return n_tensors, metadata, spans


def _parse(cursor: _Cursor) -> Header:
    path, size = cursor.path, cursor.size
    n_tensors, metadata, spans = _read_metadata(cursor)
    infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = metadata["general.alignment"].value if "general.alignment" in metadata else 32
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"alignment {alignment}")
    data_start = (cursor.at + alignment - 1) // alignment * alignment
    tensors = tuple(
        Tensor(name, shape, type_, path, data_start + offset, n_bytes) for name, shape, type_, offset, n_bytes in infos
    )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise cursor.damaged("a tensor name comes twice")
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors), default=0)
    if end > size:
        raise UserError(f"{path} is cut off: {end - size} of {end} bytes are missing; copy or download the file again")
    if cursor.fd < 0:
        return Header(path, cursor.state, metadata, spans, tensors, "")
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    digest.update(cursor.data[: cursor.at])
    try:
        digest.update(sample_digest(cursor.fd, sample_extents(tensors)))
    except EOFError:
        raise UserError(f"{path} became shorter while it was read; start again when it is complete") from None
    return Header(path, cursor.state, metadata, spans, tensors, digest.hexdigest())


def _read_value(cursor: _Cursor) -> Value:
    start = cursor.at

    def value(content: Scalar | tuple[Scalar, ...], *array: int) -> Value:
        return Value(value_type, bytes(cursor.data[start : cursor.at]), content, *array)

    value_type = int(cursor.number(4))
    if value_type in SCALARS:
        return value(cursor.number(value_type))
    if value_type == STRING:
        return value(cursor.text())
    if value_type != ARRAY:
        raise cursor.damaged(f"metadata of type {value_type}")
    item_type = int(cursor.number(4))
    count = cursor.count(10, MAX_ARRAY, "items in an array")
    if item_type == STRING and count <= MAX_SMALL_ARRAY:
        return value(tuple(cursor.text() for _ in range(count)), item_type, count)
    if item_type == STRING:
        cursor.skip_texts(count)
        return Value(value_type, b"", None, item_type, count)
    if item_type not in SCALARS:
        raise cursor.damaged(f"array of type {item_type}")
    layout = SCALARS[item_type]
    items_at = cursor.take(count * struct.calcsize(layout))
    if count > MAX_SMALL_ARRAY:
        return Value(value_type, b"", None, item_type, count)
    return value(struct.unpack_from(f"<{count}{layout[1]}", cursor.data, items_at), item_type, count)


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int, int]:
    name = cursor.text(MAX_TENSOR_NAME_BYTES)
    if not name.isprintable():
        raise cursor.damaged(f"a tensor is named {name!r}")
    n_dims = cursor.count(4, 4, f"dimensions of {name}")
    shape = tuple(cursor.count(10, 1 << 40, f"elements in a row of {name}") for _ in range(n_dims))
    ggml_type, offset = int(cursor.number(4)), int(cursor.number(10))
    if ggml_type not in BLOCKS:
        fault = f"tensor {name} has the unknown type {ggml_type}"
        raise UserError(f"{cursor.path}: {fault}; quantise the model to another type")
    block, block_bytes = BLOCKS[ggml_type]
    n_elements = math.prod(shape)
    if n_elements == 0 or (shape and shape[0] % block):
        raise cursor.damaged(f"tensor {name} of shape {shape} does not fit its type {ggml_type}")
    return name, shape, ggml_type, offset, n_elements // block * block_bytes
