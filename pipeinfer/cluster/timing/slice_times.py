"""How long runs of a few rows take on a rank, as it was timed, and what a slice of other layers costs by that. Knows
sizes; loads and times nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.timing.costs import NOTHING, ModelCost, Work
from pipeinfer.core.kv.blocks import BLOCK


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """rows        of the runs that were timed, ascending from 1
    s_per_byte  of a layer's weights, for each of `rows`
    output_s    of the output matrix, for each of `rows`; empty: it takes as long as layers of so many bytes
    context_s   a row takes on top for each token before it and each layer; None: there was no time to find out
    run_s       a run takes on top; reshape_s: one of another number of rows than before; rest_s: one after a rest
    """

    rows: tuple[float, ...]
    s_per_byte: tuple[float, ...]
    output_s: tuple[float, ...] = ()
    context_s: float | None = None
    run_s: float = 0.0
    reshape_s: float = 0.0
    rest_s: float = 0.0

    def times(self, factor: float) -> SliceTimes:
        """Of a rank where all takes so many times as long."""
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
        """What `estimate` is of, by what was timed; what was not is the estimate's: chunks of prompts, and what a run
        costs besides its evaluation.

        `layer_bytes`: of a layer, on average; `output_bytes`: of the output matrix, which counts where the estimate has
        one.
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
    """What was timed on one rank while no other of its host computed.

    target    of the target's layers
    draft     of those of the draft that it would have, if any: number `draft_number`, the smallest is 0
    beside    how many times as long a row took when `n_beside` ranks of the host computed at once; 1 where this one did
              not
    source    who says so
    """

    target: SliceTimes
    draft: SliceTimes | None = None
    draft_number: int | None = None
    beside: float = 1.0
    n_beside: int = 1
    source: str = ""


def slowdowns_beside(found: Sequence[RankTimes], threads: Sequence[int], n_cores: int) -> tuple[float, ...]:
    """Of a host, by what its ranks found: how many times as long a row takes when 1, 2, … of them compute. As many as
    there are cores for were timed together; more take turns."""
    timed = [each.beside for each in found if each.n_beside > 1]
    most, n_fit = max(1.0, statistics.median(timed)) if timed else 1.0, max(each.n_beside for each in found)
    waits = statistics.fmean(threads) / n_cores if n_cores else 0.0
    curve: list[float] = []
    for n_busy in range(1, len(found) + 1):
        shared = 1 + (most - 1) * (min(n_busy, n_fit) - 1) / max(1, n_fit - 1)
        curve.append(max(shared * max(1.0, n_busy * waits), *curve, 1.0))
    return tuple(curve)
