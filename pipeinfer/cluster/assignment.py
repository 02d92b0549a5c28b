"""Assign models to ranks and layers to stages. Pure functions of sizes; opens no file and no connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from pipeinfer.cluster.hosts.host import LayerSpeed, distinct_speeds
from pipeinfer.cluster.spread import NO_FAULTS, Faults, StageRoom, spread_layers
from pipeinfer.errors import UserError
from pipeinfer.text import count_text


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's sizes, in bytes: each layer's weights, and those of the output.

    faults   layers that cannot be a stage, and why"""

    layer_bytes: tuple[int, ...]
    output_bytes: int
    faults: Faults = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers [first, last) of the target, or of a draft, on one rank."""

    rank: int
    first: int
    last: int

    @property
    def span(self) -> str:
        return f"{self.first}-{self.last - 1}"

    @property
    def layers(self) -> str:
        return f"layers {self.span}"


Stages = tuple[StagePlan, ...]  # a model's, in pipeline order


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rank 0 is the head. `stages`: the target's; `drafts`: each draft's, the smallest first, which has one stage, on
    rank 0 if there are others."""

    n_ranks: int
    stages: Stages
    drafts: tuple[Stages, ...] = ()

    @property
    def refiners(self) -> tuple[Stages, ...]:
        """The larger drafts' stages."""
        return self.drafts[1:]

    @property
    def remote_drafts(self) -> dict[int, Stages]:
        """Number -> stages of each draft that is not on the head."""
        return {number: stages for number, stages in enumerate(self.drafts) if number or stages[0].rank}

    @property
    def draft_split(self) -> tuple[int, ...]:
        """The number of ranks of each larger draft."""
        return tuple(map(len, self.refiners))

    @property
    def computing(self) -> frozenset[int]:
        """The ranks that evaluate a model."""
        return frozenset(stage.rank for stages in (self.stages, *self.drafts) for stage in stages)

    def drafts_on(self, rank: int) -> dict[int, StagePlan]:
        """Number -> the rank's stage of each draft that it hosts."""
        return {number: stage for number, stages in enumerate(self.drafts) for stage in stages if stage.rank == rank}

    def neighbours(self, rank: int) -> tuple[int, int | None]:
        """The ranks before and after a rank other than 0 in its pipeline: 0 before the first, None after the last."""
        models = (*self.drafts, self.stages)
        ranks = next(ranks for stages in models if rank in (ranks := [stage.rank for stage in stages]))
        index = ranks.index(rank)
        return ranks[index - 1] if index else 0, ranks[index + 1] if index + 1 < len(ranks) else None

    def stage_of(self, rank: int) -> int | None:
        return next((index for index, stage in enumerate(self.stages) if stage.rank == rank), None)

    def describe(self, rank: int) -> str:
        """A rank's roles as a text."""
        roles = [f"{name}, layers {span}" if span else name for name, span in self.roles(rank)]
        return ", ".join(roles) or "head"

    def roles(self, rank: int) -> list[tuple[str, str]]:
        """(name, layers) of each of a rank's roles: `draft`; `draft 1`, … of several drafts; `draft 2 stage 0`, … of a
        split one; `stage 0`, … of the target. The layers of a whole draft are empty."""
        roles = []
        for number, stage in self.drafts_on(rank).items():
            name = f"draft {number + 1}" if len(self.drafts) > 1 else "draft"
            stages = self.drafts[number]
            roles.append((f"{name} stage {stages.index(stage)}", stage.span) if len(stages) > 1 else (name, ""))
        index = self.stage_of(rank)
        return roles + ([] if index is None else [(f"stage {index}", self.stages[index].span)])


def draft_widths(n_drafts: int, draft_split: Sequence[int] = ()) -> tuple[int, ...]:
    """The number of ranks of each draft, the smallest first: one, or for larger drafts as in `draft_split`. Raises
    UserError when that does not have one number for each larger draft."""
    n_larger = max(0, n_drafts - 1)
    if not draft_split:
        return (1,) * n_drafts
    shown = _listed(draft_split)
    if not n_larger:
        reason = "cuts larger drafts, and there is none: a lone draft lives whole on rank 0"
        raise UserError(f"--draft-split {shown} {reason}; give -md for each draft, or leave it out")
    if len(draft_split) != n_larger:
        reason = f"has {count_text(len(draft_split), 'part')} for {count_text(n_larger, 'larger draft')}"
        way_out = "give one number for each, the smaller first, or leave it out"
        raise UserError(f"--draft-split {shown} {reason}; {way_out}")
    return (1, *draft_split)


def draft_ranks(n_ranks: int, widths: Sequence[int], first: int = 0) -> tuple[tuple[int, ...], ...]:
    """The ranks of each draft, as many as in `widths`: the smallest has rank `first`, which is the head if there are
    others. A lone rank hosts everything. Raises UserError when no rank is left for the target."""
    if n_ranks == 1 and set(widths) <= {1}:
        return ((0,),) * len(widths)
    if sum(widths) >= n_ranks:
        is_cut = sum(widths) > len(widths)
        way_out = f"a smaller --draft-split than {_listed(widths[1:])}" if is_cut else "-md less often"
        where = f" on {sum(widths)} ranks" if is_cut else ""
        needed, here = f"{sum(widths) + 1} ranks", "is 1" if n_ranks == 1 else f"are {n_ranks}"
        raise UserError(
            f"{len(widths)} drafts{where} and the target need {needed}, here {here}; start more, or give {way_out}"
        )
    if len(widths) == 1:
        return ((first,),)
    return tuple(tuple(range(end - width, end)) for width, end in zip(widths, accumulate(widths), strict=True))


def stage_ranks(n_ranks: int, widths: Sequence[int], first: int = 0) -> list[int]:
    """The ranks without a draft; see `draft_ranks`. Raises UserError when there is none."""
    taken = {rank for ranks in draft_ranks(n_ranks, widths, first) for rank in ranks}
    return [rank for rank in range(n_ranks) if n_ranks == 1 or rank not in taken]


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


RoomFor = Callable[[Sequence[Stages], Sequence[int]], StageRoom]
"""(placed drafts, ranks) -> these ranks' memory for the next draft, or after the last draft for the target."""


def assign(
    n_ranks: int,
    drafts: Sequence[Sizes],
    target: Sizes,
    split: Sequence[float] | None = None,
    room: RoomFor | None = None,
    draft_split: Sequence[int] = (),
    speeds: Sequence[LayerSpeed | None] = (),
    draft_rank: int = 0,
) -> Assignment:
    """Split each model's layers over its ranks: the target's by `split`, or so that the slowest stage is as fast as
    `room` allows; larger drafts' by size over as many ranks as in `draft_split`, the smaller first. `draft_rank`: of a
    lone draft. `speeds`: of each rank, at the target's layers; if they are unknown or alike, the target is split by
    size too. If no split fits into the memory it is ignored; the check of the plan reports that. Raises UserError when
    there are more stages than layers or a split does not fit."""
    widths = draft_widths(len(drafts), draft_split)
    for number, (width, draft) in enumerate(zip(widths, drafts, strict=True), start=1):
        n_layers = len(draft.layer_bytes)
        if width > n_layers:
            wrong = f"{width} ranks for draft {number}, which has {count_text(n_layers, 'layer')}"
            raise UserError(f"--draft-split {_listed(draft_split)}: {wrong}; give at most {n_layers}")
    placed: tuple[Stages, ...] = ()
    for draft, on_ranks in zip(drafts, draft_ranks(n_ranks, widths, draft_rank), strict=True):
        counts = balance(draft, len(on_ranks), room(placed, on_ranks) if room and len(on_ranks) > 1 else None)
        placed += (_stages(on_ranks, counts),)
    ranks, n_layers = stage_ranks(n_ranks, widths, draft_rank), len(target.layer_bytes)
    n_stages = len(ranks)
    check_stages(n_stages, n_layers, n_ranks)
    target_room = room(placed, ranks) if room else None
    timed = distinct_speeds([speeds[rank] for rank in ranks]) if speeds else []
    if split:
        counts = split_layers(split, n_layers, n_stages, target.faults)
    else:
        counts = balance(target, n_stages, target_room, timed)
    return Assignment(n_ranks, _stages(ranks, counts), placed)


def check_stages(n_stages: int, n_layers: int, n_ranks: int) -> None:
    """Raises UserError when there are more stages than layers."""
    if n_stages > n_layers:
        most = n_layers + n_ranks - n_stages
        stages, layers = count_text(n_stages, "stage"), count_text(n_layers, "layer")
        raise UserError(f"{stages} for {layers}; start at most {count_text(most, 'rank')} for this model")


def _stages(ranks: Sequence[int], counts: Sequence[int]) -> Stages:
    """`counts`: layers on each of the ranks."""
    bounds = pairwise(accumulate(counts, initial=0))
    return tuple(StagePlan(rank, first, last) for rank, (first, last) in zip(ranks, bounds, strict=True))


def balance(sizes: Sizes, n_stages: int, room: StageRoom | None = None, speeds: Sequence[LayerSpeed] = ()) -> list[int]:
    """Layers of each stage, so that the slowest one is as fast as possible. `speeds`: one a stage; empty: all stages
    are equally fast, and the largest number of bytes a token is minimised. The input table costs memory, not time: one
    row of it is read. Raises UserError if the model cannot be split so."""
    cost: list[float] = [*sizes.layer_bytes[:-1], sizes.layer_bytes[-1] + sizes.output_bytes]
    faults = sizes.faults
    costs = [speed.seconds(sizes.layer_bytes, sizes.output_bytes) for speed in speeds] or [cost] * n_stages
    counts = spread_layers(costs, room, faults) or spread_layers(costs, None, faults)
    if counts:
        return counts
    most = next(n for n in range(n_stages - 1, 0, -1) if spread_layers([cost] * n, None, faults))
    layers = f"{len(cost)} layers that cannot be cut everywhere ({', '.join(set(faults.values()))})"
    way_out = f"start so few ranks that there are {count_text(most, 'stage')}"
    raise UserError(f"{n_stages} stages for {layers}; {way_out}")


def parse_split(text: str) -> list[float]:
    """Parse `4,4,8` (layers) or `0.25,0.25,0.5` (proportions); also PipeInfer's form, with `/1.0` for the draft. Raises
    UserError when it is not such a list."""
    parts, _, draft = text.partition("/")
    try:
        values = [float(part) for part in parts.split(",")]
        draft_value = float(draft) if draft else 1.0
    except ValueError:
        raise UserError(f"--layer-split {text!r} is not a list of numbers; write 4,4,8 or 0.25,0.25,0.5") from None
    if not all(0 < value < float("inf") for value in values):
        raise UserError(f"--layer-split {text!r}: every part must be above 0")
    if draft_value != 1.0:
        way_out = "write /1.0 or leave it out (--draft-split cuts larger drafts)"
        raise UserError(f"--layer-split {text!r} splits the draft, which rank 0 has whole; {way_out}")
    return values


def split_layers(split: Sequence[float], n_layers: int, n_stages: int, faults: Faults = NO_FAULTS) -> list[int]:
    """Layers of each stage, from layers or proportions. Raises UserError when they do not fit."""
    counts = _split(split, n_layers, n_stages)
    for first, last in pairwise(accumulate(counts, initial=0)):
        if (first, last) in faults:
            reason = f"layers {first}-{last - 1} of this model cannot be a stage, {faults[first, last]}"
            raise UserError(f"--layer-split {_listed(split)}: {reason}; split them otherwise, or leave it out")
    return counts


def _split(split: Sequence[float], n_layers: int, n_stages: int) -> list[int]:
    shown = _listed(split)
    if len(split) != n_stages:
        wrong = f"has {len(split)} parts, and the number of stages is {n_stages}"
        raise UserError(f"--layer-split {shown} {wrong}; give one part a stage, or leave it out to split by size")
    if all(part == int(part) for part in split) and not (n_stages == 1 and split[0] == 1):
        counts = [int(part) for part in split]
        if sum(counts) != n_layers:
            raise UserError(f"--layer-split {shown} adds up to {sum(counts)} layers; the model has {n_layers}")
        return counts
    if abs((total := sum(split)) - 1.0) > 0.0101:  # 0.33 three times is meant
        raise UserError(f"--layer-split {shown}: proportions must add up to 1, these give {total:g}")
    bounds = [0]
    for index in range(1, n_stages + 1):
        bound = round(sum(split[:index]) / total * n_layers)
        # every stage keeps at least one layer
        bounds.append(min(max(bound, bounds[-1] + 1), n_layers - (n_stages - index)))
    return [after - before for before, after in pairwise(bounds)]
