"""A model whose file is on another host: what is asked of it there, what is made of that here. Knows no messages."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import SourceFile
from pipeinfer.models.gguf.header import Tensor
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.no_room import no_room
from pipeinfer.models.gguf.pages import reserve_large_pages
from pipeinfer.models.gguf.skeleton import Skeleton, put_up
from pipeinfer.models.gguf.slice import COPY_BYTES, TABLE, Feed, SliceFile, is_cached, open_slice, slice_data
from pipeinfer.models.gguf.slice_cache import CachedSlice
from pipeinfer.models.gguf.writer import tensor_data
from pipeinfer.outputs import whole_file

What = Literal["layers", "table", "file"]
"""A slice's tensors, the token table that a first slice looks tokens up in, or the whole file, all parts in turn."""


def contents(info: ModelInfo, what: What, first: int, last: int) -> tuple[int, Iterator[bytes | memoryview]]:
    """(bytes, pieces) of this of a model that is here. A piece is gone when the next one comes; getting one, and the
    end, may raise UserError."""
    if what == "layers":
        return slice_data(info, first, last)
    if what == "table":
        table = _table(info)
        return table.n_bytes, tensor_data(table, COPY_BYTES)
    return info.n_bytes, _whole(info)


def _whole(info: ModelInfo) -> Iterator[bytes]:
    for path, state in zip(info.paths, info.states, strict=True):
        with open(path, "rb") as file:
            for start in range(0, state.n_bytes, COPY_BYTES):
                yield file.read(min(COPY_BYTES, state.n_bytes - start))
    info.check_unchanged()


def cached_table(info: ModelInfo, cache: Path) -> CachedSlice:
    """The token table's place in a cache."""
    return CachedSlice(cache / f"{info.fingerprint}-tokens.bin", b"", _table(info).n_bytes, [info.states])


def write_table(info: ModelInfo, cache: Path) -> Path:
    """Of a model that is here, for hosts without its file. Raises UserError when it cannot be written."""
    n_bytes, pieces = contents(info, "table", 0, 1)

    def write(fd: int, place: str) -> None:
        try:
            with open(fd, "wb", closefd=False) as file:
                file.writelines(pieces)
        except OSError as error:
            raise no_room(fd, place, n_bytes, error, "make room, or give another") from None
        info.check_unchanged()

    place = cached_table(info, cache)
    place.open(write, lambda line: None).close()
    return place.path


def _table(info: ModelInfo) -> Tensor:
    table = info.tensor(TABLE)
    assert table is not None, info.path
    return table


class RemoteModel:
    """Layers [first, last) of it, in files of `cache` or in memory."""

    def __init__(
        self, skeleton: Skeleton, folder: Path, first: int, last: int, cache: Path | None,
        on_notice: Callable[[str], object],
    ) -> None:  # fmt: skip
        """`folder`: where its headers are put while it is made. Raises UserError."""
        self.skeleton, self.first, self.last, self.cache, self.on_notice = skeleton, first, last, cache, on_notice
        self.info = put_up(skeleton, folder)
        self._fds: list[int] = []
        self._slice: SliceFile | None = None
        self._table_file: SourceFile | None = None
        if self.is_whole and len(skeleton.names) > 1 and cache is None:
            raise UserError(f"{skeleton.path} is of {len(skeleton.names)} files, which memory cannot hold as such; "
                            "name a directory for them with --slice-cache, or copy them to every host")  # fmt: skip

    @property
    def is_whole(self) -> bool:
        return (self.first, self.last) == (0, self.info.n_layer)

    def wants(self) -> list[What]:
        """What the cache does not have."""
        if self.is_whole:
            return [] if self.cache and self._is_file_cached() else ["file"]
        found: list[What] = []
        if not self.cache or not is_cached(self.info, self.first, self.last, self.cache, self.skeleton.states):
            found.append("layers")
        if self.first == 0 and not (self.cache and cached_table(self.info, self.cache).is_good):
            found.append("table")
        return found

    def take(self, what: What, feed: Feed) -> None:
        """Raises UserError when it cannot be written, or comes damaged."""
        if what == "layers":
            self._open_slice(feed)
        elif what == "table":
            self._open_table(feed)
        elif self.cache:
            self._write_files(feed, self._folder(self.cache))
        else:
            self._write_memory(feed)

    def finish(self) -> SliceFile:
        """All that was wanted has been taken. Raises UserError where the cache has changed meanwhile."""
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
        self._slice = open_slice(
            self.info, self.first, self.last, self.cache, self.on_notice, self.skeleton.states, feed
        )

    def _open_table(self, feed: Feed | None) -> None:
        def write(fd: int, place: str) -> None:
            if feed is None:
                raise UserError(f"{place} was changed meanwhile; start again")
            _write_fed(fd, feed, _table(self.info).n_bytes, place)

        if self.cache:
            self._table_file = cached_table(self.info, self.cache).open(write, self.on_notice)
            return
        fd = os.memfd_create("pipeinfer-tokens", os.MFD_CLOEXEC)
        try:
            write(fd, "memory for the token table")
            self._table_file = SourceFile(Path(f"/proc/self/fd/{fd}"), lambda fd: b"")
        finally:
            os.close(fd)

    # -- a whole file

    def _folder(self, cache: Path) -> Path:
        return cache / self.skeleton.fingerprint

    def _is_file_cached(self) -> bool:
        assert self.cache
        try:
            found = read_model_info(self._folder(self.cache) / self.skeleton.names[0])
        except UserError:
            return False
        return found.fingerprint == self.skeleton.fingerprint

    def _write_files(self, feed: Feed, folder: Path) -> None:
        for name, state in zip(self.skeleton.names, self.skeleton.states, strict=True):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"slice cache {folder} cannot be made: {error.strerror}; give another") from None
            with whole_file(folder / name, "slice cache") as file:
                for piece in feed.take(state.n_bytes):
                    file.write(piece)
                if name == self.skeleton.names[-1]:
                    feed.finish()

    def _write_memory(self, feed: Feed) -> None:
        fd = os.memfd_create("pipeinfer-model", os.MFD_CLOEXEC)
        self._fds.append(fd)
        n_bytes = self.skeleton.states[0].n_bytes
        reserve_large_pages(fd, n_bytes, [(0, n_bytes)])
        _write_fed(fd, feed, n_bytes, "memory for the model")

    def _open_whole(self) -> SliceFile:
        path = Path(f"/proc/self/fd/{self._fds[0]}") if self._fds else None
        if path is None:
            assert self.cache
            path = self._folder(self.cache) / self.skeleton.names[0]
        info = read_model_info(path)
        if info.fingerprint != self.skeleton.fingerprint:
            raise UserError(f"{path} is not what rank 0 has as {self.skeleton.path}; start again")
        found = open_slice(info, 0, info.n_layer)
        if self._fds:
            found.fd = self._fds[0]
        return found


def _write_fed(fd: int, feed: Feed, n_bytes: int, place: str) -> None:
    try:
        with open(fd, "wb", closefd=False) as file:
            for piece in feed.take(n_bytes):
                file.write(piece)
    except OSError as error:
        raise no_room(fd, place, n_bytes, error, "use --slice-cache with room, or more ranks") from None
    feed.finish()
