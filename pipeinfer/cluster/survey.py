"""Times of a real cluster -> a profile in TOML that `simulate` can use. Pure; knows no MPI and no model.

Two sources: each rank times its own model for runs of many sizes, and a real job without speculation shows what a run
costs on top: in a stage, between two stages, on the head.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from pipeinfer.blocks import BLOCK
from pipeinfer.interfaces import Batch, StageModel
from pipeinfer.interpolation import interpolate
from pipeinfer.ledger import HeadLedger
from pipeinfer.runs import KvOp, OpKind

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
GUESSES_MAX = 32  # rows of a run of guesses; more are a chunk of a prompt
CONTEXT = 256  # tokens, for the cost of attention
SIZES_IN_CONTEXT = (1, 128, 32)  # single rows and chunks of prompts first
PROMPT = CONTEXT + SIZES[-1] + BLOCK  # rows of a prompt that is never read to its end, so that its context stays
REPEATS, CHUNK_REPEATS = 15, 3
REST_S = 0.003
DISORDER_MAX = 1.5
StageRun = tuple[int, float, float, float, bool]


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """What one rank timed: rows of a run -> seconds at an empty cache, after another run of that size; what a run of
    another size adds, and what one after a rest adds; rows -> seconds of a run after `context` tokens; how many ranks
    of its host computed at once, 1 being itself -> seconds of one row."""

    layers: int
    by_rows: dict[int, float]
    context: int = 0
    in_context_s: dict[int, float] = field(default_factory=dict)
    reshape_s: float = 0.0
    rest_s: float = 0.0
    beside_s: dict[int, float] = field(default_factory=dict)

    def context_s(self, n_rows: int) -> float:
        """Seconds a layer, row and token before a run of so many rows."""
        sizes = tuple(map(float, self.in_context_s))
        grown_s = tuple(
            max(0.0, seconds - self.by_rows[size]) / (self.context * self.layers * size)
            for size, seconds in self.in_context_s.items()
        )
        return interpolate(sizes, grown_s, min(n_rows, sizes[-1])) if sizes else 0.0

    @property
    def disorder(self) -> float:
        """The most times as long that a run took as one of more rows; 1 or less where nothing disturbed the timing."""
        kinds = [
            [seconds for size, seconds in sorted(self.by_rows.items()) if (size > GUESSES_MAX) == is_chunk]
            for is_chunk in (False, True)
        ]
        return max((few / more for runs_s in kinds for few, more in combinations(runs_s, 2)), default=0.0)

    def row_s(self, context: float) -> float:
        """Seconds of one row after so many tokens and a rest."""
        return self.by_rows[1] + self.context_s(1) * self.layers * context + self.rest_s


def disturbed_line(models: Sequence[ModelTimes]) -> str:
    """What the user should know of times that cannot be right; empty if all may be."""
    worst = max((times.disorder for times in models), default=0.0)
    if worst <= DISORDER_MAX:
        return ""
    return (
        f"a run took up to {worst:.1f} times as long as one of more rows: something else computed meanwhile, and this "
        "profile is as wrong; measure again when the machine is quiet"
    )


def time_model(
    model: StageModel, layers: int, n_rows_max: int, n_cells: int, clock: Callable[[], float], budget_s: float,
    blocks: bool = False,
) -> ModelTimes:  # fmt: skip
    """The cache must be empty and is empty afterwards. `blocks`: prompts are evaluated in blocks; see there."""
    start_s, until_s = clock(), clock() + budget_s
    _evaluate(model, 0, 1)  # maps the weights in
    _forget(model)
    sizes = [size for size in SIZES if size <= n_rows_max]
    times = _time_in_turns(
        model, [size for size in sizes if size <= GUESSES_MAX], REPEATS, clock, start_s + budget_s / 2
    )
    reshape_s = statistics.median(first - second for found in times.values() for first, second in found[1:] or found)
    rested_s = statistics.median(_time_after_rest(model, clock) for _ in range(REPEATS))
    # chunks of prompts come last: they slow down the small runs that follow
    chunks = [size for size in sizes if size > GUESSES_MAX and clock() < until_s]
    times |= _time_in_turns(model, chunks, CHUNK_REPEATS, clock, until_s, blocks)
    by_rows = {size: statistics.median(second for _, second in found) for size, found in times.items()}
    context = min(CONTEXT, n_cells // 2)
    in_context_s = _time_in_context(model, context, by_rows, n_cells, clock, until_s, blocks)
    return ModelTimes(layers, by_rows, context, in_context_s, max(0.0, reshape_s), max(0.0, rested_s - by_rows[1]))


def _time_in_turns(
    model: StageModel, sizes: Sequence[int], n_times: int, clock: Callable[[], float], until_s: float,
    blocks: bool = False,
) -> dict[int, list[tuple[float, float]]]:  # fmt: skip
    """Of each size, what `_time_twice` found each time; of fewer sizes or times when it lasts beyond `until_s`.

    In turns, so that what disturbs for a moment does not disturb all that is known of one size.
    """
    times: dict[int, list[tuple[float, float]]] = {}
    for turn in range(n_times):
        for size in list(times) if turn else sizes:
            if times and clock() > until_s:
                return times
            times.setdefault(size, []).append(_time_twice(model, size, clock, blocks))
    return times


def _time_after_rest(model: StageModel, clock: Callable[[], float]) -> float:
    """Seconds of one row."""
    time.sleep(REST_S)
    start_s = clock()
    _evaluate(model, 0, 1)
    took_s = clock() - start_s
    _forget(model)
    return took_s


def time_over_and_over(model: StageModel, clock: Callable[[], float], until_s: float) -> float:
    """Seconds of one row, on average, evaluated again and again until `until_s`; other ranks may do the same."""
    start_s, n = clock(), 0
    while (now_s := clock()) < until_s or not n:
        _evaluate(model, 0, 1)
        _forget(model)
        n += 1
    return (max(now_s, clock()) - start_s) / n


def slowdowns(beside_s: Sequence[dict[int, float]]) -> list[float]:
    """By how much work takes longer when 1, 2, … ranks of one host compute: the mean over those that did.

    `beside_s`: of each rank, how many computed -> seconds.
    """
    found = [1.0]
    for n_busy in range(2, len(beside_s) + 1):
        ratios = [beside[n_busy] / beside[1] for beside in beside_s if n_busy in beside]
        found.append(max(found[-1], statistics.fmean(ratios)))
    return found


def _time_twice(model: StageModel, n_rows: int, clock: Callable[[], float], blocks: bool) -> tuple[float, float]:
    """Seconds of a run after one of another size, and of the same again."""
    times = []
    for _ in range(2):
        start_s = clock()
        _evaluate(model, 0, n_rows, blocks)
        times.append(clock() - start_s)
        _forget(model)
    return times[0], times[1]


def _forget(model: StageModel, first: int = 0) -> None:
    """What is at position `first` and after it."""
    model.apply([KvOp(OpKind.REMOVE, 0, first=first), KvOp(OpKind.COMPACT, 0)])


def _time_in_context(
    model: StageModel, context: int, by_rows: Mapping[int, float], n_cells: int, clock: Callable[[], float],
    until_s: float, blocks: bool,
) -> dict[int, float]:  # fmt: skip
    """Rows -> seconds of a run after `context` tokens, of a few of the sizes; at least of one row."""
    n_batch = max(*by_rows, BLOCK) if blocks else max(by_rows)
    for start in range(0, context, n_batch):
        _evaluate(model, start, min(n_batch, context - start), blocks)
    found: dict[int, float] = {}
    for size in SIZES_IN_CONTEXT:
        if size not in by_rows or context + size > n_cells or (found and clock() > until_s):
            continue
        times = []
        for _ in range(1 + CHUNK_REPEATS):  # the first one has another size than the one before
            start_s = clock()
            _evaluate(model, context, size, blocks and size > GUESSES_MAX)
            times.append(clock() - start_s)
            _forget(model, context)
        found[size] = statistics.median(times[1:])
    _forget(model)
    return dict(sorted(found.items()))


def _evaluate(model: StageModel, position: int, n_rows: int, blocks: bool = False) -> None:
    # guesses all want their logits, prompts only their last row's, and those in blocks none
    wanted = np.arange(n_rows) >= (0 if n_rows <= GUESSES_MAX else n_rows - (not blocks))
    batch = Batch(
        tokens=np.zeros(n_rows, np.int32),
        positions=np.arange(position, position + n_rows, dtype=np.int32),
        seqs=[(0,)] * n_rows,
        hidden=np.full((n_rows, model.n_embd), 0.01, np.float32),
        wanted=wanted,
        n_prompt=PROMPT if blocks else 0,
    )
    model.evaluate(batch, lambda: False)


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds beyond the models' own: of each stage a run, of a hop, of the head for a run, a verdict, a draft step."""

    stage_s: tuple[float, ...]
    hop_s: float
    run_s: float
    verdict_s: float
    draft_s: float


def overheads(
    ledger: HeadLedger,
    stages: Sequence[Sequence[StageRun]],
    own: Sequence[ModelTimes],
    draft_steps_s: Sequence[float],
    draft: ModelTimes | None,
) -> Overheads:
    """From a job that sent single rows, one after the other; all on one clock. `draft_steps_s`: of one row each.

    Means, not medians: what now and then takes long is part of the speed.
    """
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


def profile_toml(
    title: Sequence[str],
    n_embd: int,
    stages: Sequence[ModelTimes],
    drafts: Sequence[ModelTimes],
    extra: Overheads,
    gbit_per_s: float,
    slowdown: Sequence[float] = (),
    blocks: bool = False,
) -> str:
    """A profile by measurement. `title`: lines of a comment. `drafts`: the smallest first. `slowdown`: if all ranks are
    on one host, by how much those that compute at once slow each other down. `blocks`: prompts are cut into such."""
    lines = [*(f"# {line}" for line in title), f"embd = {n_embd}", *(["blocks = true"] if blocks else []), ""]
    lines += _table("[link]", {"latency_us": 1e6 * extra.hop_s, "gbit_per_s": gbit_per_s})
    lines += _table("[head]", {"run_us": 1e6 * extra.run_s, "verdict_us": 1e6 * extra.verdict_s, "draft_us": 0.0})
    if slowdown:
        lines += _table("[host]", {"slowdown": list(slowdown)})
    for times, run_s in zip(stages, extra.stage_s, strict=True):
        lines += _slice("[[stages]]", times, run_s)
    for number, times in enumerate(drafts):
        lines += _slice("[[refiners]]" if number else "[draft]", times, 0.0 if number else extra.draft_s)
    return "\n".join(lines)


def _slice(header: str, times: ModelTimes, run_s: float) -> list[str]:
    layer_ms = [1e3 * seconds / times.layers for seconds in times.by_rows.values()]
    content: dict[str, object] = {"layers": times.layers, "rows": list(times.by_rows), "layer_ms": layer_ms}
    content["context_ns"] = [1e9 * times.context_s(n_rows) for n_rows in times.by_rows]
    fixed = {"run_us": 1e6 * run_s, "reshape_us": 1e6 * times.reshape_s, "rest_us": 1e6 * times.rest_s}
    return _table(header, content | fixed)


def _table(header: str, content: Mapping[str, object]) -> list[str]:
    return [header, *(f"{key} = {_value(value)}" for key, value in content.items()), ""]


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
