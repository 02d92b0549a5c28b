"""Time a loaded model for runs of a few sizes. Knows no MPI."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeinfer.cluster.timing.timed_runs import evaluate, forget, in_turns, time_run
from pipeinfer.core.interfaces import StageModel
from pipeinfer.core.scheduling.run_cost import RunCost
from pipeinfer.disk_cache import DiskCache

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

DEAR = 3.0
"""Runs that take so many times a single row's time are never chosen, so larger sizes need not be timed."""

MOST_A_ROW = 1.5
"""A further row takes at most so many times a single row's time. If a size seems to take longer, its timing was
disturbed."""

QUESTION_ROWS_MIN = 4
CREDIBLE = 0.8  # of the stored time of one row: if the host is faster now, it was busy then
N_CHECKS = 3  # times that one row is timed to compare
N_PASSES, PASSES_S = 10, 0.2
"""Further timings of each size, while less than PASSES_S has passed: short runs vary the most."""

CONTEXT_ROWS = 4
"""Rows of a run that is timed behind a context: more rows separate attention from noise."""

CONTEXT_S = 0.3
"""Seconds that filling a cache for that may take."""

CONTEXTS = 64, 256
"""Tokens of that context, at least and at most. If fewer fit into the time, only long contexts matter, and their cost
is learned from the first few runs."""


def time_rows(model: StageModel, clock: Callable[[], float], budget_s: float = 1.0) -> dict[int, float]:
    """Rows of a run -> seconds, the best of some; always for one row, for more while the budget lasts and they are
    cheap. Where runs are so short that it counts, several rows are timed after another size, after which libllama
    rebuilds its graph: they come between single rows.

    The cache must be empty and is empty afterwards. The first evaluation, which reads the weights in, is not counted.
    """
    start_s = clock()
    _time(model, 1, clock)

    def once(n_rows: int) -> float:
        return _time(model, n_rows, clock)

    def enough(found: Mapping[int, list[float]]) -> bool:
        least = [min(times) for times in found.values()]
        return bool(least) and (clock() - start_s > budget_s or max(least) > DEAR * least[0])

    found = in_turns(ROWS, 1, lambda n_rows: min(once(n_rows), once(n_rows)), enough)
    again = in_turns(found, N_PASSES, once, lambda _: clock() - start_s > PASSES_S, whole_turns=True)
    again[1] = [*again.get(1, []), *found[1]]
    return {n_rows: min(again.get(n_rows) or times) for n_rows, times in found.items()}


def time_row(model: StageModel, clock: Callable[[], float]) -> float:
    """Seconds of a run of one row. The cache must be empty and is empty afterwards."""
    _time(model, 1, clock)
    return min(_time(model, 1, clock) for _ in range(N_CHECKS))


def recall_rows(
    model: StageModel, clock: Callable[[], float], kept: DiskCache, name: str, budget_s: float = 1.0
) -> dict[int, float]:
    """`time_rows`, cached under a name that says all that the times depend on.

    Cached times are scaled to a single row's time now. If that was longer then, the host was busy, and all is timed
    again.
    """
    known = _read(kept.get(name))
    if known:
        row_s = time_row(model, clock)
        if row_s >= CREDIBLE * known[1]:
            return {n_rows: seconds * row_s / known[1] for n_rows, seconds in known.items()}
    start_s = clock()
    found = time_rows(model, clock, budget_s)
    # a disturbed size may look too expensive: a table that ends early for no reason is not cached
    if _is_credible(found) and (
        len(found) == len(ROWS) or max(found.values()) > DEAR * found[1] or clock() - start_s > budget_s
    ):
        kept.put(name, {str(n_rows): seconds for n_rows, seconds in found.items()})
    return found


def _read(value: Any) -> dict[int, float]:
    """A value that `recall_rows` has cached; empty for anything else."""
    if not isinstance(value, dict) or "1" not in value or not value.keys() <= set(map(str, ROWS)):
        return {}
    if not all(isinstance(seconds, float) and 0 < seconds < math.inf for seconds in value.values()):
        return {}
    found = {n_rows: value[str(n_rows)] for n_rows in ROWS if str(n_rows) in value}
    return found if _is_credible(found) else {}


def _is_credible(found: Mapping[int, float]) -> bool:
    return all(
        seconds <= found[fewer] + MOST_A_ROW * (n_rows - fewer) * found[1]
        for (fewer, _), (n_rows, seconds) in pairwise(found.items())
    )


def time_context(
    model: StageModel, row_times: Mapping[int, float], n_cells: int, clock: Callable[[], float]
) -> float | None:
    """Seconds that each token before a row adds to it; None if timing that would take long.

    `row_times`: see `time_rows`. The cache, of `n_cells`, must be empty and is empty afterwards.
    """
    n_rows = max(n for n in row_times if n <= CONTEXT_ROWS)
    n_context = affordable_context(row_times, n_cells - n_rows)
    if not n_context:
        return None
    empty_s = _time_at(model, n_rows, 0, clock)
    n_fill = min(row_times, key=lambda n: row_times[n] / n)
    for position in range(0, n_context, n_fill):
        evaluate(model, min(n_fill, n_context - position), position, 0)
    filled_s = _time_at(model, n_rows, n_context, clock)
    forget(model)
    return max(0.0, filled_s - empty_s) / (n_rows * n_context)


def recall_context(
    model: StageModel, row_times: Mapping[int, float], n_cells: int, clock: Callable[[], float],
    kept: DiskCache, name: str,
) -> float | None:  # fmt: skip
    """`time_context`, cached under a name that says all that it depends on, in units of a single row's time."""
    known = kept.get(name)
    if isinstance(known, float) and 0 <= known < 1:
        return known * row_times[1]
    found = time_context(model, row_times, n_cells, clock)
    if found is not None:
        kept.put(name, found / row_times[1])
    return found


def affordable_context(row_times: Mapping[int, float], n_cells: int) -> int:
    """Tokens of the context behind which runs are timed; 0: none."""
    row_s = min(seconds / n_rows for n_rows, seconds in row_times.items())
    n_context = min(CONTEXTS[1], n_cells, int(CONTEXT_S / row_s))
    return n_context if n_context >= CONTEXTS[0] else 0


def _time(model: StageModel, n_rows: int, clock: Callable[[], float]) -> float:
    """Seconds of a run and of removing its cells: real runs have operations on the cache too."""
    start_s = clock()
    evaluate(model, n_rows)
    forget(model)
    return clock() - start_s


def _time_at(model: StageModel, n_rows: int, position: int, clock: Callable[[], float]) -> float:
    """Seconds of a run alone, the best of some: packing a cache takes time by its contents, and is rare."""
    times = []
    for _ in range(N_CHECKS):
        times.append(time_run(model, n_rows, clock, position))
        forget(model, position)
    return min(times)


def slowest_stage(costs: Sequence[dict[int, float]]) -> dict[int, float]:
    """Rows of a run -> seconds in the slowest stage, for the sizes that all stages have timed."""
    sizes = set.intersection(*map(set, costs)) if costs else set()
    return {n_rows: max(cost[n_rows] for cost in costs) for n_rows in sorted(sizes)}


def largest_question(cost: dict[int, float]) -> int:
    """Nodes of a question to a larger draft: by the cost of rows, but enough to get ahead of the target."""
    return max(QUESTION_ROWS_MIN, RunCost(cost).n_cheap_rows(0) if cost else 1)
