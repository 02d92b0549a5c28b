"""How long single rows take in the layers of a loaded slice, and after them. Knows sizes, no MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeinfer.cluster.layer_speed import LayerSpeed
from pipeinfer.cluster.timed_runs import evaluate, forget
from pipeinfer.core.interfaces import StageModel
from pipeinfer.errors import ModelFault

SETTLED_S, TIMED_S = 0.1, 0.25
"""Rows that begin so early do not count: a rank has yet to find out for how many threads there are cores. Those after
them are evaluated for so long."""

N_ROWS, MOST_S = 4, 0.8
"""Rows that count, at least, and longer if need be, but not for ever: one that waited for cores takes half a second."""


def time_layers(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> LayerSpeed:
    """Of each layer the best of rows one after another: what other ranks of the host take for themselves is taken from
    every row, what disturbs for a moment is not the rank's. The cache must be empty and is empty afterwards.

    `layer_bytes`: of its layers; `output_bytes`: of the output matrix behind them, 0 where it is another stage's.
    `asks`: what the model calls between layers it calls when they are computed. Else, and where it calls nothing, all
    bytes are taken to be equally fast.
    """
    found: list[_Row] = []
    start_s = clock()
    while not _is_enough(len(found), clock() - start_s):
        counts = clock() - start_s >= SETTLED_S
        row = _time_row(model, layer_bytes, output_bytes, clock, asks)
        if counts:
            found.append(row)
    layers_s = sum(map(min, zip(*(row.parts_s for row in found), strict=True)))
    outputs = [row.output_s for row in found if row.output_s is not None]
    return LayerSpeed(layers_s / found[0].n_bytes, min(outputs, default=None))


def _is_enough(n_rows: int, elapsed_s: float) -> bool:
    return n_rows > 0 and elapsed_s >= (SETTLED_S + TIMED_S if n_rows >= N_ROWS else MOST_S)


class _Row(NamedTuple):
    """Seconds of its parts, single layers where they are known, which have `n_bytes`, and of what follows the last."""

    parts_s: list[float]
    n_bytes: int
    output_s: float | None


def _time_row(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> _Row:
    marks: list[float] = []

    def mark() -> bool:
        if asks:
            marks.append(clock())
        return False

    start_s = clock()
    with contextlib.suppress(ModelFault):  # what blank weights compute is no model's answer
        evaluate(model, 1, between=mark)
    end_s = clock()
    forget(model)
    ends = marks if model.is_last else [*marks, end_s]
    if len(ends) != len(layer_bytes):
        return _Row([end_s - start_s], sum(layer_bytes) + output_bytes, None)
    output_s = end_s - ends[-1] if model.is_last else None
    if len(ends) == 1:
        return _Row([ends[0] - start_s], layer_bytes[0], output_s)
    # what a run costs on top is in its first layer's time
    return _Row([end - before for before, end in pairwise(ends)], sum(layer_bytes[1:]), output_s)
