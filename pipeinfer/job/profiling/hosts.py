"""The GPUs of this rank's host, and its speed, measured or kept from the last time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, Speed, measure_speed, ranks_there, share_cores
from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.job.loading.stages import gpu_of
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO, OFF
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import DevicePlan, RankDevices
from pipeinfer.job.profiling.layer_times import recall
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.llama.device_proof import prove
from pipeinfer.models.llama.ggml import GPUS, Device, cache_key, has_gpu, llama_devices
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.virtual.nodes import Node, estimated_machine

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link

BUILD = "a build of llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"
MEASURED = "measured"


# -- GPUs


def gpus() -> list[Device]:
    """The GPUs of this process's libllama; none with a build for CPUs."""
    return [device for device in llama_devices() if device.kind in GPUS] if has_gpu() else []


def gpu_names() -> list[str]:
    """What each calls itself, as in `NVIDIA H200`."""
    return [device.description for device in gpus()]


def free_gpus(devices: Iterable[DevicePlan], present: Sequence[Device]) -> tuple[tuple[str, int], ...]:
    """The GPUs of this rank's layers, and the bytes that are free on each."""
    used = next((device for device in devices if device.uses_gpus), None)
    if used is None:
        return ()
    return tuple(
        (device.name, device.free_bytes)
        for device in present
        if device.free_bytes and (used.devices is None or device.name in used.devices)
    )


def check_present(names: Sequence[str], present: Sequence[Device]) -> None:
    """Raises UserError, with those that are present, for a device that is not."""
    missing = next((name for name in names if name not in [device.name for device in present]), None)
    if missing is None:
        return
    shown = ", ".join(f"{device.name} ({device.description})" for device in present)
    there = f"libllama has {shown} there" if present else f"libllama sees no GPU there: it takes one, and {BUILD}"
    raise UserError(f"--device {missing} is not there; {there}; `pipeinfer info` lists devices, none leaves layers on "
                    "the CPU")  # fmt: skip


def exact_rows(
    options: RunOptions, hosts: Sequence[Host], devices: Sequence[RankDevices], present: Sequence[Device], rank: int
) -> tuple[tuple[int, str], ...]:
    """`Host.exact_rows` of this rank; no rows where its host lacks the target, or that is not known to be exact on
    GPUs."""
    n_ranks, numerics, device = len(hosts), options.numerics, devices[rank].target
    ranks = range(n_ranks) if options.may_choose_draft_rank else options.target_ranks(n_ranks)
    by_any = [devices[each].target for each in ranks]
    if numerics.numerics != "exact" or not any(each.uses_gpus for each in by_any) or rank not in ranks:
        return ()
    if any(each.is_torch for each in by_any) or not options.models.target.exists():
        return ((0, ""),)
    info, threads = read_model_info(options.models.target), options.placement.threads
    n_threads = threads[rank % len(threads)] if threads else min(2, hosts[rank].n_cores)
    params = LlamaParams(0, n_threads=n_threads, repack=False, cache=numerics.cache, devices=())
    names = (device.devices or [each.name for each in present]) if device.uses_gpus else ()
    places = [replace(params, n_gpu_layers=ALL_LAYERS, devices=(name,)) for name in names]
    return tuple(_proof(info, place, present) for place in [params] * (device.n_gpu_layers != ALL_LAYERS) + places)


def _proof(info: ModelInfo, params: LlamaParams, present: Sequence[Device]) -> tuple[int, str]:
    """Cached for this build and host, but for an RPC server's device, which may be another one under the same name."""
    if not params.devices or params.devices[0].startswith("RPC"):
        return prove(info, params)
    description = next(each.description for each in present if each.name == params.devices[0])
    name = cache_key(f"exact rows of {info.fingerprint} with {' '.join(params.cache)} on {description}")
    try:
        n_rows, digest = user_cache().get(name)
        return int(n_rows), str(digest)
    except (TypeError, ValueError):
        result = prove(info, params)
    if result.digest:  # else it may be for lack of memory
        user_cache().put(name, result)
    return result


def sends_from_device(
    gpu_aware: str, devices: Sequence[RankDevices], host: Host, rank: int, query_mpi: Callable[[], bool | None]
) -> bool:
    """Whether MPI moves this rank's activations. `gpu_aware`: the option's value; `query_mpi`: whether MPI reports that
    it can; None: it does not report it.

    Raises UserError where the option is on and MPI reports that it cannot.
    """
    by_torch = [target.is_torch for target, _ in devices]
    if gpu_aware == OFF or sum(by_torch) < 2 or not by_torch[rank]:
        return False
    is_aware = query_mpi()
    if gpu_aware == AUTO and not is_aware:
        return False
    try:
        gpu = gpu_of(devices[rank].target)
    except UserError:  # loading the layers repeats it
        return False
    if gpu and is_aware is False:
        raise UserError(
            f"--gpu-aware {gpu_aware}: rank {rank} (host {host.name}) is on a GPU, and MPI says there "
            "that it does not send from a GPU's memory; leave the option out, or use a GPU-aware MPI (`pipeinfer info` "
            "under mpirun tells)"
        )
    return bool(gpu) or gpu_aware != AUTO


# -- speed


def rank_speed(hosts: Sequence[Host], rank: int) -> Speed:
    """What this rank reaches while the others of its host measure too."""
    return measure_speed(share_cores(hosts, frozenset(range(len(hosts))))[rank])


def host_speeds(link: "Link", hosts: Sequence[Host]) -> list[Speed]:
    """The speed of every rank, measured now or kept from the last time. Collective."""
    host, n_there = hosts[link.rank], len(ranks_there(hosts, link.rank))
    key = f"speed: {host.name}, {host.processor}, {host.n_cores} cores, {n_there} ranks there, pipeinfer {__version__}"

    def measure() -> list[tuple[Speed | None, str]]:
        """Ranks of a host keep its mean: on busy cores theirs differ a hundredfold."""
        speeds = link.all_gather(rank_speed(hosts, link.rank))
        of_hosts = [[speeds[rank] for rank in ranks_there(hosts, each)] for each in range(link.size)]
        return [
            (Speed(fmean(speed.bytes_per_s for speed in there), fmean(speed.flop_per_s for speed in there)), "")
            for there in of_hosts
        ]

    speeds, _ = recall(link, key, Speed, measure, range(link.size))
    return [speed for speed, _ in speeds if speed]


def with_speeds(speeds: Sequence[Speed], hosts: Sequence[Host], gpus: Sequence[Sequence[str]] = ()) -> list[Node]:
    """A node a rank; a host is as fast as its ranks were together. `gpus`: that each rank sees."""
    nodes = []
    for rank, host in enumerate(hosts):
        there = [speeds[other] for other in ranks_there(hosts, rank)]
        read, compute = sum(speed.bytes_per_s for speed in there), sum(speed.flop_per_s for speed in there)
        machine = estimated_machine(host.name, host.n_cores, read, compute, host.memory.host)
        nodes.append(Node(host, machine, MEASURED, ", ".join(gpus[rank]) if gpus else ""))
    return nodes
