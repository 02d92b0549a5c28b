"""Times the target's layers on ranks that are not alike, for the split. On every rank, before there is a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.cluster.assignment import Sizes
from pipeinfer.cluster.hosts.cores import Host, ranks_there
from pipeinfer.cluster.hosts.layer_speed import BEFORE, NOW, LayerSpeed
from pipeinfer.cluster.timing.timed_layers import time_layers
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import experiment_key, load_layers
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import RankDevices, plan_devices
from pipeinfer.job.placement.job_plan import sizes_of
from pipeinfer.job.placement.lay_out import unnamed_numerics
from pipeinfer.job.placement.model_files import fetch_files
from pipeinfer.job.profiling.known_times import known
from pipeinfer.job.profiling.schedule import (
    Kind,
    Span,
    all_threads,
    evened,
    is_doubtful,
    kinds_of,
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
    info = _read(link, options.model, options.offline)
    fingerprint, sizes = link.broadcast((info.fingerprint, sizes_of(info)) if info else ("", None))
    if not sizes:
        return hosts
    spans = {rank: timed_span(sizes, len(ranks), rank == ranks[-1]) for rank in ranks}
    if not all(spans.values()):
        return hosts
    timing = _Timing(crew, options, hosts, info, sizes, spans)
    found, are_kept = known(link, timing.key(fingerprint), LayerSpeed, timing.run, ranks)
    speeds = evened([speed for speed, _ in found], timing.kinds)
    source = BEFORE if are_kept else NOW
    return [
        replace(host, speed=speed and replace(speed, source=source), untimed=why)
        for host, speed, (_, why) in zip(hosts, speeds, found, strict=True)
    ]


def _read(link: Link, model: Path, offline: bool) -> ModelInfo | None:
    """The target's header on rank 0; None elsewhere, and where it cannot be read, which is said when it is planned."""
    try:
        return read_model_info(fetch_files([model], offline)[0]) if link.rank == 0 else None
    except UserError:
        return None


def _share_skeleton(link: Link, info: ModelInfo | None) -> Skeleton | None:
    """Rank 0's model without weights; None if its file cannot be read any more. Collective."""
    try:
        found = take_skeleton(info) if info else None
    except UserError:
        found = None
    return link.broadcast(found)


@dataclass(frozen=True)
class _Timing:
    """Of the target's layers on ranks that are not alike, as one rank does it. `spans`: the layers of each that times
    some; `info`: the target's header, on rank 0."""

    crew: Crew
    options: RunOptions
    hosts: Sequence[Host]
    info: ModelInfo | None
    sizes: Sizes
    spans: Mapping[int, Span | None]

    @cached_property
    def devices(self) -> tuple[RankDevices, ...]:
        return plan_devices(self.options, self.hosts)

    @cached_property
    def threads(self) -> tuple[int, ...]:
        return all_threads(self.options.threads, self.hosts)

    @cached_property
    def kinds(self) -> list[Kind]:
        return kinds_of(self.hosts, self.threads, self.devices)

    @property
    def own(self) -> Span | None:
        """This rank's layers."""
        return self.spans.get(self.crew.link.rank)

    def key(self, fingerprint: str) -> str:
        """The name under which this rank's speed is kept; empty: it times nothing."""
        if not self.own:
            return ""
        first, last = self.own
        rank = self.crew.link.rank
        what = f"layers: {fingerprint} {first}-{last - 1}, {self.options.kernels}, {self.hosts[rank].name}"
        return experiment_key(what, self.devices[rank].target, self.hosts, self.threads, rank)

    def run(self) -> tuple[LayerSpeed | None, str]:
        """This rank's speed, or why it could not load its layers. Then no other rank has one. Collective."""
        link, own, model, error = self.crew.link, self.own, None, ""
        if not (skeleton := _share_skeleton(link, self.info)):
            return None, ""
        if own:
            self.crew.watch.describe(f"timing layers {own[0]}-{own[1] - 1}")
            try:
                model = self._load_blank(skeleton, own)
            except UserError as caught:
                error = str(caught)

        def time_own() -> LayerSpeed | None:
            if not model or not own:
                return None
            output_bytes = self.sizes.output_bytes if model.is_last else 0
            asks = not self.devices[link.rank].target.is_torch
            return time_layers(model, self.sizes.layer_bytes[slice(*own)], output_bytes, time.monotonic, asks)

        turns = timing_turns(self.hosts, self.threads, self.spans)
        speed = None if any(link.all_gather(error)) else _best_speed(link, time_own, turns, self.kinds)
        if model:
            model.close()
            forget_peak()  # it is no part of what the job holds
        self.crew.watch.describe("")
        return speed, error

    def _load_blank(self, skeleton: Skeleton, own: Span) -> LoadedModel:
        """Layers without weights. Raises UserError where they cannot be loaded, or fill the host."""
        rank = self.crew.link.rank
        device = self.devices[rank].target
        if device.is_torch:
            load_torch()  # takes seconds, in which somebody might kill this rank, and nobody would remove the folder
        with temporary_folder() as folder:
            info = put_up(skeleton, folder)
            _check_room(slice_bytes(info, *own), self.hosts, rank)
            alone = replace(self.options, n_expected=1)  # a row is timed, and no group of rows
            numerics = unnamed_numerics(alone, self.hosts, info, self.devices)
            params = LlamaParams(
                n_cells=N_CELLS,
                n_seq_max=2,
                n_batch=1,
                n_outputs_max=1,
                n_threads=self.threads[rank],
                n_gpu_layers=device.n_gpu_layers,
                exact=numerics.exact,
                cache=numerics.cache,
                devices=device.devices,
                repack=numerics.repack,
                repacked=numerics.repacked,
            )
            return load_layers(lambda: open_blank(info, *own), params, device)


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


def _check_room(n_bytes: int, hosts: Sequence[Host], rank: int) -> None:
    """Raises UserError where the ranks of a host, all of which load as much, would leave it no memory."""
    room = hosts[rank].memory
    left = min(room.own, room.host // len(ranks_there(hosts, rank)))
    if n_bytes > left:
        raise UserError(f"{n_bytes / 1e6:.0f} MB of layers are more than the {left / 1e6:.0f} MB that it has")
