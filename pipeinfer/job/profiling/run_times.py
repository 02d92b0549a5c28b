"""Times runs of some layers of target and draft on each rank, for predictions. On every rank, before there is a
plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import NOW
from pipeinfer.cluster.plan import draft_ranks, draft_widths
from pipeinfer.cluster.timing.slice_times import RankTimes, SliceTimes
from pipeinfer.cluster.timing.timed_layers import CHUNK, time_rows_for, time_slice
from pipeinfer.job.loading.stages import experiment_key
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.draft_place import options_of_draft
from pipeinfer.job.profiling.known_times import known, read_rank_times
from pipeinfer.job.profiling.probe import Parts, part_of, probe, read_models, share_skeletons
from pipeinfer.job.profiling.schedule import one_at_a_time, planned_threads, ranks_beside, stages_of_target
from pipeinfer.models.gguf.model_info import ModelInfo

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew

BESIDE_S = 0.15


def known_run_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> tuple[list[RankTimes], str]:
    """Of every rank; none, and the reason, where they cannot be timed. Collective."""
    link, everyone = crew.link, range(len(hosts))
    models = read_models(link, [options.model, *options.drafts_in_use], options)
    targets, drafts = link.broadcast(_parts(models, options, hosts))
    if not targets:
        return [], ""
    threads = planned_threads(options, hosts)
    places = [
        experiment_key(f"runs: {targets[rank]}, {options.kernels}", options, hosts, threads, rank) for rank in everyone
    ]
    drafting = options_of_draft(options, hosts, link.rank)
    by = "" if drafting is options else f" by {backend_of(drafting, link.rank)} -ngl {drafting.n_gpu_layers[link.rank]}"
    key = f"{places[link.rank]}, {f'{drafts[link.rank]}{by}' if link.rank in drafts else 'no draft'}"
    found = known(
        link, key, read_rank_times, lambda: _time(crew, hosts, options, targets, drafts, places, models), everyone
    )
    times = [each for each, _ in found if each]
    errors = [f"rank {rank} ({hosts[rank].name}): {error}" for rank, (_, error) in enumerate(found) if error]
    return (times, "") if len(times) == link.size else ([], next(iter(errors), ""))


def _parts(models: Sequence[ModelInfo], options: RunOptions, hosts: Sequence[Host]) -> tuple[Parts, Parts]:
    """Of each rank some of the target's layers, and of those with a draft its layers; empty if a rank can have none."""
    stages, n_ranks = stages_of_target(options, hosts) if models else [], len(hosts)
    targets = {rank: part_of(models, 0, len(stages), rank == n_ranks - 1) for rank in range(n_ranks) if stages}
    if not stages or not all(targets.values()):
        return {}, {}
    ranks: tuple[tuple[int, ...], ...] = ()
    if n_ranks > 1 and not options.draft_split:
        ranks = draft_ranks(n_ranks, draft_widths(len(models) - 1), options.fixed_draft_rank)
    drafts = {rank: part_of(models, 1 + number, 1, is_last=True) for number, (rank,) in enumerate(ranks)}
    of_target, of_drafts = ({rank: part for rank, part in each.items() if part} for each in (targets, drafts))
    return of_target, of_drafts


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, targets: Parts, drafts: Parts, places: Sequence[str],
    models: Sequence[ModelInfo],
) -> tuple[RankTimes | None, str]:  # fmt: skip
    """This rank's times, or why it could not load. Of ranks with the same `places` the first is timed. Collective."""
    link, ratio = crew.link, 1.0
    if not (skeletons := share_skeletons(link, models)):
        return None, ""
    beside = ranks_beside(hosts, planned_threads(options, hosts), link.rank)
    leaders = [places.index(place) for place in places]
    with probe(crew, hosts, options, skeletons, targets[link.rank], CHUNK) as own:
        if any(own.errors):
            return None, own.error
        found = link.all_gather(own.time(one_at_a_time(hosts, set(leaders)), _time_costs))[leaders[link.rank]]
        assert found, "the first rank of a kind has layers"
        target, row_s = found
        if own.model and link.rank in beside and len(beside) > 1:
            ratio = max(1.0, time_rows_for(own.model, time.monotonic, BESIDE_S) / row_s)
        link.all_gather(None)
    drafting, part = options_of_draft(options, hosts, link.rank), drafts.get(link.rank)
    with probe(crew, hosts, drafting, skeletons, part, CHUNK) as own:
        if any(own.errors):
            return None, own.error
        draft = own.time(one_at_a_time(hosts, drafts), _time_costs)
    n_beside = len(beside) if link.rank in beside else 1
    if not part or not draft:
        return RankTimes(target, None, None, ratio, n_beside, NOW), ""
    return RankTimes(target, draft[0], part.model - 1, ratio, n_beside, NOW), ""


def _time_costs(*words: Any) -> tuple[SliceTimes, float]:
    """What runs cost, and seconds of a row. `words`: those of `time_slice`."""
    return time_slice(*words), time_rows_for(words[0], time.monotonic, BESIDE_S / 2)
