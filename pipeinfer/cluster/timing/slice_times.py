"""Measured times of small runs on a rank, and the cost of a slice of other layers by these. Knows sizes; loads and
times nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.timing.costs import NOTHING, ModelCost, Work
from pipeinfer.core.kv.blocks import BLOCK


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """rows        of the timed runs, ascending from 1
    s_per_byte  of a layer's weights, for each of `rows`
    output_s    of the output matrix, for each of `rows`; empty: the same as layers of so many bytes
    context_s   added to a row by each token before it, in each layer; None: not timed
    run_s       added by a run; reshape_s: by a change of the number of rows; rest_s: by a rest before it
    """

    rows: tuple[float, ...]
    s_per_byte: tuple[float, ...]
    output_s: tuple[float, ...] = ()
    context_s: float | None = None
    run_s: float = 0.0
    reshape_s: float = 0.0
    rest_s: float = 0.0

    def times(self, factor: float) -> SliceTimes:
        """The times of a rank that is so many times as slow."""
        return SliceTimes(
            self.rows,
            tuple(factor * each for each in self.s_per_byte),
            tuple(factor * each for each in self.output_s),
            None if self.context_s is None else factor * self.context_s,
            factor * self.run_s,
            factor * self.reshape_s,
            factor * self.rest_s,
        )

    def slice_of(self, estimate: ModelCost, layer_bytes: float, output_bytes: float) -> ModelCost:
        """The estimate with measured times in it; chunks of prompts, and a run's cost outside its evaluation, stay as
        estimated.

        `layer_bytes`: of a layer, on average; `output_bytes`: of the output matrix, if the estimate has one.
        """
        few_s = [each * layer_bytes for each in self.s_per_byte]
        token_s = estimate.layer.context_s[0]
        many_s = max(few_s[-1], estimate.layer.at(BLOCK))
        few_token_s = token_s if self.context_s is None else self.context_s
        output_s = self.output_s or tuple(each * output_bytes for each in self.s_per_byte)
        return replace(
            estimate,
            layer=Work(
                (*self.rows, BLOCK), (*few_s, many_s), (*(few_token_s for _ in few_s), min(token_s, few_token_s))
            ),
            output=NOTHING if estimate.output is NOTHING else Work(self.rows, output_s),
            run_s=estimate.run_s + self.run_s,
            reshape_s=self.reshape_s,
            rest_s=self.rest_s,
        )


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of one rank while no other rank of its host computed.

    target    the target's layers
    draft     layers of draft number `draft_number` (the smallest is 0), if the rank would host one
    beside    a row's slowdown when `n_beside` ranks of the host computed at once; 1 if this rank did not
    source    where the times are from
    """

    target: SliceTimes
    draft: SliceTimes | None = None
    draft_number: int | None = None
    beside: float = 1.0
    n_beside: int = 1
    source: str = ""


def slowdowns_beside(found: Sequence[RankTimes], threads: Sequence[int], n_cores: int) -> tuple[float, ...]:
    """A row's slowdown when 1, 2, … ranks of a host compute. As many as the host has cores for were timed together;
    more than that take turns."""
    timed = [each.beside for each in found if each.n_beside > 1]
    most, n_fit = max(1.0, statistics.median(timed)) if timed else 1.0, max(each.n_beside for each in found)
    waits = statistics.fmean(threads) / n_cores if n_cores else 0.0
    curve: list[float] = []
    for n_busy in range(1, len(found) + 1):
        shared = 1 + (most - 1) * (min(n_busy, n_fit) - 1) / max(1, n_fit - 1)
        curve.append(max(shared * max(1.0, n_busy * waits), *curve, 1.0))
    return tuple(curve)
