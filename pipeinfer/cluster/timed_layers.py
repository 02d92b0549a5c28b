"""How long single rows take in the layers of a loaded slice, and after them. Knows sizes, no MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from pipeinfer.cluster.layer_speed import LayerSpeed
from pipeinfer.cluster.timed_runs import evaluate, forget
from pipeinfer.core.interfaces import StageModel
from pipeinfer.errors import ModelFault

SETTLED_S, TIMED_S = 0.1, 0.25
"""Rows are evaluated for so long before they count, until each rank has the threads for which there are cores, and
then for so long."""


def time_layers(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> LayerSpeed:
    """Of the best of rows one after another: what other ranks of the host take for themselves is taken from every row,
    what disturbs for a moment is not the rank's. The cache must be empty and is empty afterwards.

    `layer_bytes`: of its layers; `output_bytes`: of the output matrix behind them, 0 where it is another stage's.
    `asks`: what the model calls between layers it calls when they are computed. Else, and where it calls nothing, all
    bytes are taken to be equally fast.
    """
    found: list[tuple[float, float | None]] = []
    start_s = clock()
    while not found or clock() - start_s < SETTLED_S + TIMED_S:
        row = _time_row(model, layer_bytes, output_bytes, clock, asks)
        if clock() - start_s > SETTLED_S:
            found.append(row)
    outputs = [output_s for _, output_s in found if output_s is not None]
    return LayerSpeed(min(layer for layer, _ in found), min(outputs, default=None))


def _time_row(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> tuple[float, float | None]:
    """Seconds of a byte of layers, and of what follows the last one, where that is known."""
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
        return (end_s - start_s) / (sum(layer_bytes) + output_bytes), None
    # what a run costs on top is in its first layer's time
    layers_s, n_bytes = (
        (ends[-1] - ends[0], sum(layer_bytes[1:])) if len(ends) > 1 else (ends[0] - start_s, layer_bytes[0])
    )
    return layers_s / n_bytes, end_s - ends[-1] if model.is_last else None
