"""A model whose files are on another host: its data there, and the slice of them here. Knows no messages."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import CachedSlice, SourceFile
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import ModelHeaders, ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import COPY_BYTES, TABLE, Feed, SliceFile, is_cached, open_slice, slice_data
from pipeinfer.models.gguf.writer import memory_file, tensor_data, written
from pipeinfer.outputs import whole_file

Content = Literal["layers", "table", "file"]  # a slice's tensors, a first slice's token table, or all files


def contents(info: ModelInfo, content: Content, first: int, last: int) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of a model on this host. A piece is valid until the next; getting one, and the end, may raise
    UserError."""
    if content == "layers":
        return slice_data(info, first, last)
    if content == "table":
        table = _table(info)
        return table.n_bytes, tensor_data(table, COPY_BYTES)
    return info.n_bytes, _all_bytes(info)


def _all_bytes(info: ModelInfo) -> Iterator[bytes]:
    for path, state in zip(info.paths, info.states, strict=True):
        with open(path, "rb") as file:
            for start in range(0, state.n_bytes, COPY_BYTES):
                yield file.read(min(COPY_BYTES, state.n_bytes - start))
    info.check_unchanged()


def cached_table(info: ModelInfo, cache: Path) -> CachedSlice:
    """The place of the token table in a cache."""
    return CachedSlice(cache / f"{info.fingerprint}-tokens.bin", b"", _table(info).n_bytes, [info.states])


def write_table(info: ModelInfo, cache: Path) -> Path:
    """Write the token table for hosts without the model's files. Raises UserError if that is not possible."""
    n_bytes, pieces = contents(info, "table", 0, 1)

    def write(fd: int, place: str) -> None:
        with written(fd, place, n_bytes, "make room, or give another") as file:
            file.writelines(pieces)
        info.check_unchanged()

    place = cached_table(info, cache)
    place.open(write, lambda line: None).close()
    return place.path


def _table(info: ModelInfo) -> Tensor:
    table = info.tensor(TABLE)
    assert table is not None, info.path
    return table


class RemoteModel:
    """Layers [first, last) of a model on another host, for files in `cache`, or in memory if that is None."""

    def __init__(
        self, headers: ModelHeaders, first: int, last: int, cache: Path | None, on_notice: Callable[[str], object]
    ) -> None:
        """Raises UserError for a whole model in several files without a cache."""
        self.info, self.fingerprint = read_model_info(headers), headers.fingerprint
        self.first, self.last, self.cache, self.on_notice = first, last, cache, on_notice
        self._fd = -1
        self._slice: SliceFile | None = None
        self._table_file: SourceFile | None = None
        if self.is_whole and len(headers.files) > 1 and cache is None:
            several = f"is of {len(headers.files)} files, which memory cannot hold as such"
            way_out = "name a directory for them with --slice-cache, or copy them to every host"
            raise UserError(f"{self.info.path} {several}; {way_out}")

    @property
    def is_whole(self) -> bool:
        return (self.first, self.last) == (0, self.info.n_layer)

    def missing(self) -> list[Content]:
        if self.is_whole:
            with contextlib.suppress(UserError):
                if self.cache and read_model_info(self._cached_file(self.cache)).fingerprint == self.fingerprint:
                    return []
            return ["file"]
        missing: list[Content] = []
        if not self.cache or not is_cached(self.info, self.first, self.last, self.cache, self.info.states):
            missing.append("layers")
        if self.first == 0 and not (self.cache and cached_table(self.info, self.cache).is_good):
            missing.append("table")
        return missing

    def take(self, content: Content, feed: Feed) -> None:
        """Write contents. Raises UserError if that is not possible, or they arrive damaged."""
        if content == "layers":
            self._open_slice(feed)
        elif content == "table":
            self._open_table(feed)
        elif self.cache:
            self._write_files(feed, self._cached_file(self.cache).parent)
        else:
            self._fd = _memory_file("model", feed, self.info.states[0].n_bytes)

    def finish(self) -> SliceFile:
        """The slice, after all missing contents were taken. Raises UserError if the cache changed meanwhile."""
        if self.is_whole:
            return self._open_whole()
        if self._slice is None:
            self._open_slice(None)
        assert self._slice
        if self.first == 0 and self._table_file is None:
            self._open_table(None)
        if self._table_file:
            table = replace(_table(self.info), path=self._table_file.path, offset=0)
            self._slice.table = table, self._table_file
        return self._slice

    # -- a slice

    def _open_slice(self, feed: Feed | None) -> None:
        self._slice = open_slice(self.info, self.first, self.last, self.cache, self.on_notice, self.info.states, feed)

    def _open_table(self, feed: Feed | None) -> None:
        def write(fd: int, place: str) -> None:
            if feed is None:
                raise UserError(f"{place} was changed meanwhile; start again")
            _write_fed(fd, feed, _table(self.info).n_bytes, place)

        if self.cache:
            self._table_file = cached_table(self.info, self.cache).open(write, self.on_notice)
            return
        assert feed
        fd = _memory_file("token table", feed, _table(self.info).n_bytes)
        try:
            self._table_file = SourceFile(Path(f"/proc/self/fd/{fd}"), lambda fd: b"")
        finally:
            os.close(fd)

    # -- all files

    def _cached_file(self, cache: Path) -> Path:
        return cache / self.fingerprint / self.info.path.name

    def _write_files(self, feed: Feed, folder: Path) -> None:
        for path, state in zip(self.info.paths, self.info.states, strict=True):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"slice cache {folder} cannot be made: {error.strerror}; give another") from None
            with whole_file(folder / path.name, "slice cache") as file:
                for piece in feed.take(state.n_bytes):
                    file.write(piece)
                if path == self.info.paths[-1]:
                    feed.finish()

    def _open_whole(self) -> SliceFile:
        assert self.cache or self._fd >= 0
        path = self._cached_file(self.cache) if self.cache else Path(f"/proc/self/fd/{self._fd}")
        info = read_model_info(path)
        if info.fingerprint != self.fingerprint:
            raise UserError(f"{path} is not what rank 0 has as {self.info.path}; start again")
        slice_file = open_slice(info, 0, info.n_layer)
        slice_file.fd = self._fd
        return slice_file


def _memory_file(content: str, feed: Feed, n_bytes: int) -> int:
    def write(fd: int) -> None:
        _write_fed(fd, feed, n_bytes, f"memory for the {content}")

    return memory_file(content.split()[0], n_bytes, [(0, n_bytes)], write)


def _write_fed(fd: int, feed: Feed, n_bytes: int, place: str) -> None:
    with written(fd, place, n_bytes, "use --slice-cache with room, or more ranks") as file:
        file.writelines(feed.take(n_bytes))
    feed.finish()
