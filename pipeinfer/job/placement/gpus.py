"""Which of its host's GPUs a rank's libllama puts layers on: as asked, else its share. Loads nothing onto them."""

from collections.abc import Sequence

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.shares import share_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import NO_DEVICE
from pipeinfer.job.options.options import (
    RunOptions,
    backend_of,
    check_by_rank,
    device_of,
)
from pipeinfer.job.placement.draft_place import options_of_draft
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.llama.devices import GPUS, Device, llama_devices
from pipeinfer.models.llama.ggml import load_library

BUILD = "a build of llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"


def gpus() -> list[Device]:
    """Those that this process's libllama can use; none with a build for CPUs."""
    if not load_library().llama_supports_gpu_offload():
        return []
    return [device for device in llama_devices() if device.kind in GPUS]


def gpu_names() -> list[str]:
    """What each calls itself, as in `NVIDIA H200`."""
    return [device.description for device in gpus()]


def rank_devices(options: RunOptions, hosts: Sequence[Host], rank: int) -> tuple[str, ...] | None:
    """The devices of this rank's layers, asked on it; None: all. Raises UserError for one that is not there."""
    asked = device_of(options, rank, len(hosts))
    if asked == NO_DEVICE:
        return ()
    if asked:
        check_present(asked, gpus())
        return asked
    sharers = [other for other in range(len(hosts)) if _may_share(options, hosts, rank, other)]
    if rank not in sharers or len(sharers) == 1:
        return None
    names = [device.name for device in gpus()]
    return tuple(share_of(names, sharers.index(rank), len(sharers))) or None


def check_own_devices(options: RunOptions, hosts: Sequence[Host], rank: int) -> None:
    """On that rank. Raises UserError when options of devices do not fit the ranks, or its own device is not there."""
    check_by_rank(options, len(hosts))
    if not any(options.device):
        return
    try:
        rank_devices(options, hosts, rank)
    except UserError as error:
        raise UserError(f"rank {rank} (host {hosts[rank].name}): {error}") from None


def own_gpus(options: RunOptions, hosts: Sequence[Host], rank: int) -> tuple[tuple[str, int], ...]:
    """The devices of this rank's layers, and the bytes that are free on each, asked on it."""
    used = [each for each in (options, options_of_draft(options, len(hosts), rank)) if _uses_gpus(each, rank)]
    if not used:
        return ()
    names = rank_devices(used[0], hosts, rank)
    present = [device for device in gpus() if names is None or device.name in names]
    return tuple((device.name, device.free_bytes) for device in present if device.free_bytes)


def _uses_gpus(options: RunOptions, rank: int) -> bool:
    return gpu_layers(options, rank) != 0 and not backend_of(options, rank).is_torch


def check_present(asked: Sequence[str], present: Sequence[Device]) -> None:
    """Raises UserError, with those that are, for a device that is not there."""
    known = [device.name for device in present]
    missing = next((name for name in asked if name not in known), None)
    if missing is None:
        return
    shown = ", ".join(f"{device.name} ({device.description})" for device in present)
    there = f"libllama has {shown} there" if present else f"libllama sees no GPU there: it takes one, and {BUILD}"
    raise UserError(f"--device {missing} is not there; {there}; `pipeinfer info` lists devices, none leaves layers on "
                    "the CPU")  # fmt: skip


def _may_share(options: RunOptions, hosts: Sequence[Host], rank: int, other: int) -> bool:
    """Whether another rank puts layers on GPUs that this one sees too, and is not told on which."""
    is_beside = hosts[other].name == hosts[rank].name and hosts[other].gpus_given == hosts[rank].gpus_given
    return is_beside and not device_of(options, other, len(hosts)) and _uses_gpus(options, other)
