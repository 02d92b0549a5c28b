"""Times parts of models on ranks: one procedure for the split, the draft's place and predictions. Loads no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.plan import Sizes
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import forget_peak
from pipeinfer.job.loading.stages import load_layers, local_rank
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.deployment import read_drafts, sizes_of
from pipeinfer.job.placement.exactness import repacked_alike
from pipeinfer.job.placement.gpus import rank_devices
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.job.placement.model_files import fetch_files
from pipeinfer.job.profiling.schedule import Span, planned_threads, timed_span
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.gguf.skeleton import Skeleton, put_up, take_skeleton
from pipeinfer.models.gguf.slice import open_blank, slice_bytes
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.torch.library import load_torch
from pipeinfer.outputs import temporary_folder

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link
    from pipeinfer.job.launch.start import Crew

T = TypeVar("T")
N_CELLS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a model that a rank times. `model`: its index among the models that were read."""

    fingerprint: str
    sizes: Sizes
    span: Span
    model: int

    def __str__(self) -> str:
        return f"{self.fingerprint} {self.span[0]}-{self.span[1] - 1}"

    @property
    def layer_bytes(self) -> Sequence[int]:
        return self.sizes.layer_bytes[slice(*self.span)]


Parts = Mapping[int, Part]
"""By rank."""


def part_of(models: Sequence[ModelInfo], model: int, n_stages: int, is_last: bool) -> Part | None:
    """See `timed_span`; None where no layers can be timed."""
    sizes = sizes_of(models[model])
    span = timed_span(sizes, n_stages, is_last)
    return Part(models[model].fingerprint, sizes, span, model) if span else None


def read_models(link: Link, paths: Sequence[Path], options: RunOptions) -> list[ModelInfo]:
    """On rank 0 the first model, then the others, the smallest first; empty elsewhere, and where a file is missing."""
    try:
        found = fetch_files(paths, options.offline) if link.rank == 0 else []
        return [*read_drafts(found[:1]), *read_drafts(found[1:])]
    except UserError:
        return []


def share_skeletons(link: Link, models: Sequence[ModelInfo]) -> list[Skeleton]:
    """Rank 0's models without weights; empty if a file cannot be read any more. Collective."""
    try:
        return link.broadcast(list(map(take_skeleton, models)))
    except UserError:
        return link.broadcast([])


@dataclass(frozen=True, slots=True)
class Probe:
    """A part of a model that this rank has loaded, if any. `errors`: of every rank, why it could not load; empty: it
    could."""

    link: Link
    part: Part | None
    model: LoadedModel | None
    says_when: bool
    """Whether the model's callback between layers is called when they are computed."""
    errors: Sequence[str]

    @property
    def error(self) -> str:
        return self.errors[self.link.rank]

    def time(self, turns: Mapping[int, int], time_part: Callable[..., T]) -> T | None:
        """The result of `time_part`, called as `time_layers` is, in this rank's turn; None without layers.
        Collective."""
        found = None
        for turn in range(1 + max(turns.values(), default=-1)):
            if self.part and self.model and turns.get(self.link.rank) == turn:
                output_bytes = self.part.sizes.output_bytes if self.model.is_last else 0
                found = time_part(self.model, self.part.layer_bytes, output_bytes, time.monotonic, self.says_when)
            self.link.all_gather(None)
        return found


@contextmanager
def probe(
    crew: Crew, hosts: Sequence[Host], options: RunOptions, skeletons: Sequence[Skeleton], part: Part | None,
    n_rows: int = 1,
) -> Iterator[Probe]:  # fmt: skip
    """Load this rank's part for runs of up to `n_rows`, by `options`. Collective."""
    link, model, error = crew.link, None, ""
    if part:
        crew.watch.describe(f"timing layers {part.span[0]}-{part.span[1] - 1}")
        try:
            model = _load_blank(skeletons[part.model], part.span, hosts, options, link.rank, n_rows)
        except UserError as caught:
            error = str(caught)
    yield Probe(link, part, model, not backend_of(options, link.rank).is_torch, link.all_gather(error))
    if model:
        model.close()
        forget_peak()  # it is no part of what the job holds
    crew.watch.describe("")


def _load_blank(
    skeleton: Skeleton, own: Span, hosts: Sequence[Host], options: RunOptions, rank: int, n_rows: int
) -> LoadedModel:
    """Layers without weights. Raises UserError where they cannot be loaded, or fill the host."""
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
        repack=options.repack,
    )
    if backend_of(options, rank).is_torch:
        load_torch()  # takes seconds, in which somebody might kill this rank, and nobody would remove the folder
    with temporary_folder() as folder:
        info = put_up(skeleton, folder)
        _check_room(slice_bytes(info, *own), hosts, rank)
        params = replace(params, repacked=repacked_alike(options, hosts, info, len(options.drafts_in_use)))
        return load_layers(
            lambda: open_blank(info, *own), params, backend_of(options, rank), local_rank(options, hosts, rank)
        )


def _check_room(n_bytes: int, hosts: Sequence[Host], rank: int) -> None:
    """Raises UserError where the ranks of a host, all of which load as much, would leave it no memory."""
    room = hosts[rank].memory
    left = min(room.own, room.host // sum(host.name == hosts[rank].name for host in hosts))
    if n_bytes > left:
        raise UserError(f"{n_bytes / 1e6:.0f} MB of layers are more than the {left / 1e6:.0f} MB that it has")
