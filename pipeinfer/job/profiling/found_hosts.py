"""What is found out of a job's hosts once it is known where its models are: which GPUs their ranks have, and how fast
they are. On every rank, before there is a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeinfer.cluster.cores import Host
from pipeinfer.job.loading.device_messages import with_device_messages
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.gpus import ranks_fault, with_gpus
from pipeinfer.job.profiling.draft_times import with_draft_times
from pipeinfer.job.profiling.layer_times import with_layer_times

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.job.launch.start import Crew


def with_own_gpus(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> tuple[Sequence[Host], str]:
    """The hosts with what is free on the GPUs that ranks shall use and whether MPI reads their memory, and what is
    wrong with those; empty if nothing is. Collective."""
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI

    link = crew.link
    if fault := ranks_fault(options, hosts, link.rank, link.all_gather):
        return hosts, fault
    hosts = with_gpus(options, hosts, link.rank, link.all_gather)
    return with_device_messages(options, hosts, link.rank, is_gpu_aware, link.all_gather)


def with_times(crew: Crew, hosts: Sequence[Host], options: RunOptions) -> Sequence[Host]:
    """The hosts with how fast each rank is at a lone draft and at the target's layers, where that decides something.
    Collective."""
    return with_layer_times(crew, with_draft_times(crew, hosts, options), options)
