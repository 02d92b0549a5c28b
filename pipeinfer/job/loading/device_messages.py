"""Whether activations are sent directly between GPUs (--gpu-aware). Runs on every rank, before there is a plan."""

from collections.abc import Callable, Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.options.limits import AUTO, OFF
from pipeinfer.job.placement.devices import RankDevices


def sends_from_device(
    gpu_aware: str, devices: Sequence[RankDevices], host: Host, rank: int, ask_mpi: Callable[[], bool | None]
) -> bool:
    """Whether MPI moves this rank's activations. `gpu_aware`: the option's word; `ask_mpi`: whether MPI reports that it
    can; None: it does not report it.

    Raises UserError where that is asked for and MPI says that it cannot.
    """
    by_torch = [target.is_torch for target, _ in devices]
    if gpu_aware == OFF or sum(by_torch) < 2 or not by_torch[rank]:
        return False
    is_aware = ask_mpi()
    if gpu_aware == AUTO and not is_aware:
        return False
    try:
        gpu = gpu_of(devices[rank].target)
    except UserError:  # who loads the layers will say it
        return False
    if gpu and is_aware is False:
        raise UserError(
            f"--gpu-aware {gpu_aware}: rank {rank} (host {host.name}) is on a GPU, and MPI says there "
            "that it does not send from a GPU's memory; leave the option out, or use a GPU-aware MPI (`pipeinfer info` "
            "under mpirun tells)"
        )
    return bool(gpu) or gpu_aware != AUTO
