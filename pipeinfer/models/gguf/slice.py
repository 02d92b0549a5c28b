"""The GGUF of layers [first, last) of a model, on disk or in memory. Computes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of, read_model_info
from pipeinfer.models.gguf.pages import collapse
from pipeinfer.models.gguf.slice_cache import CachedSlice
from pipeinfer.models.gguf.writer import (
    encode_count,
    encode_entry,
    encode_header,
    encode_text,
    model_metadata,
    padded,
    tensor_data,
    write_gguf,
)

__all__ = ["ModelInfo", "SliceFile", "open_slice", "read_model_info", "slice_bytes"]

END_TENSORS = ("token_embd.weight", "output.weight", "output.bias")
COPY_BYTES = 8 << 20
"""In large writes: they get the file large pages, from which decoding was 10 to 15% faster than from what sendfile's
small ones leave behind (measured, ext4)."""
N_STAND_IN = 32
"""Vocabulary of a slice that is not the last: libllama wants a token table, but such a slice never uses it."""


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


def slice_bytes(info: ModelInfo, first: int, last: int) -> int:
    """Bytes of weights a rank with layers [first, last) holds: on the last one with the output head."""
    return sum(tensor.n_bytes for _, tensor in _slice_tensors(info, first, last))


def open_slice(
    info: ModelInfo,
    first: int,
    last: int,
    cache_dir: Path | None = None,
    on_notice: Callable[[str], object] = lambda line: None,
) -> SliceFile:
    """Layers [first, last) as a file for libllama: the model itself, else a file in cache_dir, else one in memory.

    A file in cache_dir is verified before it is used again, and written anew, with a line to `on_notice`, if it is not
    what it should be; several processes may ask for it at once. Raises UserError when the slice cannot be made, or the
    model changed since its header was read.
    """
    if not 0 <= first < last <= info.n_layer:
        raise ValueError(f"layers [{first}, {last}) of {info.n_layer}")
    if (first, last) == (0, info.n_layer):
        sources = tuple(info.source(path) for path in info.paths)
        return SliceFile(info, first, last, info.path, sum(state.n_bytes for state in info.states), sources=sources)
    parts = _slice_tensors(info, first, last)
    head = _encode_header(info, first, last, parts)
    n_bytes = len(head) + sum(padded(tensor.n_bytes) for _, tensor in parts)
    if cache_dir is not None:
        cached = CachedSlice(cache_dir / f"{info.fingerprint}-{first}-{last}.gguf", head, n_bytes, info.states)
        sources = (cached.open(lambda fd, place: _cut(fd, head, parts, place, info), on_notice),)
        return SliceFile(info, first, last, cached.path, n_bytes, sources=sources)
    fd = os.memfd_create(f"pipeinfer-{first}-{last}", os.MFD_CLOEXEC)
    slice_file = SliceFile(info, first, last, Path(f"/proc/self/fd/{fd}"), n_bytes, fd)
    try:
        _cut(fd, head, parts, f"memory for {n_bytes} bytes of layers {first}-{last - 1}", info)
    except BaseException:
        slice_file.close()
        raise
    collapse(fd)
    return slice_file


def _cut(fd: int, head: bytes, parts: list[tuple[str, Tensor]], place: str, info: ModelInfo) -> None:
    """Write a slice, all of it from the files that `info` describes."""
    _write(fd, head, parts, place)
    info.check_unchanged()


def _write(fd: int, head: bytes, parts: list[tuple[str, Tensor]], place: str) -> None:
    try:
        with open(fd, "wb", closefd=False) as file:
            write_gguf(file, head, (tensor_data(tensor, COPY_BYTES) for _, tensor in parts))
    except OSError as error:
        raise UserError(f"no room in {place}: {error.strerror}; use more ranks, or put slices elsewhere") from None


def _slice_tensors(info: ModelInfo, first: int, last: int) -> list[tuple[str, Tensor]]:
    """(name in the slice, source) of every tensor of the slice.

    The last slice holds its output head under the name of the token table: libllama then uses that one table as the
    head (as for tied embeddings), so that no second table is needed where tokens never come in.
    """
    if (first, last) == (0, info.n_layer):
        return [(tensor.name, tensor) for tensor in info.tensors]
    parts = []
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        left_out = tensor.name in END_TENSORS and not (tensor.name == "output.bias" and last == info.n_layer)
        if layer is None and not left_out:
            parts.append((tensor.name, tensor))
        elif layer is not None and first <= layer < last:
            parts.append((f"blk.{layer - first}.{tensor.name.split('.', 2)[2]}", tensor))
    table = info.tensor("token_embd.weight")
    assert table is not None, info.path
    if last == info.n_layer:
        return [("token_embd.weight", info.tensor("output.weight") or table), *parts]
    rows = min(N_STAND_IN, info.n_vocab)
    stand_in = Tensor(table.name, (table.shape[0], rows), table.type, table.path, table.offset,
                      table.n_bytes // info.n_vocab * rows)  # fmt: skip
    return [("token_embd.weight", stand_in), *parts]


def _encode_header(info: ModelInfo, first: int, last: int, parts: list[tuple[str, Tensor]]) -> bytes:
    """Everything but the vocabulary. What is the slice's own comes last: slices in caches begin with these bytes."""
    arch, known = info.architecture, model_metadata(info, range(first, last))
    own = {
        f"{arch}.block_count": known[f"{arch}.block_count"],
        f"{arch}.vocab_size": encode_count(parts[0][1].shape[1]),
        "tokenizer.ggml.model": encode_text("none"),
    }
    kept = {key: raw for key, raw in known.items() if raw and key not in own and not key.startswith("tokenizer.")}
    return encode_header([encode_entry(key, raw) for key, raw in (kept | own).items()], parts)
