"""What a job finds out about its hosts before there is a plan: models, GPUs, speed. On every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.loading.device_messages import sends_from_device
from pipeinfer.job.options.options import RunOptions, backend_of
from pipeinfer.job.placement.gpus import check_own_devices, with_gpus
from pipeinfer.job.placement.model_files import find_models
from pipeinfer.job.profiling.layer_times import with_layer_times
from pipeinfer.models.llama.repacking import repacked_types

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


def find_hosts(crew: Crew, options: RunOptions) -> tuple[RunOptions, Sequence[Host]]:
    """The options, on rank 0 with files for names, and the hosts with all that is found. Collective. Raises
    JobError."""
    options, hosts = find_models(crew.link, crew.hosts, options)
    return options, with_layer_times(crew, with_repacked(crew, with_own_gpus(crew, hosts, options), options), options)


def with_own_gpus(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with free memory of their GPUs, and whether MPI reads it. Collective. Raises JobError for wrong
    GPUs."""
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI

    link = crew.link
    link.agree_all(lambda: check_own_devices(options, hosts, link.rank))
    hosts = with_gpus(options, hosts, link.rank, link.all_gather)
    own = link.agree_all(lambda: sends_from_device(options, hosts, link.rank, is_gpu_aware))
    return [replace(host, device_messages=each) for host, each in zip(hosts, link.all_gather(own), strict=True)]


def with_repacked(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with the types of weights that may be repacked there with exact numerics. Collective."""
    link = crew.link
    asked = options.repack and options.numerics == "exact" and not backend_of(options, link.rank).is_torch
    found = link.agree_all(lambda: repacked_types() if asked else ())
    return [replace(host, repacked=each) for host, each in zip(hosts, link.all_gather(found), strict=True)]
