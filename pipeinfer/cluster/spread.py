"""Split layers into stages so that the slowest is as fast as memory allows. Pure functions of costs; knows no rank."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, pairwise

Held = tuple[tuple[str, float], ...]  # (host or GPUs, bytes taken) of the memory that later stages use too

Split = tuple[int, int, tuple[int, ...]]
"""The slowest stage's cost; the sum of the squared costs; each stage's number of layers."""

Faults = Mapping[tuple[int, int], str]  # (first, last) of layers [first, last) that cannot be a stage -> why
DEPTH = 200  # stages in one recursion
MAX_STATES = 200_000  # states of the hosts' memory that the planner searches: about a second's work


@dataclass(frozen=True)
class StageRoom:
    """Memory for stages, in bytes.

    needed   (stage, first, last) -> the memory of layers [first, last) as that stage
    hosts    each stage's host
    free     host, or GPUs -> bytes for all its stages together
    limits   each stage's own limit
    on_gpus  as `needed`, on GPUs
    gpus     each stage's GPUs; empty: none, or their free memory is unknown"""

    needed: Callable[[int, int, int], float]
    hosts: tuple[str, ...]
    free: Mapping[str, float]
    limits: tuple[float, ...]
    on_gpus: Callable[[int, int, int], float] = lambda stage, first, last: 0
    gpus: tuple[str, ...] = ()

    def fits_on_host(self, held: Held, stage: int, first: int, last: int) -> bool:
        """Whether these layers fit there; if not, more do not either."""
        needed, host = self.needed(stage, first, last), self.hosts[stage]
        return needed <= self.limits[stage] and dict(held).get(host, 0) + needed <= self.free[host]

    def fits_on_gpus(self, held: Held, stage: int, first: int, last: int) -> bool:
        """The same there, where the last layers of a stage may be: more of them may need less."""
        gpus = self.gpus[stage] if self.gpus else ""
        return not gpus or dict(held).get(gpus, 0) + self.on_gpus(stage, first, last) <= self.free[gpus]

    def take(self, held: Held, stage: int, first: int, last: int) -> Held:
        """`held` after the stage has taken these layers, which fit."""
        names = self._after[stage]
        if not names:
            return ()
        taken, host, gpus = dict(held), self.hosts[stage], self.gpus[stage] if self.gpus else ""
        if host in names:
            taken[host] = taken.get(host, 0) + self.needed(stage, first, last)
        if gpus in names:
            taken[gpus] = taken.get(gpus, 0) + self.on_gpus(stage, first, last)
        return tuple(sorted((name, taken[name]) for name in taken.keys() & names))

    @cached_property
    def _after(self) -> list[set[str]]:
        """Of each stage, the hosts and GPUs of later ones."""
        return [self._of_stages(stage + 1) - {""} for stage in range(len(self.hosts))]

    def _of_stages(self, first: int, last: int | None = None) -> set[str]:
        """Hosts and GPUs of stages [first, last)."""
        return {*self.hosts[first:last], *self.gpus[first:last]}

    def fits(self, counts: Sequence[int]) -> bool:
        held: Held = ()
        for stage, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
            layers = held, stage, first, last
            if not (self.fits_on_gpus(*layers) and self.fits_on_host(*layers)):
                return False
            held = self.take(*layers)
        return True

    def equal_shares(self) -> "StageRoom":
        """The same with an equal share of its host's and its GPUs' memory for each stage."""
        shares: dict[str, float] = {}

        def parted(names: tuple[str, ...]) -> Iterator[str]:
            for stage, name in enumerate(names):
                part = name and f"{name}, stage {stage}"
                if name:
                    shares[part] = self.free[name] / names.count(name)
                yield part

        return replace(self, hosts=tuple(parted(self.hosts)), gpus=tuple(parted(self.gpus)), free=shares)

    @property
    def n_open(self) -> int:
        """The largest number of hosts and GPUs with stages both before and after one place in the pipeline."""
        ends = range(1, len(self.hosts))
        return max((len(self._of_stages(0, end) & self._of_stages(end) - {""}) for end in ends), default=0)


NO_FAULTS: Faults = {}


def spread_layers(
    cost: Sequence[Sequence[float]], room: StageRoom | None = None, faults: Faults = NO_FAULTS
) -> list[int] | None:
    """Layers of each stage, so that the slowest stage is as fast as possible; None if memory or `faults` allow no
    split. `cost[stage][layer]`: seconds of a row, or proportional to them; the last layer's includes the output. The
    stages after each stage are split in the same way; among equal splits the most even one is taken. Exact, by dynamic
    programming. Only if memory is short and the hosts alternate along the pipeline, with more than MAX_STATES states,
    each stage has an equal share of its host's memory."""
    sums = _exact_sums(cost)
    counts = _best_counts(sums, None, faults)
    if room is None or counts is None or room.fits(counts):
        return counts
    n_states = len(cost) * len(cost[0]) ** room.n_open
    return _best_counts(sums, room if n_states <= MAX_STATES else room.equal_shares(), faults)


def _exact_sums(cost: Sequence[Sequence[float]]) -> list[list[int]]:
    """Each stage's cost of the first 0, 1, … layers, as integers, so that equal costs do not differ by rounding."""
    exact = [[Fraction(value) for value in row] for row in cost]
    unit = math.lcm(*(value.denominator for row in exact for value in row))
    return [list(accumulate((int(value * unit) for value in row), initial=0)) for row in exact]


def _best_counts(sums: list[list[int]], room: StageRoom | None, faults: Faults) -> list[int] | None:
    n_stages, n_layers = len(sums), len(sums[0]) - 1

    @cache
    def best(stage: int, first: int, held: Held) -> Split | None:
        """The best split of layers [first, …) over the stages from this one on."""
        n_after, split = n_stages - stage - 1, None
        for last in range(first + 1 if n_after else n_layers, n_layers - n_after + 1):
            cost = sums[stage][last] - sums[stage][first]
            if split and cost > split[0]:
                break
            if (first, last) in faults or (room and not room.fits_on_gpus(held, stage, first, last)):
                continue
            if room and not room.fits_on_host(held, stage, first, last):
                break
            then = room.take(held, stage, first, last) if room else held
            rest = best(stage + 1, last, then) if n_after else (0, 0, ())
            if rest:
                option = (max(cost, rest[0]), cost * cost + rest[1], (last - first, *rest[2]))
                split = min(split, option) if split else option
        return split

    for stage in range(n_stages - DEPTH, 0, -DEPTH):  # from the end, which limits the recursion
        for first in range(stage, n_layers - n_stages + stage + 1):
            best(stage, first, ())
    split = best(0, 0, ())
    return list(split[-1]) if split else None
