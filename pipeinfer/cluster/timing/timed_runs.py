"""Artificial runs on a loaded model, of a few sizes in turns, and single rows layer by layer. Knows no MPI."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.kv.blocks import BLOCK, Span
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.errors import ModelFault

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


SETTLED_S, TIMED_S = 0.1, 0.25
"""Rows in the first SETTLED_S do not count: weights are mapped, threads wake. TIMED_S: time of the others."""

N_ROWS, MOST_S = 4, 0.8
"""At least N_ROWS rows count, within MOST_S: a row that waits for cores takes half a second."""


def time_layers(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> LayerSpeed:
    """The best time of each layer, of consecutive rows: the load of the host's other ranks slows down every row, short
    disturbances do not count. The cache must be empty and is empty afterwards.

    `layer_bytes`: of its layers; `output_bytes`: of the output matrix, 0 if that is another stage's. `asks`: the model
    calls back between layers once they are computed. Else, or if it never calls, all bytes count as equally fast.
    """
    found: list[_Row] = []
    start_s = clock()
    while not _is_enough(len(found), clock() - start_s):
        counts = clock() - start_s >= SETTLED_S
        row = _time_row(model, layer_bytes, output_bytes, clock, asks)
        if counts:
            found.append(row)
    outputs = [row.output_s for row in found if row.output_s is not None]
    layers_s = sum(map(min, zip(*(row.parts_s for row in found), strict=True)))
    return LayerSpeed(layers_s / found[0].n_bytes, min(outputs, default=None))


def _is_enough(n_rows: int, elapsed_s: float) -> bool:
    return n_rows > 0 and elapsed_s >= (SETTLED_S + TIMED_S if n_rows >= N_ROWS else MOST_S)


class _Row(NamedTuple):
    """Seconds of its parts, which are single layers if these are known, and their bytes; of the output."""

    parts_s: list[float]
    n_bytes: int
    output_s: float | None = None


def _time_row(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> _Row:
    marks: list[float] = []

    def mark() -> bool:
        if asks:
            marks.append(clock())
        return False

    start_s = clock()
    with contextlib.suppress(ModelFault):  # blank weights may compute anything
        evaluate(model, 1, between=mark)
    end_s = clock()
    forget(model)
    ends = marks if model.is_last else [*marks, end_s]
    if len(ends) != len(layer_bytes):
        return _Row([end_s - start_s], sum(layer_bytes) + output_bytes)
    output_s = end_s - ends[-1] if model.is_last else None
    if len(ends) == 1:
        return _Row([ends[0] - start_s], layer_bytes[0], output_s)
    # the first layer is left out: its time has a run's fixed cost in it
    return _Row([end - before for before, end in pairwise(ends)], sum(layer_bytes[1:]), output_s)
