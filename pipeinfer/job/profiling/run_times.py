"""What runs cost on each rank, for predictions: timed in some layers of target and draft, and kept for the next time.
On every rank, before there is a plan. Loads layers without weights, so that it takes no file and little time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__
from pipeinfer.cluster.cores import Host
from pipeinfer.cluster.layer_speed import BEFORE, NOW
from pipeinfer.cluster.plan import Sizes, draft_ranks, draft_widths
from pipeinfer.cluster.slice_times import RankTimes, SliceTimes
from pipeinfer.cluster.timed_layers import CHUNK, time_rows_for, time_slice
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import place_text
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import read_drafts, sizes_of
from pipeinfer.job.placement.draft_place import options_of_draft
from pipeinfer.job.placement.fetch import fetch_files
from pipeinfer.job.profiling.layer_times import load_blank
from pipeinfer.job.profiling.timed_ranks import Span, planned_threads, ranks_beside, stages_of_target, timed_span
from pipeinfer.kept import user_kept
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.skeleton import Skeleton, take_skeleton
from pipeinfer.models.llama.build import describe_build

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew

BESIDE_S = 0.15


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of a model that a rank shall time."""

    fingerprint: str
    sizes: Sizes
    span: Span
    model: int
    """Which: 0 the target, then the drafts."""

    @property
    def name(self) -> str:
        return f"{self.fingerprint} {self.span[0]}-{self.span[1] - 1}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be timed: of each rank, some of the target's layers, and of the draft that it would have."""

    targets: tuple[_Part, ...]
    drafts: Mapping[int, _Part]


def known_run_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> tuple[list[RankTimes], str]:
    """Of every rank; none, and why, where they cannot be timed. Where the options are wrong, who plans says so.
    Collective."""
    link, kept = crew.link, user_kept()
    models = _read_models(options) if link.rank == 0 else []
    asked: _Asked | None = link.broadcast(_ask(models, options, hosts) if models else None)
    if asked is None:
        return [], ""
    places = [_place(asked, hosts, options, rank) for rank in range(link.size)]
    draft = asked.drafts.get(link.rank)
    drafting = options_of_draft(options, hosts, link.rank)
    by = "" if drafting is options else f" by {backend_of(drafting, link.rank)} -ngl {drafting.n_gpu_layers[link.rank]}"
    name = f"{places[link.rank]}, {draft.name + by if draft else 'no draft'}"
    found: list[RankTimes | None] = link.all_gather(_read(kept.get(name)))
    if all(found):
        return [each for each in found if each], ""
    timed, error = _time(crew, hosts, options, asked, places, models)
    errors = [f"rank {rank} ({hosts[rank].name}): {each}" for rank, each in enumerate(link.all_gather(error)) if each]
    if errors or timed is None:
        return [], next(iter(errors), "")
    kept.put(name, asdict(timed))
    return link.all_gather(timed), ""


def _read_models(options: RunOptions) -> list[ModelInfo]:
    """The target and the drafts in use, the smallest first; none where they cannot be had."""
    try:
        model, *drafts = fetch_files([options.model, *options.drafts_in_use], options.offline)
        return [read_model_info(model), *read_drafts(drafts)]
    except UserError:
        return []


def _ask(models: Sequence[ModelInfo], options: RunOptions, hosts: Sequence[Host]) -> _Asked | None:
    """None where there is nothing that could be timed."""
    stages, n_ranks = stages_of_target(options, hosts), len(hosts)
    if not stages:
        return None
    targets = [_part(models, 0, len(stages), rank == n_ranks - 1) for rank in range(n_ranks)]
    drafts: dict[int, _Part] = {}
    if n_ranks > 1 and not options.draft_split:
        ranks = draft_ranks(n_ranks, draft_widths(len(models) - 1), options.draft_rank or 0)
        found = {rank: _part(models, 1 + number, 1, True) for number, (rank,) in enumerate(ranks)}
        drafts = {rank: part for rank, part in found.items() if part}
    return _Asked(tuple(part for part in targets if part), drafts) if all(targets) else None


def _part(models: Sequence[ModelInfo], model: int, n_stages: int, is_last: bool) -> _Part | None:
    sizes = sizes_of(models[model])
    span = timed_span(sizes, n_stages, is_last)
    return _Part(models[model].fingerprint, sizes, span, model) if span else None


def _place(asked: _Asked, hosts: Sequence[Host], options: RunOptions, rank: int) -> str:
    """All that a rank's times depend on but the draft: ranks of which this is the same are alike."""
    host, threads = hosts[rank], planned_threads(options, hosts)
    beside = [str(threads[other]) for other, each in enumerate(hosts) if each.name == host.name]
    return (
        f"runs: {asked.targets[rank].name}, {options.kernels}, {host.processor}, "
        f"{place_text(options, host, threads[rank], rank)}, threads there {' '.join(beside)}, "
        f"pipeinfer {__version__}, {describe_build()}"
    )


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, asked: _Asked, places: Sequence[str],
    models: Sequence[ModelInfo],
) -> tuple[RankTimes | None, str]:  # fmt: skip
    """What this rank found, and why it found nothing. Collective. `models`: rank 0's."""
    link, threads = crew.link, planned_threads(options, hosts)
    crew.watch.describe("timing layers")
    skeletons: list[Skeleton] | None = link.broadcast(_skeletons(models) if models else None)
    if skeletons is None:
        return None, ""
    own = asked.targets[link.rank]
    n_beside = len(beside := ranks_beside(hosts, threads, link.rank))
    model, error = _loaded(skeletons, own, hosts, options, link.rank)
    target: SliceTimes | None = None
    ratio = 1.0
    if not any(link.all_gather(error)):
        target, row_s = _time_in_turns(crew, hosts, options, places, own, model)
        if model and link.rank in beside and n_beside > 1:
            ratio = max(1.0, time_rows_for(model, time.monotonic, BESIDE_S) / row_s)
        link.all_gather(None)
    _close(model)
    if target is None:
        crew.watch.describe("")
        return None, error
    part, drafting = asked.drafts.get(link.rank), options_of_draft(options, hosts, link.rank)
    model, error = _loaded(skeletons, part, hosts, drafting, link.rank) if part else (None, "")
    draft = None
    if not any(link.all_gather(error)):
        each_draft = [f"rank {rank}" for rank in range(link.size)]
        draft, _ = _time_in_turns(crew, hosts, drafting, each_draft, part, model)
    _close(model)
    crew.watch.describe("")
    number = part.model - 1 if part and draft else None
    return RankTimes(target, draft, number, ratio, n_beside if link.rank in beside else 1, NOW), error


def _skeletons(models: Sequence[ModelInfo]) -> list[Skeleton] | None:
    try:
        return list(map(take_skeleton, models))
    except UserError:
        return None


def _loaded(
    skeletons: Sequence[Skeleton], part: _Part, hosts: Sequence[Host], options: RunOptions, rank: int
) -> tuple[LoadedModel | None, str]:
    """The layers, or why they cannot be loaded."""
    try:
        return load_blank(skeletons[part.model], part.span, hosts, options, rank, CHUNK), ""
    except UserError as error:
        return None, str(error)


def _close(model: LoadedModel | None) -> None:
    if model:
        model.close()
        forget_peak()  # it is no part of what the job holds


def _time_in_turns(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, alike: Sequence[str], part: _Part | None,
    model: LoadedModel | None,
) -> tuple[SliceTimes | None, float]:  # fmt: skip
    """This rank's, and seconds of a row of these layers; of ranks that are `alike` those of the first. Of a host one
    rank computes at a time. Collective."""
    link, found, row_s = crew.link, None, 0.0
    loaded: list[bool] = link.all_gather(model is not None)
    leaders = [rank for rank in range(link.size) if loaded[rank] and alike.index(alike[rank]) == rank]
    turns = {rank: sum(hosts[other].name == hosts[rank].name for other in leaders if other < rank) for rank in leaders}
    for turn in range(1 + max(turns.values(), default=-1)):
        if model and part and turns.get(link.rank) == turn:
            sizes = part.sizes
            output_bytes = sizes.output_bytes if model.is_last else 0
            asks = not backend_of(options, link.rank).is_torch
            found = time_slice(model, sizes.layer_bytes[slice(*part.span)], output_bytes, time.monotonic, asks)
            row_s = time_rows_for(model, time.monotonic, BESIDE_S / 2)
        link.all_gather(None)
    everyone: list[tuple[SliceTimes | None, float]] = link.all_gather((found, row_s))
    return everyone[alike.index(alike[link.rank])]


# -- what was kept


def _read(value: Any) -> RankTimes | None:
    """None when it is anything else."""
    try:
        draft = value["draft"] and _slice_of(value["draft"])
        found = RankTimes(
            _slice_of(value["target"]), draft, value["draft_number"], value["beside"], value["n_beside"], BEFORE
        )
        usable = isinstance(found.n_beside, int) and found.n_beside > 0 and 0 < found.beside < math.inf
    except (KeyError, TypeError, ValueError):
        return None
    return found if usable else None


def _slice_of(value: Mapping[str, Any]) -> SliceTimes:
    """Raises TypeError, KeyError or ValueError when it is none."""
    rows, s_per_byte, output_s = (tuple(value[name]) for name in ("rows", "s_per_byte", "output_s"))
    found = SliceTimes(rows, s_per_byte, output_s, value["context_s"], *(value[name] for name in _ONCE))
    if not rows or rows[0] != 1 or list(rows) != sorted(set(rows)) or len(s_per_byte) != len(rows):
        raise ValueError(rows)
    if len(output_s) not in (0, len(rows)) or not all(0 < each < math.inf for each in (*s_per_byte, *output_s)):
        raise ValueError(s_per_byte)
    if not all(0 <= each < math.inf for each in (found.context_s or 0.0, *(value[name] for name in _ONCE))):
        raise ValueError(value)
    return found


_ONCE = ("run_s", "reshape_s", "rest_s")
