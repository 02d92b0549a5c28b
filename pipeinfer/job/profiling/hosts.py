"""What a job finds out about its hosts before there is a plan: models, GPUs, speed. On every rank."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.loading.device_messages import sends_from_device
from pipeinfer.job.options.limits import OFF
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import plan_devices
from pipeinfer.job.placement.gpus import can_offload, check_present, gpus, own_gpus
from pipeinfer.job.placement.model_files import fetch_models
from pipeinfer.models.gguf.head import OWN_HEAD
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.models.llama.repacking import grouped_types, repacked_types

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


def find_hosts(crew: "Crew", options: RunOptions) -> tuple[RunOptions, Sequence[Host]]:
    """The options with files for names, and the hosts with all that is found. Collective. Raises JobError."""
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI
    from pipeinfer.job.profiling.layer_times import with_layer_times

    link = crew.link
    found = link.agree(lambda: fetch_models(options))
    own = link.agree_all(lambda: describe_own(found, crew.hosts, link.rank, is_gpu_aware))
    return found, with_layer_times(crew, link.all_gather(own), found)


def describe_own(
    options: RunOptions, hosts: Sequence[Host], rank: int, ask_mpi: Callable[[], bool | None] = lambda: None
) -> Host:
    """A rank's host, asked there, with the models that it lacks, its GPUs and their free memory, whether MPI reads
    that, and the types of weights that may be repacked there with exact numerics. Raises UserError for wrong GPUs."""
    offloads = can_offload()
    uses_gpus = offloads and (any(options.n_gpu_layers) or options.n_gpu_layers_draft != 0)
    present = gpus() if uses_gpus or any(options.device) else []
    alike = [replace(host, offloads=offloads) for host in hosts]  # where others' builds differ, they say so later
    alike[rank] = own = replace(alike[rank], gpu_names=tuple(device.name for device in present))
    devices = plan_devices(options, alike)
    if named := devices[rank].target.devices:
        try:
            check_present(named, present)
        except UserError as error:
            raise UserError(f"rank {rank} (host {own.name}): {error}") from None
    paths = (options.model, *(path for path in options.drafts if path != OWN_HEAD))
    may_repack = options.repack and options.numerics == "exact" and not devices[rank].target.is_torch
    gpu_aware = OFF if options.pace else options.gpu_aware
    return replace(
        own,
        lacks=frozenset(str(path) for path in paths if not all(map(os.path.exists, part_paths(path)))),
        gpus=own_gpus(devices[rank], present),
        device_messages=sends_from_device(gpu_aware, devices, own, rank, ask_mpi),
        repacked=repacked_types() if may_repack else (),
        grouped=grouped_types() if may_repack else (),
    )
