"""One stage's blocks of cells on disk: a thread writes and reads them while the stage evaluates. Knows a model's cells
and files; no MPI.

Blocks are written in the order in which they come, and read after all writes before. While too much waits to be written
further blocks are left out: rank 0 learns that when it wants them back.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from pipeinfer.cluster.stages.block_files import BlockFiles, CellBlock
from pipeinfer.cluster.stages.runs import TokenHistory
from pipeinfer.core.interfaces import CellStage
from pipeinfer.core.runs import BlockKey, KvOp, OpKind

WAITING_BYTES = 256 << 20  # of cells that wait to be written, at most
LOWEST_PRIORITY = 19
NO_TOKENS = np.empty(0, np.int32)


class CellStore:
    """`model`: the stage's, whose cells are stored."""

    def __init__(self, files: BlockFiles, model: CellStage) -> None:
        self.files, self._model = files, model
        self._thread = ThreadPoolExecutor(1, "cells", _give_way)
        self._n_waiting = 0  # bytes
        self._counting = threading.Lock()
        self._readings: dict[int, list[tuple[BlockKey, Future[CellBlock | None]]]] = {}
        self._blocks: dict[int, list[CellBlock]] = {}  # of readings that are joined

    def apply(self, op: KvOp, history: TokenHistory | None) -> None:
        """A STORE, READ or LOAD operation. `history`: of the last stage."""
        if op.kind is OpKind.STORE:
            start, end = op.rows
            tokens = np.array(history.last(op.src, end, end - start), np.int32) if history else NO_TOKENS
            self._store(op, tokens)
        elif op.kind is OpKind.READ:
            reading = self._readings.setdefault(op.src, [])
            reading.append((op.key, self._thread.submit(self.files.read, op.key)))
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
        tokens, n_blocks = [NO_TOKENS], 0
        while op.last and self._model.next_position(op.dst) < op.last:
            self._model.load_cells(op.dst, blocks[n_blocks].cells)
            tokens.append(blocks[n_blocks].tokens)
            n_blocks += 1
        return np.concatenate(tokens)


def _give_way() -> None:
    """Let the threads that compute go first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
