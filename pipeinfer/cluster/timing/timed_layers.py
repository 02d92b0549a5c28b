"""Time single rows in the layers of a loaded slice, and in its output. Knows sizes, no MPI."""

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.timing.timed_runs import evaluate, forget
from pipeinfer.core.interfaces import StageModel
from pipeinfer.errors import ModelFault

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
