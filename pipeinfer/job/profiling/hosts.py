"""What a job finds out about its hosts before there is a plan: models, GPUs, speed. On every rank."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.loading.device_messages import sends_from_device
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.gpus import check_own_devices, own_gpus
from pipeinfer.job.placement.model_files import fetch_models
from pipeinfer.models.gguf.head import OWN_HEAD
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.models.llama.repacking import grouped_types, repacked_types

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


def find_hosts(crew: "Crew", options: RunOptions) -> tuple[RunOptions, Sequence[Host]]:
    """The options, on rank 0 with files for names, and the hosts with all that is found. Collective. Raises
    JobError."""
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI
    from pipeinfer.job.profiling.layer_times import with_layer_times

    link = crew.link
    fetched = link.agree(lambda: fetch_models(options))
    own = link.agree_all(lambda: describe_own(fetched, crew.hosts, link.rank, is_gpu_aware))
    options = options if link.rank else fetched
    return options, with_layer_times(crew, link.all_gather(own), options)


def describe_own(
    options: RunOptions, hosts: Sequence[Host], rank: int, ask_mpi: Callable[[], bool | None] = lambda: None
) -> Host:
    """A rank's host, asked there, with the models that it lacks, free memory of its GPUs, whether MPI reads that, and
    the types of weights that may be repacked there with exact numerics. Raises UserError for wrong GPUs."""
    check_own_devices(options, hosts, rank)
    paths = (options.model, *(path for path in options.drafts if path != OWN_HEAD))
    may_repack = options.repack and options.numerics == "exact" and not backend_of(options, rank).is_torch
    return replace(
        hosts[rank],
        lacks=frozenset(str(path) for path in paths if not all(map(os.path.exists, part_paths(path)))),
        gpus=own_gpus(options, hosts, rank),
        device_messages=sends_from_device(options, hosts, rank, ask_mpi),
        repacked=repacked_types() if may_repack else (),
        grouped=grouped_types() if may_repack else (),
    )
