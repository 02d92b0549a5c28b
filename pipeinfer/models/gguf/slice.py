"""The GGUF of layers [first, last) of a model, on disk or in memory. Computes nothing."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import FileState, SourceFile
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of, read_model_info
from pipeinfer.models.gguf.no_room import no_room
from pipeinfer.models.gguf.pages import Span, reserve_large_pages
from pipeinfer.models.gguf.slice_cache import CachedSlice
from pipeinfer.models.gguf.values import encode_number, encode_text
from pipeinfer.models.gguf.writer import (
    encode_entry,
    encode_header,
    model_metadata,
    padded,
    tensor_data,
    write_gguf,
)

__all__ = ["ModelInfo", "SliceFile", "open_slice", "read_model_info", "slice_bytes", "slice_path"]

TABLE, HEAD, BIAS = "token_embd.weight", "output.weight", "output.bias"
F32 = 0
COPY_BYTES = 8 << 20
"""In large writes: they get the file large pages, from which decoding was 10 to 15% faster than from what sendfile's
small ones leave behind (measured, ext4)."""
N_STAND_IN = 32
"""Vocabulary of a slice that is not the last: libllama wants a token table, but such a slice never uses it."""

BLANK_GATHERED = 1 << 30
"""Bytes of a blank slice that get large pages as others do, and so are there at once; of larger ones, of many experts,
most are never read."""


@dataclass
class SliceFile:
    """A GGUF that libllama can load: layers [first, last) of `info`, renumbered from 0.

    `path` is valid until `close()`. The token table is not in a first slice: its rows are read from the model file.
    `sources` are the files on disk that pages are mapped from; what goes on using them takes them out before `close`.
    """

    info: ModelInfo
    first: int
    last: int
    path: Path
    n_bytes: int
    fd: int = -1
    sources: tuple[SourceFile, ...] = ()
    table: tuple[Tensor, SourceFile] | None = None
    """The token table of a first slice, where the model file is not on this host."""

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.info.n_layer

    def close(self) -> None:
        """Release the file; what has been loaded from it stays loaded. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        for source in self.sources:
            source.close()
        if self.table:
            self.table[1].close()


class Part(NamedTuple):
    """A tensor of a slice: its name there, and where it comes from, or the form of one that is never used. `data`: not
    the source's own."""

    name: str
    tensor: Tensor
    is_hole: bool = False
    data: bytes | None = None


class _Form(NamedTuple):
    """What a slice's file is."""

    head: bytes
    parts: list[Part]

    @property
    def n_bytes(self) -> int:
        return len(self.head) + sum(padded(part.tensor.n_bytes) for part in self.parts)

    def spans(self) -> Iterator[Span]:
        """Where bytes are that take room, holes left out."""
        start = end = len(self.head)
        yield 0, end
        for part in self.parts:
            start, end = end, end + padded(part.tensor.n_bytes)
            if not part.is_hole:
                yield start, end


class Feed(Protocol):
    """Data of another host, in order."""

    def take(self, n_bytes: int) -> Iterator[memoryview]:
        """The next ones, in pieces, each of which is gone when the next one comes. Raises UserError."""
        ...

    def finish(self) -> None:
        """All has been taken. Raises UserError where it is not what was sent."""
        ...


def slice_bytes(info: ModelInfo, first: int, last: int) -> int:
    """Bytes of weights a rank with layers [first, last) holds: on the last one with the output head."""
    if (first, last) == (0, info.n_layer) or info.layers.query_scale != 1:
        return sum(part.tensor.n_bytes for part in _slice_tensors(info, first, last) if not part.is_hole)
    sums, shared = _sums(info)
    unused = info.layers.unused(first, last)
    tables = sum(part.tensor.n_bytes for part in _tables(info, last == info.n_layer) if not part.is_hole)
    return sums[last] - sums[first] + tables + sum(size for name, size in shared.items() if name not in unused)


@lru_cache(maxsize=16)
def _sums(info: ModelInfo) -> tuple[list[int], dict[str, int]]:
    """Bytes of all layers before each, and of each tensor outside of layers but for tables: planners ask for slices
    thousands of times."""
    sizes, shared = [0] * info.n_layer, dict[str, int]()
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in (TABLE, HEAD, BIAS):
            shared[tensor.name] = tensor.n_bytes
        elif layer is not None and layer < info.n_layer:
            sizes[layer] += tensor.n_bytes
    return [0, *accumulate(sizes)], shared


def open_slice(
    info: ModelInfo, first: int, last: int, cache_dir: Path | None = None,
    on_notice: Callable[[str], object] = lambda line: None, elsewhere: Sequence[FileState] = (),
    feed: Feed | None = None,
) -> SliceFile:  # fmt: skip
    """Layers [first, last) as a file for libllama: the model itself, else a file in cache_dir, else one in memory.

    A file in cache_dir is verified before it is used again, and written anew, with a line to `on_notice`, if it is not
    what it should be; several processes may ask for it at once. `elsewhere`: the model's files on another host, from
    which it may have been cut. `feed`: where the data come from that are not on this host, those of `slice_data`.
    Raises UserError when the slice cannot be made, or the model changed since its header was read.
    """
    if not 0 <= first < last <= info.n_layer:
        raise ValueError(f"layers [{first}, {last}) of {info.n_layer}")
    if (first, last) == (0, info.n_layer) and not info.borrowed:
        sources = tuple(info.source(path) for path in info.paths)
        return SliceFile(info, first, last, info.path, sum(state.n_bytes for state in info.states), sources=sources)
    form = _form(info, first, last)

    def cut(fd: int, place: str) -> None:
        _cut(fd, form, place, info, feed)

    if cache_dir is not None:
        cached = _cached(form, info, first, last, cache_dir, elsewhere)
        sources = (cached.open(cut, on_notice),)
        return SliceFile(info, first, last, cached.path, form.n_bytes, sources=sources)
    fd = os.memfd_create(f"pipeinfer-{first}-{last}", os.MFD_CLOEXEC)
    slice_file = SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), form.n_bytes, fd)
    try:
        reserve_large_pages(fd, form.n_bytes, form.spans())
        cut(fd, f"memory for {form.n_bytes} bytes of layers {first}-{last - 1}")
    except BaseException:
        slice_file.close()
        raise
    return slice_file


def open_blank(info: ModelInfo, first: int, last: int) -> SliceFile:
    """The same layers, not all of them, in memory and with weights of zero, which are there once they are read: they
    take as long to evaluate, on hosts without the model's file too. Raises UserError when there is no memory for them.
    """
    assert (first, last) != (0, info.n_layer), "a whole model is its own file"
    form = _form(info, first, last)
    fd = os.memfd_create(f"pipeinfer-blank-{first}-{last}", os.MFD_CLOEXEC)
    try:
        reserve_large_pages(fd, form.n_bytes, form.spans() if form.n_bytes <= BLANK_GATHERED else ())
        os.write(fd, form.head)
        os.ftruncate(fd, form.n_bytes)
    except OSError as error:
        os.close(fd)
        raise UserError(f"no memory for {form.n_bytes} bytes to be timed: {error.strerror}") from None
    return SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), form.n_bytes, fd)


def is_cached(info: ModelInfo, first: int, last: int, cache_dir: Path, elsewhere: Sequence[FileState]) -> bool:
    """Whether `open_slice` would write nothing."""
    return _cached(_form(info, first, last), info, first, last, cache_dir, elsewhere).is_good


def slice_data(info: ModelInfo, first: int, last: int) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of all that a slice takes from the model's files; a piece is gone when the next one comes.

    Raises UserError, at the end, when the files have changed.
    """
    parts = [part for part in _slice_tensors(info, first, last) if not part.is_hole]

    def pieces() -> Iterator[bytes | memoryview]:
        for part in parts:
            yield from part_data(part)
        info.check_unchanged()

    return sum(part.tensor.n_bytes for part in parts), pieces()


def _form(info: ModelInfo, first: int, last: int) -> _Form:
    parts = _slice_tensors(info, first, last)
    return _Form(_encode_header(info, first, last, parts), parts)


def _cached(
    form: _Form, info: ModelInfo, first: int, last: int, cache_dir: Path, elsewhere: Sequence[FileState]
) -> CachedSlice:
    return CachedSlice(slice_path(info, first, last, cache_dir), form.head, form.n_bytes, [info.states, elsewhere])


def slice_path(info: ModelInfo, first: int, last: int, cache_dir: Path) -> Path:
    """Where a slice lies in a cache."""
    return cache_dir / f"{info.fingerprint}-{first}-{last}.gguf"


def _cut(fd: int, form: _Form, place: str, info: ModelInfo, feed: Feed | None) -> None:
    """Write a slice, all of it from the files that `info` describes, or from what is fed."""
    try:
        with open(fd, "wb", closefd=False) as file:
            data = (part.tensor.n_bytes if part.is_hole else part_data(part, feed) for part in form.parts)
            write_gguf(file, form.head, data)
    except OSError as error:
        needed = sum(end - start for start, end in form.spans())
        raise no_room(fd, place, needed, error, "make room, put slices elsewhere, or use more ranks") from None
    if feed:
        feed.finish()
    else:
        info.check_unchanged()


def part_data(part: Part, feed: Feed | None = None) -> Iterable[bytes | memoryview]:
    if feed:
        return feed.take(part.tensor.n_bytes)
    return [part.data] if part.data is not None else tensor_data(part.tensor, COPY_BYTES)


def _slice_tensors(info: ModelInfo, first: int, last: int) -> list[Part]:
    """Every tensor of the slice, vocabulary-sized ones first."""
    if (first, last) == (0, info.n_layer):
        return [Part(tensor.name, tensor) for tensor in info.tensors]
    is_last = last == info.n_layer
    parts, left_out = _tables(info, is_last), {TABLE, HEAD, BIAS, *info.layers.unused(first, last)}
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in left_out:
            parts.append(Part(tensor.name, tensor))
        elif layer is not None and first <= layer < last:
            parts.append(Part(f"blk.{layer - first}.{tensor.name.split('.', 2)[2]}", tensor))
    return parts if info.layers.query_scale == 1 else _rescaled(info, parts, last - first)


def _rescaled(info: ModelInfo, parts: list[Part], n_layer: int) -> list[Part]:
    """The same with queries multiplied by the model's `query_scale`."""
    assert info.layers.known.rescaled is not None
    name, scale = info.layers.known.rescaled.tensor, np.float32(info.layers.query_scale)
    own = {f"blk.{layer}.{name}" for layer in range(n_layer)}
    form = Tensor(name, (1,), F32, info.path, 0, scale.nbytes)
    missing = [Part(each, form, data=scale.tobytes()) for each in sorted(own - {part.name for part in parts})]
    return [_times(part, scale) if part.name in own else part for part in parts] + missing


def _times(part: Part, scale: np.float32) -> Part:
    if part.tensor.type != F32:
        raise UserError(f"{part.tensor.path}: {part.tensor.name} is not in F32; convert the model again")
    values = np.frombuffer(b"".join(tensor_data(part.tensor, COPY_BYTES)), np.float32)
    return part._replace(data=(values * scale).tobytes())


def _tables(info: ModelInfo, is_last: bool) -> list[Part]:
    """The token table and the output head of a slice, of which only the last one has use for the head.

    It holds its head under the name of the token table: libllama then uses that one table as the head (as for tied
    embeddings), so that no second table is needed where tokens never come in. Where libllama insists on both, the one
    that is not used takes no room.
    """
    table, head = info.tensor(TABLE), info.tensor(HEAD)
    assert table is not None, info.path
    bias = info.tensor(BIAS)
    biases = [Part(BIAS, bias)] if bias is not None else []
    if not info.layers.known.own_output:
        return [Part(TABLE, head or table), *biases] if is_last else [Part(TABLE, _stand_in(table))]
    if is_last:
        return [Part(TABLE, table, is_hole=True), Part(HEAD, head or table), *biases]
    return [
        Part(name, _stand_in(tensor)) for name, tensor, *_ in (Part(TABLE, table), Part(HEAD, head or table), *biases)
    ]


def _stand_in(tensor: Tensor) -> Tensor:
    """Of a tensor with a row, or a number, a token, the first ones."""
    n_rows = tensor.shape[-1]
    kept = min(N_STAND_IN, n_rows)
    return replace(tensor, shape=(*tensor.shape[:-1], kept), n_bytes=tensor.n_bytes // n_rows * kept)


def _encode_header(info: ModelInfo, first: int, last: int, parts: list[Part]) -> bytes:
    """Everything but the vocabulary. What is the slice's own comes last: slices in caches begin with these bytes."""
    arch, known = info.architecture, model_metadata(info, range(first, last))
    own = {
        f"{arch}.block_count": known[f"{arch}.block_count"],
        f"{arch}.vocab_size": encode_number(parts[0].tensor.shape[1]),
        "tokenizer.ggml.model": encode_text("none"),
    }
    kept = {key: raw for key, raw in known.items() if raw and key not in own and not key.startswith("tokenizer.")}
    return encode_header([encode_entry(key, raw) for key, raw in (kept | own).items()], [part[:2] for part in parts])
