"""One stage's blocks of cells, of which the least recently used are removed: on disk, files in a folder of one rank, or
in this process's memory until the job ends. A thread writes and reads them while the stage evaluates. Knows no MPI.

Blocks are written in the order in which they come, and read after all writes before. While too much waits to be written
further blocks are left out: rank 0 learns that when it wants them back.

The folder has one for each slice of a model, `slice` in what follows: all that the bits of its cells depend on. A file
is named by its block's key; it has a header, the tokens as int32 and the cells. It is written under another name and
renamed, so that it is complete; the digest in the header finds what was damaged later. What cannot be used is removed.
"""

import contextlib
import fcntl
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.stages.runs import TokenHistory
from pipeinfer.core.interfaces import Blocks, CellBlock, CellStage
from pipeinfer.core.runs import BlockKey, KvOp, OpKind
from pipeinfer.errors import UserError
from pipeinfer.text import size_text

HEADER = struct.Struct("<16sIQ16s")
"""The format, tokens, bytes of cells, and the digest of all else: key, slice, tokens, cells."""

ID_BYTES = 4  # of a token
FORMAT = b"pipeinfer-kv 1\0\0"
SUFFIX, UNFINISHED = ".kv", ".new"
NAME = re.compile(r"[0-9a-f]{32}\.kv")
LOCK_S, LOOK_S = 5.0, 0.1  # seconds to wait for the folder while a job that is ending has it, and between looks


class BlockFiles:
    """The files of one rank, of `n_bytes_max` together, over all slices. One process has the folder at a time, or any
    number of those that are `read_only`, which change nothing in it."""

    def __init__(
        self, folder: Path, slice: str, n_bytes_max: int, notice: Callable[[str], object], read_only: bool = False
    ) -> None:
        """`notice`: takes a line when a block cannot be written, once, and when there is nothing that could be read.
        Raises UserError if the folder cannot be had."""
        self._read_only = read_only
        self._slice, self._n_bytes_max, self._notice = blake2b(slice.encode(), digest_size=16), n_bytes_max, notice
        self._root, self._folder = folder, folder / self._slice.hexdigest()
        self._sizes = OrderedDict[Path, int]()  # the least recently used first
        self.n_bytes = 0
        try:
            for each in (folder, self._folder):  # which nobody else can read
                if read_only and not each.exists():
                    continue
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
                if each.stat().st_uid != os.geteuid():
                    raise PermissionError(0, "the folder is another user's")
                if not read_only:
                    each.chmod(0o700)
            self._lock = self._open_lock(folder / "lock")
            if self._lock is not None:
                self._take_lock(self._lock)
                self._look()
        except OSError as error:
            where = f"--kv-dir: {error.filename or folder}: {error.strerror or error}"
            raise UserError(f"{where}; name a folder of yours with room, or leave --kv-disk out") from None
        if not read_only:
            self._make_room(0)
        elif not self.keys:
            notice(f"--kv-read-only: {self._root} has nothing of these layers; nothing is read, and nothing written")

    @property
    def keys(self) -> list[BlockKey]:
        """Of the blocks of this slice."""
        names = (path.stem for path in self._sizes if path.parent == self._folder)
        return [BlockKey(*struct.unpack("<qq", bytes.fromhex(name))) for name in names]

    def write(self, key: BlockKey, block: CellBlock) -> None:
        """Write a block, unless it is there or larger than all files may be. Not if `read_only`."""
        assert not self._read_only, f"{key} is written where blocks are only read"
        path, tokens = self._path(key), block.tokens.astype("<i4").tobytes()
        n_bytes = HEADER.size + len(tokens) + block.cells.nbytes
        if path in self._sizes:
            self.use([key])
            return
        if n_bytes > self._n_bytes_max:  # a state: of others rank 0 knows how much there is room for
            self._say(f"--kv-disk: {size_text(self._n_bytes_max)} has no room for a state of {size_text(n_bytes)}")
            return
        self._make_room(n_bytes)
        unfinished = path.with_suffix(UNFINISHED)
        header = HEADER.pack(FORMAT, len(block.tokens), block.cells.nbytes, self._digest(key, tokens, block.cells))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(unfinished, flags, 0o600), "wb") as file:
                file.write(header + tokens)
                file.write(block.cells.data)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._say(f"--kv-disk: {path} cannot be written: {error.strerror or error}; texts are not kept there")
        else:
            self._sizes[path] = n_bytes
            self.n_bytes += n_bytes

    def read(self, key: BlockKey) -> CellBlock | None:
        """A block with the bits that were written; None if there is none."""
        path = self._path(key)
        try:
            content = np.fromfile(path, np.uint8)
        except OSError:
            content = np.empty(0, np.uint8)
        if block := self._checked(key, content):
            return block
        self._remove(path)
        return None

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Note a use of these blocks, the first of which are removed last."""
        for path in map(self._path, reversed(keys)):
            if path in self._sizes and not self._read_only:
                self._sizes.move_to_end(path)
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(now_ns := time.time_ns(), now_ns))  # a file system's own clock is coarse

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            os.close(self._lock)

    def _say(self, line: str) -> None:
        """Once: what follows has the same cause."""
        self._notice(line)
        self._notice = lambda line: None

    def _path(self, key: BlockKey) -> Path:
        return self._folder / f"{struct.pack('<qq', *key).hex()}{SUFFIX}"

    def _digest(self, key: BlockKey, tokens: bytes, cells: npt.NDArray[np.uint8]) -> bytes:
        digest = blake2b(self._slice.digest() + struct.pack("<qq", *key) + tokens, digest_size=16)
        digest.update(cells.data)
        return digest.digest()

    def _checked(self, key: BlockKey, content: npt.NDArray[np.uint8]) -> CellBlock | None:
        """The block that a file's content is; None if it is none, or another one."""
        if len(content) < HEADER.size:
            return None
        format, n_tokens, n_cell_bytes, digest = HEADER.unpack_from(content.data)
        cells_at = HEADER.size + ID_BYTES * n_tokens
        if format != FORMAT or len(content) != cells_at + n_cell_bytes:
            return None
        tokens, cells = content[HEADER.size : cells_at], content[cells_at:]
        if digest != self._digest(key, tokens.tobytes(), cells):
            return None
        return CellBlock(np.frombuffer(tokens.tobytes(), "<i4"), cells)

    # -- the folder

    def _open_lock(self, path: Path) -> int | None:
        """The descriptor of the lock's file; None where there is none to read."""
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        if not self._read_only:
            return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags | os.O_RDONLY)
        return None

    def _take_lock(self, lock: int) -> None:
        """Raises UserError if another process holds it."""
        end_s, is_told = time.monotonic() + LOCK_S, False
        while True:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if self._read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    way_out = "end it, or name another folder with --kv-dir"
                    raise UserError(f"--kv-disk: another job has {self._root}; {way_out}") from None
                if not is_told:
                    self._notice(f"--kv-disk: another job has {self._root}; waiting for its end, {LOCK_S:g} s at most")
                is_told = True
                time.sleep(LOOK_S)

    def _look(self) -> None:
        """Take stock of what earlier jobs left; remove what no job can use."""
        ages: list[tuple[float, Path, int]] = []
        for folder in filter(Path.is_dir, self._root.iterdir()):
            for path in folder.iterdir():
                status = path.lstat()
                if NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    ages.append((status.st_mtime, path, status.st_size))
                elif path.suffix in (SUFFIX, UNFINISHED) and not self._read_only:
                    with contextlib.suppress(OSError):  # a folder
                        path.unlink(missing_ok=True)
        self._sizes.update((path, n_bytes) for _, path, n_bytes in sorted(ages))
        self.n_bytes = sum(self._sizes.values())

    def _make_room(self, n_bytes: int) -> None:
        while self.n_bytes + n_bytes > self._n_bytes_max and self._sizes:
            self._remove(next(iter(self._sizes)))

    def _remove(self, path: Path) -> None:
        self.n_bytes -= self._sizes.pop(path, 0)
        if self._read_only:
            return
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


class BlockMemory:
    """Blocks in memory, of `n_bytes_max` together."""

    def __init__(self, n_bytes_max: int, notice: Callable[[str], object]) -> None:
        """`notice`: takes a line when there is no room for a block, once."""
        self._n_bytes_max, self._notice = n_bytes_max, notice
        self._blocks = OrderedDict[BlockKey, CellBlock]()  # the least recently used first
        self.n_bytes = 0

    @property
    def keys(self) -> list[BlockKey]:
        return [*self._blocks]

    def write(self, key: BlockKey, block: CellBlock) -> None:
        """See Blocks."""
        if key in self._blocks:
            self.use([key])
        elif (n_bytes := _bytes_of(block)) > self._n_bytes_max:  # a state: of others rank 0 knows how much is room for
            self._notice(f"-cram: {size_text(self._n_bytes_max)} has no room for a state of {size_text(n_bytes)}")
            self._notice = lambda line: None
        else:
            while self.n_bytes + n_bytes > self._n_bytes_max:
                _, oldest = self._blocks.popitem(last=False)
                self.n_bytes -= _bytes_of(oldest)
            self._blocks[key] = block
            self.n_bytes += n_bytes

    def read(self, key: BlockKey) -> CellBlock | None:
        """See Blocks."""
        return self._blocks.get(key)

    def use(self, keys: Sequence[BlockKey]) -> None:
        """See Blocks."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def close(self) -> None:
        self._blocks.clear()
        self.n_bytes = 0


def _bytes_of(block: CellBlock) -> int:
    return block.tokens.nbytes + block.cells.nbytes


WAITING_BYTES = 256 << 20  # of cells that wait to be written, at most
LOWEST_PRIORITY = 19
NO_TOKEN_IDS = np.empty(0, np.int32)


class CellStore:
    """`model`: the stage's, whose cells are stored. `files`: where."""

    def __init__(self, files: Blocks, model: CellStage) -> None:
        self.files, self._model = files, model
        self._thread = ThreadPoolExecutor(1, "cells", _give_way)
        self._n_waiting = 0  # bytes
        self._counting = threading.Lock()
        self._readings: dict[int, list[tuple[BlockKey, Future[CellBlock | None]]]] = {}
        self._blocks: dict[int, list[CellBlock]] = {}  # of readings that are joined

    def apply(self, op: KvOp, history: TokenHistory | None) -> None:
        """A STORE, READ, LOAD or USE operation. `history`: of the last stage."""
        if op.kind is OpKind.STORE:
            start, end = op.rows
            tokens = np.array(history.last(op.src, end, end - start), np.int32) if history else NO_TOKEN_IDS
            self._store(op, tokens)
        elif op.kind is OpKind.READ:
            reading = self._readings.setdefault(op.src, [])
            reading.append((op.key, self._thread.submit(self.files.read, op.key)))
        elif op.kind is OpKind.USE:
            self._thread.submit(self.files.use, [op.key])
        else:
            tokens = self._load(self._blocks.pop(op.src, []), op)
            if history and op.last:
                history.put(op.dst, tokens.tolist())

    def join(self, reading: int) -> int:
        """Wait until a reading is done; the number of its first blocks that are there."""
        blocks = self._blocks[reading] = list[CellBlock]()
        pairs = self._readings.pop(reading, [])
        for _, future in pairs:
            if (block := future.result()) is None:
                break
            blocks.append(block)
        self._thread.submit(self.files.use, [key for key, _ in pairs[: len(blocks)]])
        return len(blocks)

    def close(self) -> None:
        """Return when all is written."""
        self._thread.shutdown()
        self.files.close()

    def _store(self, op: KvOp, tokens: npt.NDArray[np.int32]) -> None:
        if self._n_waiting > WAITING_BYTES:
            return
        if self._model.has_states and self._model.next_position(op.src) != op.rows[1]:
            return  # rows before it were left out here
        block = CellBlock(tokens, self._model.save_cells(op.src, *op.rows))
        with self._counting:
            self._n_waiting += block.cells.nbytes
        self._thread.submit(self._write, op.key, block)

    def _write(self, key: BlockKey, block: CellBlock) -> None:
        try:
            self.files.write(key, block)
        finally:
            with self._counting:
                self._n_waiting -= block.cells.nbytes

    def _load(self, blocks: Sequence[CellBlock], op: KvOp) -> npt.NDArray[np.int32]:
        """Make the first blocks the cells [0, op.last) of the operation's sequence; their tokens."""
        tokens, n_blocks = [NO_TOKEN_IDS], 0
        while op.last and self._model.next_position(op.dst) < op.last:
            self._model.load_cells(op.dst, blocks[n_blocks].cells)
            tokens.append(blocks[n_blocks].tokens)
            n_blocks += 1
        return np.concatenate(tokens)


def _give_way() -> None:
    """Let the threads that compute go first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
