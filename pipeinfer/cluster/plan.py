"""Roles -> ranks, layers -> stages. Pure functions; knows sizes, opens no file and no connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from pipeinfer.errors import UserError


@dataclass(frozen=True, slots=True)
class Sizes:
    """What planning needs of a model, in bytes: each layer's weights, its KV per cell, the vocabulary tables."""

    layer_bytes: tuple[int, ...]
    kv_bytes_per_cell: tuple[int, ...]
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Target layers [first, last) on one rank."""

    rank: int
    first: int
    last: int
    weight_bytes: int
    kv_bytes: int

    @property
    def layers(self) -> str:
        return f"layers {self.first}-{self.last - 1}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Rank 0 is the head. `drafts`: the drafts' ranks, the smallest draft's first; `stages` are in pipeline order."""

    n_ranks: int
    stages: tuple[StagePlan, ...]
    drafts: tuple[int, ...] = ()

    @property
    def refiners(self) -> tuple[int, ...]:
        """The ranks of the larger drafts."""
        return self.drafts[1:]

    @property
    def computing(self) -> frozenset[int]:
        """The ranks that evaluate a model."""
        return frozenset({*(stage.rank for stage in self.stages), *self.drafts})

    def stage_of(self, rank: int) -> int | None:
        return next((index for index, stage in enumerate(self.stages) if stage.rank == rank), None)

    def describe(self, rank: int) -> str:
        """A rank's work in words, for messages."""
        roles = self.drafts_on(rank)
        index = self.stage_of(rank)
        if index is not None:
            roles.append(f"stage {index}, {self.stages[index].layers}")
        return ", ".join(roles) or "head"

    def drafts_on(self, rank: int) -> list[str]:
        """The drafts that a rank hosts, by name: `draft`, or of several `draft 1`, `draft 2`, …"""
        if self.drafts == (rank,):
            return ["draft"]
        return [f"draft {number}" for number, host in enumerate(self.drafts, start=1) if host == rank]


def draft_ranks(n_ranks: int, n_drafts: int) -> tuple[int, ...]:
    """Every draft has a rank to itself, the first of them the head's; a lone rank hosts everything.

    Raises UserError when no rank would be left for the target.
    """
    if n_ranks == 1:
        return (0,) * n_drafts
    if n_drafts >= n_ranks:
        raise UserError(
            f"{n_drafts} drafts and the target need {n_drafts + 1} ranks, here are {n_ranks}; "
            "start more, or give -md less often"
        )
    return tuple(range(n_drafts))


def stage_ranks(n_ranks: int, n_drafts: int) -> list[int]:
    """The ranks that no draft has. Raises UserError when there is none."""
    drafts = draft_ranks(n_ranks, n_drafts)
    return [rank for rank in range(n_ranks) if n_ranks == 1 or rank not in drafts]


def make_plan(n_ranks: int, n_drafts: int, sizes: Sizes, n_cells: int, split: Sequence[float] | None = None) -> Plan:
    """Spread the layers over the ranks, by `split` or so that the slowest stage reads as few bytes as possible.

    Raises UserError when there are more stages than layers or the split does not fit.
    """
    ranks = stage_ranks(n_ranks, n_drafts)
    n_layers = len(sizes.layer_bytes)
    if len(ranks) > n_layers:
        most = n_layers + n_ranks - len(ranks)
        raise UserError(f"{len(ranks)} stages for {n_layers} layers; start at most {most} ranks for this model")
    counts = split_layers(split, n_layers, len(ranks)) if split else balance(sizes, len(ranks))
    stages, first = [], 0
    for rank, count in zip(ranks, counts, strict=True):
        last = first + count
        tables = (sizes.input_bytes if first == 0 else 0) + (sizes.output_bytes if last == n_layers else 0)
        kv_bytes = n_cells * sum(sizes.kv_bytes_per_cell[first:last])
        stages.append(StagePlan(rank, first, last, sum(sizes.layer_bytes[first:last]) + tables, kv_bytes))
        first = last
    return Plan(n_ranks, tuple(stages), draft_ranks(n_ranks, n_drafts))


def balance(sizes: Sizes, n_stages: int) -> list[int]:
    """Layers a stage so that the most loaded stage reads the fewest bytes a token; the output table is the last's.

    The input table costs memory, not time: a row of it is read. Exact, by dynamic programming.
    """
    cost = list(sizes.layer_bytes)
    cost[-1] += sizes.output_bytes
    sums = [0]
    for layer in cost:
        sums.append(sums[-1] + layer)

    @cache
    def best(first: int, n_left: int) -> tuple[int, int]:
        """(load of the most loaded stage, layers of the first stage) for layers [first, ...) on n_left stages."""
        if n_left == 1:
            return sums[-1] - sums[first], len(cost) - first
        options = (
            (max(sums[first + count] - sums[first], best(first + count, n_left - 1)[0]), count)
            for count in range(1, len(cost) - first - n_left + 2)
        )
        return min(options)

    counts, first = [], 0
    for n_left in range(n_stages, 0, -1):
        counts.append(best(first, n_left)[1])
        first += counts[-1]
    return counts


def parse_split(text: str) -> list[float]:
    """`4,4,8` (layers) or `0.25,0.25,0.5` (proportions) a stage; also PipeInfer's form, with `/1.0` for the draft.

    Raises UserError when it is not such a list.
    """
    parts, _, draft = text.partition("/")
    try:
        values = [float(part) for part in parts.split(",")]
        draft_value = float(draft) if draft else 1.0
    except ValueError:
        raise UserError(f"--layer-split {text!r} is not a list of numbers; write 4,4,8 or 0.25,0.25,0.5") from None
    if not all(0 < value < float("inf") for value in values):
        raise UserError(f"--layer-split {text!r}: every part must be above 0")
    if draft_value != 1.0:
        raise UserError(f"--layer-split {text!r} splits the draft; it lives on one rank, write /1.0 or leave it out")
    return values


def split_layers(split: Sequence[float], n_layers: int, n_stages: int) -> list[int]:
    """Layers a stage from layers or proportions. Raises UserError with the way out when they do not fit."""
    shown = ",".join(f"{part:g}" for part in split)
    if len(split) != n_stages:
        raise UserError(
            f"--layer-split {shown} has {len(split)} parts for {n_stages} stages; "
            "give one part a stage, or leave it out to split by size"
        )
    if all(part == int(part) for part in split) and not (n_stages == 1 and split[0] == 1):
        counts = [int(part) for part in split]
        if sum(counts) != n_layers:
            raise UserError(f"--layer-split {shown} adds up to {sum(counts)} layers; the model has {n_layers}")
        return counts
    if abs(sum(split) - 1.0) > 0.01:
        raise UserError(f"--layer-split {shown}: proportions must add up to 1, these give {sum(split):g}")
    bounds = [0]
    for index in range(1, n_stages + 1):
        wanted = round(sum(split[:index]) * n_layers)
        # every stage keeps at least one layer
        bounds.append(min(max(wanted, bounds[-1] + 1), n_layers - (n_stages - index)))
    return [after - before for before, after in pairwise(bounds)]
