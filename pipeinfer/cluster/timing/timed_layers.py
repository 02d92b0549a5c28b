"""Time rows in the layers of a loaded slice, and in its output. Knows sizes, no MPI."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.cluster.timing.slice_times import SliceTimes
from pipeinfer.cluster.timing.timed_runs import evaluate, forget, in_turns
from pipeinfer.core.interfaces import StageModel
from pipeinfer.errors import ModelFault

SETTLED_S, TIMED_S = 0.1, 0.25
"""Rows in the first SETTLED_S do not count: the rank still tries numbers of threads. TIMED_S: time of the others."""

N_ROWS, MOST_S = 4, 0.8
"""At least N_ROWS rows count, within MOST_S: a row that waits for cores takes half a second."""

ROWS = (1, 2, 4, 8)
"""Sizes of the timed runs."""
CHUNK = ROWS[-1]

N_TURNS, N_RESTS, REST_S, RESTS_S = 12, 10, 0.003, 0.1
CONTEXT, FILLED_S = 128, 0.2
"""Tokens before a row whose cost is timed, unless evaluating so many takes longer than FILLED_S."""

N_BEST, BEST_S = 25, 0.06


def time_layers(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool
) -> LayerSpeed:
    """The best time of each layer, of consecutive rows: the load of the host's other ranks slows down every row, short
    disturbances do not count. The cache must be empty and is empty afterwards.

    `layer_bytes`: of its layers; `output_bytes`: of the output matrix, 0 if that is another stage's. `asks`: the model
    calls back between layers once they are computed. Else, or if it never calls, all bytes count as equally fast.
    """
    found: list[_Run] = []
    start_s = clock()
    while not _is_enough(len(found), clock() - start_s):
        counts = clock() - start_s >= SETTLED_S
        row = _time_run(model, 1, layer_bytes, output_bytes, clock, asks)
        if counts:
            found.append(row)
    outputs = [row.output_s for row in found if row.output_s is not None]
    return LayerSpeed(_layers_s(found) / found[0].n_bytes, min(outputs, default=None))


def _is_enough(n_rows: int, elapsed_s: float) -> bool:
    return n_rows > 0 and elapsed_s >= (SETTLED_S + TIMED_S if n_rows >= N_ROWS else MOST_S)


def time_slice(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Callable[[], float], asks: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> SliceTimes:  # fmt: skip
    """The best times of runs of ROWS, while nothing else computes; larger sizes while there is time. Otherwise as
    `time_layers`."""

    def once(n_rows: int) -> _Run:
        return _time_run(model, n_rows, layer_bytes, output_bytes, clock, asks)

    def over(found: Mapping[int, object]) -> bool:
        return bool(found) and clock() - start_s >= SETTLED_S + TIMED_S

    start_s = clock()
    once(1)
    while clock() - start_s < SETTLED_S:
        once(1)
    runs = in_turns(ROWS, N_TURNS, lambda n_rows: (once(n_rows), once(n_rows)), over)
    changed = {n_rows: [first for first, _ in found[1:] or found] for n_rows, found in runs.items()}
    after_rest: list[_Run] = []
    rests_s = clock()
    while not after_rest or (len(after_rest) < N_RESTS and clock() - rests_s < RESTS_S):
        once(1)
        sleep(REST_S)
        after_rest.append(once(1))
    context_s = _time_context(model, len(layer_bytes), clock)
    again = {n_rows: [second for _, second in found] for n_rows, found in runs.items()}
    s_per_byte = tuple(_layers_s(found) / found[0].n_bytes for found in again.values())
    outputs = [[run.output_s for run in found if run.output_s is not None] for found in again.values()]
    output_s = tuple(map(min, outputs)) if all(outputs) else ()
    layer_s = s_per_byte[0] * sum(layer_bytes) / len(layer_bytes)
    return SliceTimes(
        tuple(map(float, again)), s_per_byte, output_s, context_s,
        run_s=max(0.0, min(run.first_s for run in again[1]) - layer_s),
        reshape_s=max(0.0, min(_best_s(found) - _best_s(again[n_rows]) for n_rows, found in changed.items())),
        rest_s=max(0.0, _best_s(after_rest) - _best_s(again[1])),
    )  # fmt: skip


def _time_context(model: StageModel, n_layers: int, clock: Callable[[], float]) -> float | None:
    """Seconds that a token before a row adds in each layer; None if there was no time to evaluate so many."""
    row_s = _best_row(model, 0, clock)
    forget(model)
    start_s, n_before = clock(), 0
    while n_before < CONTEXT and clock() - start_s < FILLED_S:
        _evaluate(model, CHUNK, n_before)
        n_before += CHUNK
    found = (_best_row(model, n_before, clock) - row_s) / (n_before * n_layers) if n_before == CONTEXT else None
    forget(model)
    return None if found is None else max(0.0, found)


def _best_row(model: StageModel, n_before: int, clock: Callable[[], float]) -> float:
    """Seconds of the fastest row behind `n_before` tokens and a few rows. No cells are removed in between: layers with
    states cannot do that."""
    _evaluate(model, 1, n_before)  # it has another size than the run before
    start_s, best_s = clock(), math.inf
    for number in range(1, 1 + N_BEST):
        begun_s = clock()
        _evaluate(model, 1, n_before + number)
        best_s = min(best_s, clock() - begun_s)
        if clock() - start_s > BEST_S:
            break
    return best_s


def _evaluate(model: StageModel, n_rows: int, position: int) -> None:
    with contextlib.suppress(ModelFault):  # blank weights may compute anything
        evaluate(model, n_rows, position)


class _Run(NamedTuple):
    """Seconds of its parts, which are single layers if these are known, and their bytes; of the output; of all; and of
    the first layer with a run's fixed cost, if that is not one of the parts."""

    parts_s: list[float]
    n_bytes: int
    output_s: float | None
    whole_s: float
    first_s: float = 0.0


def time_rows_for(model: StageModel, clock: Callable[[], float], seconds: float) -> float:
    """Seconds of the fastest of single rows that are evaluated for so long."""
    start_s, found = clock(), list[_Run]()
    while not found or clock() - start_s < seconds:
        found.append(_time_run(model, 1, (1,), 0, clock, False))
    return _best_s(found)


def _layers_s(runs: Sequence[_Run]) -> float:
    """The sum of each layer's best time."""
    return sum(map(min, zip(*(run.parts_s for run in runs), strict=True)))


def _best_s(runs: Sequence[_Run]) -> float:
    return min(run.whole_s for run in runs)


def _time_run(
    model: StageModel,
    n_rows: int,
    layer_bytes: Sequence[int],
    output_bytes: int,
    clock: Callable[[], float],
    asks: bool,
) -> _Run:
    marks: list[float] = []

    def mark() -> bool:
        if asks:
            marks.append(clock())
        return False

    start_s = clock()
    with contextlib.suppress(ModelFault):  # blank weights may compute anything
        evaluate(model, n_rows, between=mark)
    end_s = clock()
    forget(model)
    whole_s, ends = end_s - start_s, marks if model.is_last else [*marks, end_s]
    if len(ends) != len(layer_bytes):
        return _Run([whole_s], sum(layer_bytes) + output_bytes, None, whole_s)
    output_s = end_s - ends[-1] if model.is_last else None
    if len(ends) == 1:
        return _Run([ends[0] - start_s], layer_bytes[0], output_s, whole_s)
    layers_s = [end - before for before, end in pairwise(ends)]
    return _Run(layers_s, sum(layer_bytes[1:]), output_s, whole_s, first_s=ends[0] - start_s)
