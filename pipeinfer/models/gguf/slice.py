"""The GGUF of layers [first, last) of a model, on disk or in memory. Computes nothing."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import CachedSlice, FileState, SourceFile
from pipeinfer.models.gguf.header import F32, STRING, Tensor
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.gguf.writer import (
    ByteRange,
    encode_entry,
    encode_header,
    encode_number,
    encode_text,
    memory_file,
    padded,
    tensor_data,
    write_gguf,
    written,
)

TABLE, HEAD, BIAS = "token_embd.weight", "output.weight", "output.bias"
UNSHARED = ("tokenizer.", "split.", "general.tensor_extra", "general.alignment")
"""Keys of a model's metadata, or their beginnings, that a slice has not."""

COPY_BYTES = 8 << 20
"""In large writes: they give the file large pages, from which decoding was 10 to 15% faster than from the small pages
of sendfile (measured, ext4)."""
N_STAND_IN = 32  # vocabulary of other slices than the last: libllama requires a token table, and never uses it
BLANK_GATHERED = 1 << 30
"""Bytes of the largest blank slice with large pages, which are allocated at once; most of larger ones is never read."""


@dataclass
class SliceFile:
    """A GGUF that libllama can load: layers [first, last) of `info`, renumbered from 0. `path` is valid until
    `close()`. The token table is not in a first slice: its rows are read from the model file. `sources`: the files on
    disk that pages are mapped from; who goes on using them takes them out before `close`."""

    info: ModelInfo
    first: int
    last: int
    path: Path
    n_bytes: int
    fd: int = -1
    sources: tuple[SourceFile, ...] = ()
    table: tuple[Tensor, SourceFile] | None = None  # of a first slice, if the model file is not on this host

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.last == self.info.n_layer

    def close(self) -> None:
        """Release the file; a model that was loaded from it stays loaded. May be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        for source in self.sources:
            source.close()
        if self.table:
            self.table[1].close()


class SliceTensor(NamedTuple):
    """A tensor of a slice: its name there, its source, or the form of an unused one. `data`: replaces the source's.
    `scale`: what the source's numbers, in F32, are multiplied by; None: nothing."""

    name: str
    tensor: Tensor
    is_hole: bool = False
    data: bytes | None = None
    scale: np.float32 | None = None


class _Layout(NamedTuple):
    header: bytes
    tensors: list[SliceTensor]

    @property
    def n_bytes(self) -> int:
        return len(self.header) + sum(padded(each.tensor.n_bytes) for each in self.tensors)

    def ranges(self) -> Iterator[ByteRange]:
        """Of all bytes but holes."""
        start = end = len(self.header)
        yield 0, end
        for each in self.tensors:
            start, end = end, end + padded(each.tensor.n_bytes)
            if not each.is_hole:
                yield start, end


class Feed(Protocol):
    """Data from another host, in order."""

    def take(self, n_bytes: int) -> Iterator[memoryview]:
        """The next bytes in pieces, each valid until the next. Raises UserError."""
        ...

    def finish(self) -> None:
        """Check that all data were taken. Raises UserError if they are not those that were sent."""
        ...


def slice_bytes(info: ModelInfo, first: int, last: int) -> int:
    """Bytes of the weights of layers [first, last), on the last slice with the output head."""
    if (first, last) == (0, info.n_layer) or info.layers.query_scale != 1:
        return sum(each.tensor.n_bytes for each in slice_tensors(info, first, last) if not each.is_hole)
    sums, shared = _sums(info)
    unused = info.layers.unused(first, last)
    tables = sum(each.tensor.n_bytes for each in _tables(info, last == info.n_layer) if not each.is_hole)
    return sums[last] - sums[first] + tables + sum(size for name, size in shared.items() if name not in unused)


@lru_cache(maxsize=16)
def _sums(info: ModelInfo) -> tuple[list[int], dict[str, int]]:
    """Bytes of all layers before each, and of tensors outside of layers but tables. Cached: planning calls it often."""
    sizes, shared = [0] * info.n_layer, dict[str, int]()
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in (TABLE, HEAD, BIAS):
            shared[tensor.name] = tensor.n_bytes
        elif layer is not None and layer < info.n_layer:
            sizes[layer] += tensor.n_bytes
    return [0, *accumulate(sizes)], shared


@lru_cache(maxsize=16)
def last_table_bytes(info: ModelInfo) -> int:
    """Of the token table of a last slice: as a rule the output head, under that name."""
    return _tables(info, True)[0].tensor.n_bytes


def open_slice(
    info: ModelInfo,
    first: int,
    last: int,
    cache_dir: Path | None = None,
    on_notice: Callable[[str], object] = lambda line: None,
    remote_states: Sequence[FileState] = (),
    feed: Feed | None = None,
) -> SliceFile:
    """Layers [first, last) as a file for libllama: the model itself, else a file in cache_dir, else one in memory.

    A file in cache_dir is verified before it is used again, and rewritten, with a line to `on_notice`, if it is
    damaged; several processes may open it at once. `remote_states`: of the model's files on another host, from which it
    may have been cut. `feed`: the data of `slice_data` from another host. Raises UserError if the slice cannot be made,
    or the model changed since its header was read."""
    if not 0 <= first < last <= info.n_layer:
        raise ValueError(f"layers [{first}, {last}) of {info.n_layer}")
    if (first, last) == (0, info.n_layer) and not info.borrowed:
        sources = tuple(map(info.source, info.paths))
        return SliceFile(info, first, last, info.path, sum(state.n_bytes for state in info.states), sources=sources)
    layout = _layout(info, first, last)

    def write(fd: int, place: str) -> None:
        _write_slice(fd, layout, place, info, feed)

    if cache_dir is not None:
        cached = _cached(layout, info, first, last, cache_dir, remote_states)
        sources = (cached.open(write, on_notice),)
        return SliceFile(info, first, last, cached.path, layout.n_bytes, sources=sources)
    place = f"memory for {layout.n_bytes} bytes of layers {first}-{last - 1}"
    fd = memory_file(f"{first}-{last}", layout.n_bytes, layout.ranges(), lambda fd: write(fd, place))
    return SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), layout.n_bytes, fd)


def open_blank(info: ModelInfo, first: int, last: int) -> SliceFile:
    """Layers [first, last), not all, in memory and with weights of zero, which are allocated when they are read: they
    take as long to evaluate, and need no file. Raises UserError if there is no memory for them."""
    assert (first, last) != (0, info.n_layer), "a whole model is its own file"
    layout = _layout(info, first, last)

    def write(fd: int) -> None:
        os.write(fd, layout.header)
        os.ftruncate(fd, layout.n_bytes)

    ranges = layout.ranges() if layout.n_bytes <= BLANK_GATHERED else ()
    try:
        fd = memory_file(f"blank-{first}-{last}", layout.n_bytes, ranges, write)
    except OSError as error:
        raise UserError(f"no memory for {layout.n_bytes} bytes to be timed: {error.strerror}") from None
    return SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), layout.n_bytes, fd)


def is_cached(info: ModelInfo, first: int, last: int, cache_dir: Path, remote_states: Sequence[FileState]) -> bool:
    """Whether `open_slice` would write nothing."""
    return _cached(_layout(info, first, last), info, first, last, cache_dir, remote_states).is_good


def slice_data(info: ModelInfo, first: int, last: int) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of a slice's data in the model's files; a piece is valid until the next. Raises UserError, at the
    end, if the files have changed."""
    tensors = [each for each in slice_tensors(info, first, last) if not each.is_hole]

    def pieces() -> Iterator[bytes | memoryview]:
        for each in tensors:
            yield from _data_of(each)
        info.check_unchanged()

    return sum(each.tensor.n_bytes for each in tensors), pieces()


def _layout(info: ModelInfo, first: int, last: int) -> _Layout:
    tensors = slice_tensors(info, first, last)
    return _Layout(_encode_header(info, first, last, tensors), tensors)


def _cached(
    layout: _Layout, info: ModelInfo, first: int, last: int, cache_dir: Path, remote_states: Sequence[FileState]
) -> CachedSlice:
    path = slice_path(info, first, last, cache_dir)
    return CachedSlice(path, layout.header, layout.n_bytes, [info.states, remote_states])


def slice_path(info: ModelInfo, first: int, last: int, cache_dir: Path) -> Path:
    return cache_dir / f"{info.fingerprint}-{first}-{last}.gguf"


def _write_slice(fd: int, layout: _Layout, place: str, info: ModelInfo, feed: Feed | None) -> None:
    """Write a slice, all of it from the files of `info`, or from the feed."""
    n_bytes = sum(end - start for start, end in layout.ranges())
    with written(fd, place, n_bytes, "make room, put slices elsewhere, or use more ranks") as file:
        data = (each.tensor.n_bytes if each.is_hole else _data_of(each, feed) for each in layout.tensors)
        write_gguf(file, layout.header, data)
    if feed:
        feed.finish()
    else:
        info.check_unchanged()


def _data_of(each: SliceTensor, feed: Feed | None = None) -> Iterable[bytes | memoryview]:
    if feed:
        return feed.take(each.tensor.n_bytes)
    if each.data is not None:
        return [each.data]
    data = tensor_data(each.tensor, COPY_BYTES)
    return data if each.scale is None else [(np.frombuffer(b"".join(data), np.float32) * each.scale).tobytes()]


def slice_tensors(info: ModelInfo, first: int, last: int) -> list[SliceTensor]:
    """Every tensor of the slice, vocabulary-sized ones first."""
    if (first, last) == (0, info.n_layer):
        return [SliceTensor(tensor.name, tensor) for tensor in info.tensors]
    is_last = last == info.n_layer
    tensors, excluded = _tables(info, is_last), {TABLE, HEAD, BIAS, *info.layers.unused(first, last)}
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if layer is None and tensor.name not in excluded:
            tensors.append(SliceTensor(tensor.name, tensor))
        elif layer is not None and first <= layer < last:
            tensors.append(SliceTensor(f"blk.{layer - first}.{tensor.name.split('.', 2)[2]}", tensor))
    return tensors if info.layers.query_scale == 1 else _rescaled(info, tensors, last - first)


def _rescaled(info: ModelInfo, tensors: list[SliceTensor], n_layer: int) -> list[SliceTensor]:
    """The tensors, with queries multiplied by the model's `query_scale`."""
    assert info.layers.architecture.rescaled is not None
    name, scale = info.layers.architecture.rescaled.tensor, np.float32(info.layers.query_scale)
    names = {f"blk.{layer}.{name}" for layer in range(n_layer)}
    form = Tensor(name, (1,), F32, info.path, 0, scale.nbytes)
    missing = sorted(names - {each.name for each in tensors})
    return [
        *(_times(each, scale) if each.name in names else each for each in tensors),
        *(SliceTensor(each, form, data=scale.tobytes()) for each in missing),
    ]


def _times(each: SliceTensor, scale: np.float32) -> SliceTensor:
    if each.tensor.type != F32:
        raise UserError(f"{each.tensor.path}: {each.tensor.name} is not in F32; convert the model again")
    return each._replace(scale=scale)  # it is read where it is sent or written: other hosts may not have the file


def _tables(info: ModelInfo, is_last: bool) -> list[SliceTensor]:
    """The token table and the output head of a slice; only the last one uses the head.

    It has its head under the name of the token table: libllama then uses that one table as the head (as for tied
    embeddings), and no second table is needed for tokens that never come in. If libllama insists on both, the unused
    one takes no room."""
    table, head = info.tensor(TABLE), info.tensor(HEAD)
    assert table is not None, info.path
    bias = info.tensor(BIAS)
    biases = [SliceTensor(BIAS, bias)] if bias is not None else []
    if not info.layers.architecture.own_output:
        if is_last:
            return [SliceTensor(TABLE, head or table), *biases]
        return [SliceTensor(TABLE, _stand_in(table))]
    both = [SliceTensor(TABLE, table, is_hole=is_last), SliceTensor(HEAD, head or table), *biases]
    return both if is_last else [SliceTensor(each.name, _stand_in(each.tensor)) for each in both]


def _stand_in(tensor: Tensor) -> Tensor:
    """The first rows, or numbers, of a tensor with one a token."""
    n_rows = tensor.shape[-1]
    n_used = min(N_STAND_IN, n_rows)
    return replace(tensor, shape=(*tensor.shape[:-1], n_used), n_bytes=tensor.n_bytes // n_rows * n_used)


def _encode_header(info: ModelInfo, first: int, last: int, tensors: list[SliceTensor]) -> bytes:
    """Everything but the vocabulary, `replaced` entries last: slices in caches begin with these bytes."""
    arch, model = info.architecture, info.layers.metadata_of(range(first, last))
    replaced = {
        f"{arch}.block_count": model[f"{arch}.block_count"],
        f"{arch}.vocab_size": encode_number(tensors[0].tensor.shape[1]),
        "tokenizer.ggml.model": struct.pack("<I", STRING) + encode_text("none"),
    }
    shared = {key: raw for key, raw in model.items() if raw and key not in replaced and not key.startswith(UNSHARED)}
    entries = [encode_entry(key, raw) for key, raw in (shared | replaced).items()]
    return encode_header(entries, [each[:2] for each in tensors])
