"""Times the target's layers on ranks that are not alike, for the split. On every rank, before there is a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import NOW, LayerSpeed
from pipeinfer.cluster.timing.timed_layers import time_layers
from pipeinfer.job.loading.stages import experiment_key
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.profiling.known_times import known, read_layer_speed
from pipeinfer.job.profiling.probe import Parts, part_of, probe, read_models, share_skeletons
from pipeinfer.job.profiling.schedule import (
    evened,
    is_doubtful,
    kinds_of,
    planned_threads,
    ranks_to_time,
    timing_turns,
)
from pipeinfer.models.gguf.model_info import ModelInfo

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew

N_ROUNDS = 3
"""Ranks that look alike and differ are timed so often at most, and the best counts: the result is kept, and a host may
have been busy for a moment."""


def with_layer_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with the speed of those that get layers, where ranks differ and the split is free. Collective."""
    ranks, link = ranks_to_time(options, hosts), crew.link
    if not ranks:
        return hosts
    models = read_models(link, [options.model], options)
    parts: Parts = link.broadcast(_parts(models, ranks))
    if not parts:
        return hosts
    what = f"layers: {parts[link.rank]}, {options.kernels}, {hosts[link.rank].name}" if link.rank in parts else ""
    key = what and experiment_key(what, options, hosts, planned_threads(options, hosts), link.rank)
    found = known(
        link, key, read_layer_speed,
        lambda: _time(crew, hosts, options, parts, models), ranks,
        lambda speed: {"s_per_byte": speed.s_per_byte, "output_s": speed.output_s},
    )  # fmt: skip
    speeds = evened([speed for speed, _ in found], kinds_of(options, hosts))
    return [replace(each, speed=speed, untimed=why) for each, speed, (_, why) in zip(hosts, speeds, found, strict=True)]


def _parts(models: Sequence[ModelInfo], ranks: Sequence[int]) -> Parts:
    """Empty where a rank has none."""
    found = {rank: part_of(models, 0, len(ranks), rank == ranks[-1]) for rank in ranks if models}
    return {rank: part for rank, part in found.items() if part} if all(found.values()) else {}


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, parts: Parts, models: Sequence[ModelInfo]
) -> tuple[LayerSpeed | None, str]:
    """This rank's speed, or why it could not load its layers. Then no other rank has one. `models`: rank 0's."""
    link, best = crew.link, None
    if not (skeletons := share_skeletons(link, models)):
        return None, ""
    turns, kinds = timing_turns(hosts, planned_threads(options, hosts), parts), kinds_of(options, hosts)
    with probe(crew, hosts, options, skeletons, parts.get(link.rank)) as own:
        for _ in range(0 if any(own.errors) else N_ROUNDS):
            speed = own.time(turns, time_layers)
            best = min(filter(None, (best, speed)), key=lambda each: each.s_per_byte, default=None)
            if not is_doubtful(link.all_gather(best), kinds):
                break
    return replace(best, source=NOW) if best else None, own.error
