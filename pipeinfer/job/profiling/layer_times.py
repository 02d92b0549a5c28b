"""Times the target's layers on ranks that are not alike, for the split. On every rank, before there is a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host, ranks_there
from pipeinfer.cluster.hosts.layer_speed import BEFORE, NOW, LayerSpeed
from pipeinfer.cluster.plan import Sizes
from pipeinfer.cluster.timing.timed_layers import time_layers
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import experiment_key, load_layers, local_rank
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import sizes_of
from pipeinfer.job.placement.exactness import repacked_alike
from pipeinfer.job.placement.gpus import rank_devices
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.job.placement.model_files import fetch_files
from pipeinfer.job.profiling.known_times import known
from pipeinfer.job.profiling.schedule import (
    Kind,
    Span,
    evened,
    is_doubtful,
    kinds_of,
    planned_threads,
    ranks_to_time,
    timed_span,
    timing_turns,
)
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.skeleton import Skeleton, put_up, take_skeleton
from pipeinfer.models.gguf.slice import open_blank, slice_bytes
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.torch.library import load_torch
from pipeinfer.outputs import temporary_folder

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link
    from pipeinfer.job.launch.start import Crew

N_CELLS = 256
N_ROUNDS = 3
"""Ranks that look alike and differ are timed so often at most, and the best counts: the result is kept, and a host may
have been busy for a moment."""


def with_layer_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with the speed of those that get layers, where ranks differ and the split is free. Collective."""
    ranks, link = ranks_to_time(options, hosts), crew.link
    if not ranks:
        return hosts
    info = _read(link, options)
    fingerprint, sizes = link.broadcast((info.fingerprint, sizes_of(info)) if info else ("", None))
    if not sizes:
        return hosts
    spans = {rank: timed_span(sizes, len(ranks), rank == ranks[-1]) for rank in ranks}
    if not all(spans.values()):
        return hosts
    key, own = "", spans.get(link.rank)
    if own:
        what = f"layers: {fingerprint} {own[0]}-{own[1] - 1}, {options.kernels}, {hosts[link.rank].name}"
        key = experiment_key(what, options, hosts, planned_threads(options, hosts), link.rank)
    found, are_kept = known(link, key, LayerSpeed, lambda: _time(crew, hosts, options, info, sizes, spans), ranks)
    speeds = evened([speed for speed, _ in found], kinds_of(options, hosts))
    source = BEFORE if are_kept else NOW
    return [
        replace(host, speed=speed and replace(speed, source=source), untimed=why)
        for host, speed, (_, why) in zip(hosts, speeds, found, strict=True)
    ]


def _read(link: Link, options: RunOptions) -> ModelInfo | None:
    """The target's header on rank 0; None elsewhere, and where it cannot be read, which is said when it is planned."""
    try:
        return read_model_info(fetch_files([options.model], options.offline)[0]) if link.rank == 0 else None
    except UserError:
        return None


def _share_skeleton(link: Link, info: ModelInfo | None) -> Skeleton | None:
    """Rank 0's model without weights; None if its file cannot be read any more. Collective."""
    try:
        found = take_skeleton(info) if info else None
    except UserError:
        found = None
    return link.broadcast(found)


def _time(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, info: ModelInfo | None, sizes: Sizes,
    spans: Mapping[int, Span | None],
) -> tuple[LayerSpeed | None, str]:  # fmt: skip
    """This rank's speed, or why it could not load its layers. Then no other rank has one. Collective."""
    link, own, model, error = crew.link, spans.get(crew.link.rank), None, ""
    if not (skeleton := _share_skeleton(link, info)):
        return None, ""
    if own:
        crew.watch.describe(f"timing layers {own[0]}-{own[1] - 1}")
        try:
            model = _load_blank(skeleton, own, hosts, options, link.rank)
        except UserError as caught:
            error = str(caught)

    def time_own() -> LayerSpeed | None:
        if not model or not own:
            return None
        output_bytes, asks = sizes.output_bytes if model.is_last else 0, not backend_of(options, link.rank).is_torch
        return time_layers(model, sizes.layer_bytes[slice(*own)], output_bytes, time.monotonic, asks)

    turns, kinds = timing_turns(hosts, planned_threads(options, hosts), spans), kinds_of(options, hosts)
    speed = None if any(link.all_gather(error)) else _best_speed(link, time_own, turns, kinds)
    if model:
        model.close()
        forget_peak()  # it is no part of what the job holds
    crew.watch.describe("")
    return speed, error


def _best_speed(
    link: Link, time_own: Callable[[], LayerSpeed | None], turns: Mapping[int, int], kinds: Sequence[Kind]
) -> LayerSpeed | None:
    """Of this rank's layers, timed in its turn; all ranks again while those of a kind differ. Collective."""
    best: LayerSpeed | None = None
    for _ in range(N_ROUNDS):
        for turn in range(1 + max(turns.values())):
            if turns.get(link.rank) == turn:
                best = min(filter(None, (best, time_own())), key=lambda speed: speed.s_per_byte, default=None)
            link.all_gather(None)
        if not is_doubtful(link.all_gather(best), kinds):
            break
    return best


def _load_blank(skeleton: Skeleton, own: Span, hosts: Sequence[Host], options: RunOptions, rank: int) -> LoadedModel:
    """Layers without weights. Raises UserError where they cannot be loaded, or fill the host."""
    params = LlamaParams(
        n_cells=N_CELLS,
        n_seq_max=2,
        n_batch=1,
        n_outputs_max=1,
        n_threads=planned_threads(options, hosts)[rank],
        n_gpu_layers=gpu_layers(options, rank),
        exact=options.numerics == "exact",
        cache=options.cache,
        devices=rank_devices(options, hosts, rank),
        repack=options.repack,
    )
    if backend_of(options, rank).is_torch:
        load_torch()  # takes seconds, in which somebody might kill this rank, and nobody would remove the folder
    with temporary_folder() as folder:
        info = put_up(skeleton, folder)
        _check_room(slice_bytes(info, *own), hosts, rank)
        alone = replace(options, parallel=1, kept_numerics="")  # a row is timed, and no group of rows
        params = replace(params, repacked=repacked_alike(alone, hosts, info, len(options.drafts_in_use)))
        return load_layers(
            lambda: open_blank(info, *own), params, backend_of(options, rank), local_rank(options, hosts, rank)
        )


def _check_room(n_bytes: int, hosts: Sequence[Host], rank: int) -> None:
    """Raises UserError where the ranks of a host, all of which load as much, would leave it no memory."""
    room = hosts[rank].memory
    left = min(room.own, room.host // len(ranks_there(hosts, rank)))
    if n_bytes > left:
        raise UserError(f"{n_bytes / 1e6:.0f} MB of layers are more than the {left / 1e6:.0f} MB that it has")
