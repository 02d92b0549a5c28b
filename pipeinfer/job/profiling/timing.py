"""Time a rank's models, and tell from a real job what a run costs on top. Knows no MPI.

Two sources of a measured profile: each rank times its own model for runs of many sizes, and a job without speculation
shows what a run costs beyond that: in a stage, between two stages, on the head.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pipeinfer.cluster.timing.timed_runs import evaluate, forget, in_turns, time_chunk, time_run
from pipeinfer.core.interfaces import StageModel
from pipeinfer.core.kv.blocks import BLOCK
from pipeinfer.observe.ledger import HeadLedger
from pipeinfer.virtual.measured import ModelTimes, Overheads, is_chunk

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
CONTEXT = 256  # tokens, for the cost of attention
SIZES_IN_CONTEXT = (1, 128, 64, 32)  # single rows and chunks of prompts first; in blocks these attend in another way
PROMPT = CONTEXT + SIZES[-1] + BLOCK  # rows of a prompt that is never read to its end, so that its context stays
REPEATS, CHUNK_REPEATS = 15, 3
REST_S = 0.003
StageRun = tuple[int, float, float, float, bool]


def time_model(
    model: StageModel, layers: int, n_rows_max: int, n_cells: int, clock: Callable[[], float], budget_s: float,
    blocks: bool = False, rewinds: bool = True,
) -> ModelTimes:  # fmt: skip
    """The cache must be empty and is empty afterwards. `rewinds`: whether a sequence can lose its newest tokens."""
    start_s, until_s = clock(), clock() + budget_s

    def over_at(when_s: float) -> Callable[[object], bool]:
        return lambda found: bool(found) and clock() > when_s

    _time_and_forget(model, 1, clock)  # maps the weights in
    sizes = [size for size in SIZES if size <= n_rows_max]
    guesses = [size for size in sizes if not is_chunk(size)]
    times = in_turns(guesses, REPEATS, lambda size: _time_twice(model, size, clock), over_at(start_s + budget_s / 2))
    reshape_s = statistics.median(first - second for found in times.values() for first, second in found[1:] or found)
    rested_s = statistics.median(_time_after_rest(model, clock) for _ in range(REPEATS))
    # chunks of prompts come last: they slow down the small runs that follow
    chunks = [size for size in sizes if is_chunk(size) and clock() < until_s and size + BLOCK <= n_cells]
    n_blocks = PROMPT if blocks else 0
    chunk_times = in_turns(
        chunks, CHUNK_REPEATS, lambda size: time_chunk(model, size, n_blocks, clock), over_at(until_s)
    )
    times |= chunk_times
    by_rows = {size: statistics.median(second for _, second in found) for size, found in times.items()}
    context = min(CONTEXT, n_cells // 2)
    in_context_s = _time_in_context(model, context, by_rows, n_cells, clock, until_s, blocks, rewinds)
    in_blocks = chunk_times if blocks else {}
    attention_s = {size: _first_block_s(by_rows[size], in_context_s.get(size, 0.0), context) for size in in_blocks}
    by_rows |= {size: by_rows[size] - seconds for size, seconds in attention_s.items()}
    begins_s = [first - second + attention_s[size] for size, found in in_blocks.items() for first, second in found]
    reshape_s = max(0.0, reshape_s)
    prompt_s = max(0.0, statistics.median(begins_s or [0.0]) - reshape_s)  # a new context has no graph yet either
    return ModelTimes(layers, by_rows, context, in_context_s, reshape_s, max(0.0, rested_s - by_rows[1]), prompt_s)


def _first_block_s(took_s: float, in_context_s: float, context: int) -> float:
    """What attention to the first block is of a chunk after it, from what the same takes after `context` tokens."""
    token_s = max(0.0, in_context_s - took_s) / max(1, context - BLOCK)
    return min(BLOCK * token_s, took_s / 2)  # not all of it, however disturbed the times are


def _time_after_rest(model: StageModel, clock: Callable[[], float]) -> float:
    """Seconds of one row."""
    time.sleep(REST_S)
    return _time_and_forget(model, 1, clock)


def time_over_and_over(model: StageModel, n_rows: int, clock: Callable[[], float], until_s: float) -> float:
    """Seconds of a run, on average, evaluated again and again until `until_s`; other ranks may do the same."""
    start_s, n = clock(), 0
    while (now_s := clock()) < until_s or not n:
        _time_and_forget(model, n_rows, clock)
        n += 1
    return (max(now_s, clock()) - start_s) / n


def slowdowns(beside_s: Sequence[Mapping[int, float]]) -> list[float]:
    """How many times as long a run takes when 1, 2, … ranks compute. `beside_s`: of each rank, by number, seconds."""
    found = [1.0]
    for n_busy in range(2, len(beside_s) + 1):
        ratios = [beside[n_busy] / beside[1] for beside in beside_s if n_busy in beside]
        found.append(max(found[-1], statistics.fmean(ratios)))
    return found


def _time_twice(model: StageModel, n_rows: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a run after one of another size, and of the same again."""
    return _time_and_forget(model, n_rows, clock), _time_and_forget(model, n_rows, clock)


def _time_and_forget(model: StageModel, n_rows: int, clock: Callable[[], float]) -> float:
    took_s = time_run(model, n_rows, clock, 0, _n_wanted(n_rows))
    forget(model)
    return took_s


def _time_in_context(
    model: StageModel, context: int, by_rows: Mapping[int, float], n_cells: int, clock: Callable[[], float],
    until_s: float, blocks: bool, rewinds: bool,
) -> dict[int, float]:  # fmt: skip
    """Rows -> seconds of a run after `context` tokens, at least of one row and of one chunk."""

    def fill() -> None:
        n_batch = max(*by_rows, BLOCK) if blocks else max(by_rows)
        for start in range(0, context, n_batch):
            evaluate(model, min(n_batch, context - start), start, 0, PROMPT if blocks else 0)

    fill()
    found: dict[int, float] = {}
    for size in SIZES_IN_CONTEXT:
        is_known = is_chunk(size) in map(is_chunk, found)
        if size not in by_rows or context + size > n_cells or (is_known and clock() > until_s):
            continue
        times: list[float] = []
        while len(times) < (2 if clock() > until_s else 1 + CHUNK_REPEATS):
            n_blocks = PROMPT if blocks and is_chunk(size) else 0
            times.append(time_run(model, size, clock, context, _n_wanted(size, n_blocks), n_blocks))
            forget(model, context if rewinds else 0)
            if not rewinds:
                fill()
        # the first one has another size than the one before
        found[size] = statistics.median(times[1:])
    forget(model)
    return dict(sorted(found.items()))


def _n_wanted(n_rows: int, n_blocks: int = 0) -> int:
    """Guesses all want their logits, prompts only their last row's, and those in blocks none."""
    return int(not n_blocks) if is_chunk(n_rows) else n_rows


def overheads(
    ledger: HeadLedger, stages: Sequence[Sequence[StageRun]], own: Sequence[ModelTimes],
    draft_steps_s: Sequence[float], draft: ModelTimes | None,
) -> Overheads:  # fmt: skip
    """Means of a job that sent single rows; all on one clock. `draft_steps_s`: of one row each."""
    by_run = [{run_id: (start_s, end_s) for run_id, _, start_s, end_s, _ in runs} for runs in stages]
    answered_s = {run_id: at_s for at_s, run_id in ledger.verdicts}
    # the first run carries the prompt
    run_ids = [run_id for run_id in sorted(answered_s) if all(run_id in stage for stage in by_run)][1:]
    context = _mean(run_ids)  # after a prompt of hardly any tokens
    stage_s = tuple(
        max(0.0, _mean(stage[run_id][1] - stage[run_id][0] for run_id in run_ids) - times.row_s(context))
        for stage, times in zip(by_run, own, strict=True)
    )
    hops = [_mean(after[run_id][0] - before[run_id][1] for run_id in run_ids) for before, after in pairwise(by_run)]
    hops.append(_mean(answered_s[run_id] - by_run[-1][run_id][1] for run_id in run_ids))
    first_s = _mean(by_run[0][run_id][0] - ledger.submitted_s[run_id] for run_id in run_ids)
    hop_s = max(0.0, statistics.fmean(hops))
    follows = [(run_id, run_id + 1) for run_id in run_ids if run_id + 1 in ledger.submitted_s]
    verdict_s = _mean(ledger.submitted_s[after] - answered_s[before] for before, after in follows)
    # steps differ in their number of rows
    beyond_s = _mean(draft_steps_s) - draft.by_rows[1] - draft.reshape_s if draft and draft_steps_s else 0.0
    return Overheads(stage_s, hop_s, max(0.0, first_s - hop_s), max(0.0, verdict_s), max(0.0, beyond_s))


def _mean(values: object) -> float:
    found = list(values)  # type: ignore[call-overload]
    return float(statistics.fmean(found)) if found else 0.0
