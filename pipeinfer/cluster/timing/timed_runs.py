"""Artificial runs on a loaded model, of a few sizes in turns. Knows no MPI, and not what is timed."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.kv.blocks import BLOCK, Span
from pipeinfer.core.runs import KvOp, OpKind

T = TypeVar("T")


def in_turns(
    sizes: Iterable[int], n_turns: int, time_size: Callable[[int], T], over: Callable[[Mapping[int, list[T]]], bool],
    whole_turns: bool = False,
) -> dict[int, list[T]]:  # fmt: skip
    """Size -> the results of `time_size`, one a turn. Turns spread a short disturbance over all sizes.

    `over`: whether the results so far are enough; called before each size, or with `whole_turns` before each turn.
    """
    found: dict[int, list[T]] = {}
    for turn in range(n_turns):
        for index, size in enumerate(list(found) if turn else sizes):
            if not (index and whole_turns) and over(found):
                return found
            found.setdefault(size, []).append(time_size(size))
    return found


def evaluate(
    model: StageModel, n_rows: int, position: int = 0, n_wanted: int | None = None, n_blocks: int = 0,
    between: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Evaluate rows from `position` on, of which the last `n_wanted`, or all, want logits. `n_blocks` > 0: they are
    blocks of a prompt with so many rows in blocks. `between`: called between layers; must return False."""
    batch = Batch(
        tokens=np.zeros(n_rows, np.int32),
        positions=np.arange(position, position + n_rows, dtype=np.int32),
        seqs=[(0,)] * n_rows,
        hidden=np.full((n_rows, model.n_embd), 0.01, np.float32),
        wanted=np.arange(n_rows) >= n_rows - (n_rows if n_wanted is None else n_wanted),
        span=Span(0, n_blocks) if n_blocks else None,
    )
    model.evaluate(batch, between)


def time_run(
    model: StageModel, n_rows: int, clock: Callable[[], float], position: int = 0, n_wanted: int | None = None,
    n_blocks: int = 0,
) -> float:  # fmt: skip
    """Seconds to `evaluate` these rows."""
    start_s = clock()
    evaluate(model, n_rows, position, n_wanted, n_blocks)
    return clock() - start_s


def time_chunk(model: StageModel, n_rows: int, n_blocks: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a chunk of a prompt that is its first, and of one after that or, of a prompt with so many rows in
    blocks, after a block. The cache must be empty and is empty afterwards."""
    n_wanted = int(not n_blocks)  # of blocks no row is
    first_s = time_run(model, n_rows, clock, 0, n_wanted, n_blocks)
    if not n_blocks or n_rows > BLOCK:
        forget(model)
    if n_rows > BLOCK and n_blocks:
        evaluate(model, BLOCK, 0, 0, n_blocks)
    later_s = time_run(model, n_rows, clock, BLOCK if n_blocks else 0, n_wanted, n_blocks)
    forget(model)
    return first_s, later_s


def forget(model: StageModel, first: int = 0) -> None:
    """Remove the cells from position `first` on."""
    model.apply([KvOp(OpKind.REMOVE, 0, first=first), KvOp(OpKind.COMPACT, 0)])
