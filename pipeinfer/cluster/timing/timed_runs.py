"""Artificial runs on a loaded model, of a few sizes in turns. Knows no MPI, and not what is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.kv.blocks import Span
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


def forget(model: StageModel, first: int = 0) -> None:
    """Remove the cells from position `first` on."""
    model.apply([KvOp(OpKind.REMOVE, 0, first=first), KvOp(OpKind.COMPACT, 0)])
