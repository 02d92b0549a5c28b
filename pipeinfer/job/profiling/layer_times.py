"""How fast each rank is at the target's layers: timed on each, unless all are alike, and kept for the next time.
On every rank, before there is a plan. Loads layers without weights, so that it takes no file and little time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeinfer import __version__
from pipeinfer.cluster.cores import Host
from pipeinfer.cluster.layer_speed import BEFORE, NOW, LayerSpeed
from pipeinfer.cluster.plan import Sizes
from pipeinfer.cluster.timed_layers import time_layers
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import load_layers, local_rank, place_text
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import sizes_of
from pipeinfer.job.placement.fetch import fetch_files
from pipeinfer.job.placement.gpus import rank_devices
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.job.profiling.timed_ranks import (
    Span,
    evened,
    is_doubtful,
    kinds_of,
    planned_threads,
    ranks_there,
    ranks_to_time,
    timed_span,
    timing_turns,
)
from pipeinfer.kept import user_kept
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.skeleton import Skeleton, put_up, take_skeleton
from pipeinfer.models.gguf.slice import open_blank, slice_bytes
from pipeinfer.models.llama.build import describe_build
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.torch.library import load_torch
from pipeinfer.outputs import temporary_folder

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew

N_CELLS = 256

N_ROUNDS = 3
"""Where ranks that look alike differ they are timed again, as often at most, and the best counts: what is found is
kept, and somebody may have used a host for a moment."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be timed: of each rank, layers [first, last) of the model."""

    fingerprint: str
    sizes: Sizes
    spans: dict[int, Span]


def with_layer_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts, with how fast those are that shall have layers; as they are where all are alike ranks of one host,
    where the options say who gets what, or where it cannot be timed. Collective."""
    ranks = ranks_to_time(options, hosts)
    if not ranks:
        return hosts
    link = crew.link
    info = _read_info(options) if link.rank == 0 else None
    asked: _Asked | None = link.broadcast(_ask(info, ranks) if info else None)
    if asked is None:
        return hosts
    own, kept = asked.spans.get(link.rank), user_kept()
    name = _name(asked, hosts, options, link.rank) if own else ""
    found = link.all_gather((_read(kept.get(name)) if own else None, ""))
    if not all(found[rank][0] for rank in ranks):
        found = link.all_gather(_time(crew, hosts, options, asked, info))
        if speed := found[link.rank][0]:
            kept.put(name, {"s_per_byte": speed.s_per_byte, "output_s": speed.output_s})
    speeds = evened([speed for speed, _ in found], kinds_of(options, hosts))
    return [replace(each, speed=speed, untimed=why) for each, speed, (_, why) in zip(hosts, speeds, found, strict=True)]


def _read_info(options: RunOptions) -> ModelInfo | None:
    """None where the model cannot be had, which who plans will say."""
    try:
        return read_model_info(*fetch_files([options.model], options.offline))
    except UserError:
        return None


def _ask(info: ModelInfo, ranks: Sequence[int]) -> _Asked | None:
    """None where the model cannot be timed."""
    sizes = sizes_of(info)
    spans = {rank: timed_span(sizes, len(ranks), rank == ranks[-1]) for rank in ranks}
    found = {rank: span for rank, span in spans.items() if span}
    return _Asked(info.fingerprint, sizes, found) if len(found) == len(ranks) else None


def _name(asked: _Asked, hosts: Sequence[Host], options: RunOptions, rank: int) -> str:
    """Under which a rank's speed is kept: all that it depends on."""
    (first, last), host, threads = asked.spans[rank], hosts[rank], planned_threads(options, hosts)
    beside = [str(threads[other]) for other in ranks_there(hosts, rank)]
    return (
        f"layers: {asked.fingerprint} {first}-{last - 1}, {options.kernels}, {host.name}, {host.processor}, "
        f"{place_text(options, host, threads[rank], rank)}, threads there {' '.join(beside)}, "
        f"pipeinfer {__version__}, {describe_build()}"
    )


def _read(value: Any) -> LayerSpeed | None:
    """What was kept; None when it is anything else."""
    if not isinstance(value, dict) or value.keys() != {"s_per_byte", "output_s"}:
        return None
    s_per_byte, output_s = value["s_per_byte"], value["output_s"]
    if not is_time(s_per_byte) or not (output_s is None or is_time(output_s)):
        return None
    return LayerSpeed(s_per_byte, output_s, BEFORE)


def is_time(value: Any) -> bool:
    """Whether what was kept can be the seconds of something."""
    return isinstance(value, float) and 0 < value < math.inf


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, asked: _Asked, info: ModelInfo | None
) -> tuple[LayerSpeed | None, str]:
    """This rank's speed, and why it has none: it could not load what it shall time. Then no other rank has one.
    `info`: rank 0's."""
    link, own = crew.link, asked.spans.get(crew.link.rank)
    model, error = None, ""
    try:
        skeleton: Skeleton | None = link.broadcast(take_skeleton_of(info) if info else None)
        if own and skeleton:
            crew.watch.describe(f"timing layers {own[0]}-{own[1] - 1}")
            model = load_blank(skeleton, own, hosts, options, link.rank)
    except UserError as caught:
        error = str(caught)
    best: LayerSpeed | None = None
    turns, kinds = timing_turns(hosts, planned_threads(options, hosts), asked.spans), kinds_of(options, hosts)
    failed = any(link.all_gather(error)) or not skeleton
    for _ in range(0 if failed else N_ROUNDS):
        for turn in range(1 + max(turns.values())):
            if model and own and turn == turns[link.rank]:
                speed = _time_loaded(model, own, asked.sizes, asks=not backend_of(options, link.rank).is_torch)
                best = min(filter(None, (best, speed)), key=lambda each: each.s_per_byte)
            link.all_gather(None)
        if not is_doubtful(link.all_gather(best), kinds):
            break
    if model:
        model.close()
        forget_peak()  # it is no part of what the job holds
    crew.watch.describe("")
    return best, error


def _time_loaded(model: LoadedModel, own: Span, sizes: Sizes, asks: bool) -> LayerSpeed:
    output_bytes = sizes.output_bytes if model.is_last else 0
    return replace(time_layers(model, sizes.layer_bytes[slice(*own)], output_bytes, time.monotonic, asks), source=NOW)


def take_skeleton_of(info: ModelInfo) -> Skeleton | None:
    """None where its file cannot be read."""
    try:
        return take_skeleton(info)
    except UserError:
        return None


def load_blank(
    skeleton: Skeleton, own: Span, hosts: Sequence[Host], options: RunOptions, rank: int, n_rows: int = 1
) -> LoadedModel:
    """Layers without weights, for runs of up to `n_rows`. Raises UserError where they cannot be loaded, or fill the
    host."""
    params = LlamaParams(
        n_cells=N_CELLS,
        n_seq_max=2,
        n_batch=n_rows,
        n_outputs_max=n_rows,
        n_threads=planned_threads(options, hosts)[rank],
        n_gpu_layers=gpu_layers(options, rank),
        exact=options.numerics == "exact",
        cache=options.cache,
        devices=rank_devices(options, hosts, rank),
    )
    if backend_of(options, rank).is_torch:
        load_torch()  # takes seconds, in which somebody might kill this rank, and nobody would remove the folder
    with temporary_folder() as folder:
        info = put_up(skeleton, folder)
        _check_room(slice_bytes(info, *own), hosts, rank)
        return load_layers(
            lambda: open_blank(info, *own), params, backend_of(options, rank), local_rank(options, hosts, rank)
        )


def _check_room(n_bytes: int, hosts: Sequence[Host], rank: int) -> None:
    """Raises UserError where the ranks of a host, all of which load as much, would leave it no memory."""
    room = hosts[rank].room
    left = min(room.own, room.host // sum(host.name == hosts[rank].name for host in hosts))
    if n_bytes > left:
        raise UserError(f"{n_bytes / 1e6:.0f} MB of layers are more than the {left / 1e6:.0f} MB that it has")
