"""Which ranks' activations MPI shall move from device to device, past the host's memory: asked for, or where it says
that it can. On every rank, before there is a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeinfer.cluster.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.options.limits import AUTO, OFF
from pipeinfer.job.options.options import RunOptions, backend_of

Word = tuple[bool, str]
"""Whether a rank's are to be moved so, and what is wrong with that."""


def with_device_messages(
    options: RunOptions, hosts: Sequence[Host], rank: int, is_aware: Callable[[], bool | None],
    gather: Callable[[Word], list[Word]],
) -> tuple[Sequence[Host], str]:  # fmt: skip
    """The hosts with what each rank does, and what is wrong on the lowest rank where something is; empty if nothing is.

    `is_aware`: whether MPI can, as it says. `gather`: every rank's word, on every rank.
    """
    by_torch = [backend_of(options, other).is_torch for other in range(len(hosts))]
    if options.gpu_aware == OFF or options.pace is not None or sum(by_torch) < 2:
        return hosts, ""
    words = gather(_word(options, hosts, rank, is_aware()) if by_torch[rank] else (False, ""))
    found = tuple(replace(host, device_messages=own) for host, (own, _) in zip(hosts, words, strict=True))
    return found, next((fault for _, fault in words if fault), "")


def _word(options: RunOptions, hosts: Sequence[Host], rank: int, is_aware: bool | None) -> Word:
    if options.gpu_aware == AUTO and not is_aware:
        return False, ""
    try:
        gpu = gpu_of(options, hosts, rank)
    except UserError:  # who loads the layers will say it
        return False, ""
    if gpu and is_aware is False:
        return False, (
            f"--gpu-aware {options.gpu_aware}: rank {rank} (host {hosts[rank].name}) is on a GPU, and MPI says there "
            "that it does not send from a GPU's memory; leave the option out, or use a GPU-aware MPI (`pipeinfer info` "
            "under mpirun tells)"
        )
    return bool(gpu) or options.gpu_aware != AUTO, ""
