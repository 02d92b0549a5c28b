"""Layers -> stages so that the slowest is as fast as memory allows. Pure functions; knows costs, no model, no rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise

Held = tuple[tuple[str, float], ...]
"""(host or GPUs, bytes) that stages hold of what further stages take of too."""

Split = tuple[int, int, tuple[int, ...]]
"""What the slowest stage costs; the sum of the squares of what all cost; layers of each."""

Faults = Mapping[tuple[int, int], str]
"""Of layers [first, last) that cannot be a stage, why."""

DEPTH = 200  # stages whose splits are looked for in calls within calls

MAX_STATES = 200_000
"""Ways to have filled hosts that the planner looks at: a second's work."""


@dataclass(frozen=True, slots=True)
class StageRoom:
    """Memory that there is for stages, in bytes.

    needed   (stage, first, last) -> what layers [first, last) take as that stage
    hosts    of each stage, where it runs
    left     host, or GPUs -> what all its stages may take together
    own      of each stage, what it may take by a limit of its own
    on_gpus  as `needed`, of what goes to GPUs
    gpus     of each stage, those it uses; empty: none, or nobody knows what is left there
    """

    needed: Callable[[int, int, int], float]
    hosts: tuple[str, ...]
    left: Mapping[str, float]
    own: tuple[float, ...]
    on_gpus: Callable[[int, int, int], float] = lambda stage, first, last: 0
    gpus: tuple[str, ...] = ()

    def take(self, held: Held, stage: int, first: int, last: int) -> Held | None:
        """`held` once the stage has these layers; None where they do not fit."""
        needed, taken = self.needed(stage, first, last), dict(held)
        taken[self.hosts[stage]] = taken.get(self.hosts[stage], 0) + needed
        if self.gpus and (gpus := self.gpus[stage]):
            taken[gpus] = taken.get(gpus, 0) + self.on_gpus(stage, first, last)
        if needed > self.own[stage] or any(n_bytes > self.left[name] for name, n_bytes in taken.items()):
            return None
        return tuple(sorted((name, taken[name]) for name in taken.keys() & self._of_stages(stage + 1)))

    def _of_stages(self, first: int, last: int | None = None) -> set[str]:
        """Hosts and GPUs of stages [first, last)."""
        return {*self.hosts[first:last], *self.gpus[first:last]}

    def fits(self, counts: Sequence[int]) -> bool:
        held: Held | None = ()
        for stage, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
            if held is not None:
                held = self.take(held, stage, first, last)
        return held is not None

    def equal_shares(self) -> StageRoom:
        """The same with an equal part of its host, and of its GPUs, for each stage."""
        left: dict[str, float] = {}

        def parted(names: tuple[str, ...]) -> Iterator[str]:
            for stage, name in enumerate(names):
                own = name and f"{name}, stage {stage}"
                if name:
                    left[own] = self.left[name] / names.count(name)
                yield own

        return replace(self, hosts=tuple(parted(self.hosts)), gpus=tuple(parted(self.gpus)), left=left)

    @property
    def n_open(self) -> int:
        """Hosts and GPUs that have stages both before and after the same place of the pipeline, at most."""
        ends = range(1, len(self.hosts))
        return max((len(self._of_stages(0, end) & self._of_stages(end) - {""}) for end in ends), default=0)


NO_FAULTS: Faults = {}


def spread_layers(
    cost: Sequence[Sequence[float]], room: StageRoom | None = None, faults: Faults = NO_FAULTS
) -> list[int] | None:
    """Layers a stage so that the slowest stage is as fast as it can be; None if the memory or `faults` leave no way.

    `cost[stage][layer]`: seconds of a row, or anything in proportion to them; the output table's is the last layer's.
    So are the stages that follow any other one; of splits that are equally good the most even one is taken.
    Exact, by dynamic programming; only where many hosts take turns along the pipeline, so that there are more than
    MAX_STATES ways to share them, and their memory is short, has each stage an equal part of its host's.
    """
    sums = _exact_sums(cost)
    counts = _best_counts(sums, None, faults)
    if room is None or counts is None or room.fits(counts):
        return counts
    n_states = len(cost) * len(cost[0]) ** room.n_open
    return _best_counts(sums, room if n_states <= MAX_STATES else room.equal_shares(), faults)


def _exact_sums(cost: Sequence[Sequence[float]]) -> list[list[int]]:
    """Of each stage, what the first 0, 1, … layers cost, in whole numbers: what is equal may not differ by rounding."""
    exact = [[Fraction(value) for value in row] for row in cost]
    unit = math.lcm(*(value.denominator for row in exact for value in row))
    return [list(accumulate((int(value * unit) for value in row), initial=0)) for row in exact]


def _best_counts(sums: list[list[int]], room: StageRoom | None, faults: Faults) -> list[int] | None:
    n_stages, n_layers = len(sums), len(sums[0]) - 1

    @cache
    def best(stage: int, first: int, held: Held) -> Split | None:
        """Of layers [first, …) on the stages from this on."""
        n_after, found = n_stages - stage - 1, None
        for last in range(first + 1 if n_after else n_layers, n_layers - n_after + 1):
            own = sums[stage][last] - sums[stage][first]
            if found and own > found[0]:
                break
            if (first, last) in faults:
                continue
            then = room.take(held, stage, first, last) if room else held
            rest = None if then is None else best(stage + 1, last, then) if n_after else (0, 0, ())
            if rest:
                option = (max(own, rest[0]), own * own + rest[1], (last - first, *rest[2]))
                found = min(found, option) if found else option
        return found

    for stage in range(n_stages - DEPTH, 0, -DEPTH):  # from the end, so that no call goes deeper than Python allows
        for first in range(stage, n_layers - n_stages + stage + 1):
            best(stage, first, ())
    found = best(0, 0, ())
    return list(found[-1]) if found else None
