"""Time a loaded model: rows, single layers, rows behind a context, chunks of prompts. Knows no MPI. All of it goes one
way: `time_in_turns` decides how often which sizes are timed, `time_run` times one run. The model's cache must be empty
and is empty afterwards."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from pipeinfer.cluster.hosts.host import LayerSpeed
from pipeinfer.core.blocks import BLOCK, Span
from pipeinfer.core.interfaces import Batch, StageModel
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.disk_cache import DiskCache
from pipeinfer.errors import ModelFault

T = TypeVar("T")
Seconds = Callable[[], float]  # a clock
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MAX_COST = 3.0  # runs that take so many times a single row's time are never chosen, so larger sizes need not be timed

MAX_ROW_COST = 1.5
"""A further row takes at most so many times a single row's time; a size that seems to take longer was disturbed."""

QUESTION_ROWS_MIN = 4
CREDIBLE = 0.8  # of the cached time of one row: if the host is faster now, it was busy then
N_CHECKS = 3  # runs of which the best counts
N_PASSES, PASSES_S = 10, 0.2
"""Further timings of each size, while less than PASSES_S has passed: short runs vary the most."""

CONTEXT_ROWS = 4  # rows of a run that is timed behind a context: more rows separate attention from noise
CONTEXT_S = 0.3  # seconds that filling a cache for that may take

CONTEXTS = 64, 256
"""Tokens of that context, at least and at most. If fewer fit into the time, only long contexts matter, and their cost
is learned from the first few runs."""

SETTLED_S, TIMED_S = 0.1, 0.25
"""Rows in the first SETTLED_S of timing layers do not count: weights are mapped, threads wake. TIMED_S: of others."""

N_ROWS, MAX_S = 4, 0.8  # at least N_ROWS rows count, within MAX_S: a row that waits for cores takes half a second


# -- the procedure


def time_in_turns(
    sizes: Iterable[int],
    n_turns: int,
    measure: Callable[[int], T],
    is_enough: Callable[[Mapping[int, list[T]]], bool],
    whole_turns: bool = False,
) -> dict[int, list[T]]:
    """Size -> the results of `measure`, one a turn. Turns spread a short disturbance over all sizes. `is_enough`:
    whether these results suffice; called before each size, or with `whole_turns` before each turn."""
    results: dict[int, list[T]] = {}
    for turn in range(n_turns):
        for index, size in enumerate(list(results) if turn else sizes):
            if not (index and whole_turns) and is_enough(results):
                return results
            results.setdefault(size, []).append(measure(size))
    return results


def evaluate(
    model: StageModel,
    n_rows: int,
    position: int = 0,
    n_wanted: int | None = None,
    n_blocks: int = 0,
    between: Callable[[], bool] = lambda: False,
) -> None:
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


def time_run(
    model: StageModel, n_rows: int, clock: Seconds, position: int = 0, n_wanted: int | None = None, n_blocks: int = 0
) -> float:
    """Seconds to `evaluate` these rows, whose cells stay."""
    start_s = clock()
    evaluate(model, n_rows, position, n_wanted, n_blocks)
    return clock() - start_s


# -- rows


def time_rows(model: StageModel, clock: Seconds, budget_s: float = 1.0) -> dict[int, float]:
    """Rows of a run -> seconds, the best of some; always for one row, for more while the budget lasts and they are
    cheap. Where runs are so short that it counts, several rows are timed after another size, after which libllama
    rebuilds its graph: they come between single rows. The first run, which reads the weights in, does not count."""
    start_s = clock()
    measure = _row_timer(model, clock)
    measure(1)

    def is_enough(results: Mapping[int, list[float]]) -> bool:
        best = [min(times) for times in results.values()]
        return bool(best) and (clock() - start_s > budget_s or max(best) > MAX_COST * best[0])

    first = time_in_turns(ROWS, 1, lambda n_rows: min(measure(n_rows), measure(n_rows)), is_enough)
    again = time_in_turns(first, N_PASSES, measure, lambda _: clock() - start_s > PASSES_S, whole_turns=True)
    again[1] = [*again.get(1, []), *first[1]]
    return {n_rows: min(again.get(n_rows) or times) for n_rows, times in first.items()}


def time_row(model: StageModel, clock: Seconds) -> float:
    """Seconds of a run of one row."""
    measure = _row_timer(model, clock)
    measure(1)
    return min(measure(1) for _ in range(N_CHECKS))


def _row_timer(model: StageModel, clock: Seconds) -> Callable[[int], float]:
    """Rows -> seconds of a run and of removing its cells: real runs have operations on the cache too."""

    def measure(n_rows: int) -> float:
        start_s = clock()
        evaluate(model, n_rows)
        forget(model)
        return clock() - start_s

    return measure


def recall_rows(
    model: StageModel, clock: Seconds, cache: DiskCache, name: str, budget_s: float = 1.0
) -> dict[int, float]:
    """`time_rows`, cached under a name with everything that the times depend on. Cached times are scaled to a single
    row's time now. If that was longer then, the host was busy, and all is timed again."""
    if cached := _read_rows(cache.get(name)):
        row_s = time_row(model, clock)
        if row_s >= CREDIBLE * cached[1]:
            return {n_rows: seconds * row_s / cached[1] for n_rows, seconds in cached.items()}
    start_s = clock()
    times = time_rows(model, clock, budget_s)
    # a disturbed size may look too expensive: a table that ends early for no reason is not cached
    is_complete = len(times) == len(ROWS) or max(times.values()) > MAX_COST * times[1] or clock() - start_s > budget_s
    if is_complete and _is_credible(times):
        cache.put(name, {str(n_rows): seconds for n_rows, seconds in times.items()})
    return times


def _read_rows(value: Any) -> dict[int, float]:
    """A value that `recall_rows` has cached; empty for anything else."""
    if not isinstance(value, dict) or "1" not in value or not value.keys() <= set(map(str, ROWS)):
        return {}
    if not all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in value.values()):
        return {}
    times = {n_rows: value[str(n_rows)] for n_rows in ROWS if str(n_rows) in value}
    return times if _is_credible(times) else {}


def _is_credible(times: Mapping[int, float]) -> bool:
    return all(
        seconds <= times[fewer] + MAX_ROW_COST * (n_rows - fewer) * times[1]
        for (fewer, _), (n_rows, seconds) in pairwise(times.items())
    )


# -- rows behind a context, and chunks of prompts


def time_context(model: StageModel, row_times: Mapping[int, float], n_cells: int, clock: Seconds) -> float | None:
    """Seconds that each token before a row adds to it; None if timing that would take long. `row_times`: see
    `time_rows`; `n_cells`: of the cache."""
    n_rows = max(n for n in row_times if n <= CONTEXT_ROWS)
    n_context = affordable_context(row_times, n_cells - n_rows)
    if not n_context:
        return None

    def best_s(position: int) -> float:
        """Seconds of a run alone: packing a cache takes time by its contents, and is rare."""
        times = []
        for _ in range(N_CHECKS):
            times.append(time_run(model, n_rows, clock, position))
            forget(model, position)
        return min(times)

    empty_s = best_s(0)
    n_fill = min(row_times, key=lambda n: row_times[n] / n)
    for position in range(0, n_context, n_fill):
        evaluate(model, min(n_fill, n_context - position), position, 0)
    filled_s = best_s(n_context)
    forget(model)
    return max(0.0, filled_s - empty_s) / (n_rows * n_context)


def recall_context(
    model: StageModel, row_times: Mapping[int, float], n_cells: int, clock: Seconds, cache: DiskCache, name: str
) -> float | None:
    """`time_context`, cached like `recall_rows`, in units of a single row's time."""
    cached = cache.get(name)
    if isinstance(cached, float) and 0 <= cached < 1:
        return cached * row_times[1]
    context_s = time_context(model, row_times, n_cells, clock)
    if context_s is not None:
        cache.put(name, context_s / row_times[1])
    return context_s


def affordable_context(row_times: Mapping[int, float], n_cells: int) -> int:
    """Tokens of the context behind which runs are timed; 0: none."""
    row_s = min(seconds / n_rows for n_rows, seconds in row_times.items())
    n_context = min(CONTEXTS[1], n_cells, int(CONTEXT_S / row_s))
    return n_context if n_context >= CONTEXTS[0] else 0


def time_chunk(model: StageModel, n_rows: int, n_blocks: int, clock: Seconds) -> tuple[float, float]:
    """Seconds of a chunk that is the first of a prompt, and of one after that or, of a prompt with `n_blocks` rows in
    blocks, after a block."""
    n_wanted = int(not n_blocks)  # no row in blocks
    first_s = time_run(model, n_rows, clock, 0, n_wanted, n_blocks)
    if not n_blocks or n_rows > BLOCK:
        forget(model)
    if n_rows > BLOCK and n_blocks:
        evaluate(model, BLOCK, 0, 0, n_blocks)
    later_s = time_run(model, n_rows, clock, BLOCK if n_blocks else 0, n_wanted, n_blocks)
    forget(model)
    return first_s, later_s


# -- single layers


def time_layers(
    model: StageModel, layer_bytes: Sequence[int], output_bytes: int, clock: Seconds, stops: bool
) -> LayerSpeed:
    """The best time of each layer, of consecutive rows: the load of the host's other ranks slows down every row, short
    disturbances do not count. `layer_bytes`: of its layers; `output_bytes`: of the output matrix, 0 if that is another
    stage's. `stops`: the model calls `stop` between layers once they are computed. Else, or if it never does, all bytes
    count as equally fast."""
    start_s = clock()

    def measure(n_rows: int) -> tuple[bool, list[float]]:
        """Whether the row counts, and the times of its start, of the ends of layers, and of its end."""
        counts, times_s = clock() - start_s >= SETTLED_S, [clock()]

        def note_end() -> bool:
            if stops:
                times_s.append(clock())
            return False

        with contextlib.suppress(ModelFault):  # blank weights may compute anything
            evaluate(model, n_rows, between=note_end)
        times_s.append(clock())
        forget(model)
        return counts, times_s

    def is_enough(rows: Mapping[int, list[tuple[bool, list[float]]]]) -> bool:
        n_rows, elapsed_s = sum(counts for counts, _ in rows.get(1, ())), clock() - start_s
        return n_rows > 0 and elapsed_s >= (SETTLED_S + TIMED_S if n_rows >= N_ROWS else MAX_S)

    n_turns = 1 << 62  # `is_enough` ends it
    rows = [times_s for counts, times_s in time_in_turns((1,), n_turns, measure, is_enough)[1] if counts]
    if len(rows[0]) - 1 - model.is_last != len(layer_bytes):
        return LayerSpeed(min(row[-1] - row[0] for row in rows) / (sum(layer_bytes) + output_bytes))
    output_s = min(row[-1] - row[-2] for row in rows) if model.is_last else None
    first = int(len(layer_bytes) > 1)  # the first layer's time has a run's fixed cost in it
    layers_s = sum(min(row[index + 1] - row[index] for row in rows) for index in range(first, len(layer_bytes)))
    return LayerSpeed(layers_s / sum(layer_bytes[first:]), output_s)


# -- what follows from row times


def slowest_stage(costs: Sequence[dict[int, float]]) -> dict[int, float]:
    """Rows of a run -> seconds in the slowest stage, for the sizes that all stages have timed."""
    sizes = set.intersection(*map(set, costs)) if costs else set()
    return {n_rows: max(cost[n_rows] for cost in costs) for n_rows in sorted(sizes)}


def largest_question(cost: dict[int, float]) -> int:
    """Nodes of a question to a larger draft: by the cost of rows, but enough to get ahead of the target."""
    return max(QUESTION_ROWS_MIN, RunCost(cost).n_cheap_rows(0) if cost else 1)
