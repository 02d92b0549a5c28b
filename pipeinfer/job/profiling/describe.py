"""What a rank tells of its host before there is a plan: GPUs, models that it lacks, weights that it repacks, numerics
that are proven exact there. Knows no other rank's answer. Imports little: `doctor` runs it on each host."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.watch.protocol import Limits, write_line
from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO, OFF
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import DevicePlan, RankDevices, check_servers, plan_devices, rank_options
from pipeinfer.job.placement.numerics import may_repack
from pipeinfer.job.process.supervised import own_attempt
from pipeinfer.models.gguf.model_info import ModelInfo, part_paths, read_model_info
from pipeinfer.models.llama.ggml import GPUS, Device, cache_key, has_gpu, llama_devices
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.repacking import grouped_types, repacked_types
from pipeinfer.models.llama.rpc import connect
from pipeinfer.models.llama.tensor_places import HOST, TensorPlaces

RPC_BACK_S = 20.0  # how long a job that starts again waits for an RPC server that may be starting again, too
MOST_DEVICES = 15  # beside the CPU: libggml's scheduler takes 16
BUILD = "a build of llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on"


def describe_host(
    options: RunOptions, hosts: Sequence[Host], rank: int, query_mpi: Callable[[], bool | None] = lambda: None
) -> Host:
    """This rank's host with the models that it lacks, its GPUs and their free memory, whether MPI reads that, and the
    types of weights that may be repacked there with exact numerics. Raises UserError for wrong GPUs and servers."""
    placement, by_rank = options.placement, rank_options(options.placement, len(hosts))
    check_servers([each.servers for each in by_rank], [host.name for host in hosts])
    with named_rank(rank, hosts[rank].name):
        is_again = (attempt := own_attempt()) is not None and attempt.number > 1
        silent_s = Limits.of(placement.rank_timeout_s).silent_s
        connect(by_rank[rank].servers, silent_s, RPC_BACK_S if is_again else 0.0, _say_waiting)
    offloads = has_gpu()
    uses_gpus = offloads and (any(placement.n_gpu_layers) or placement.n_gpu_layers_draft != 0)
    present = gpus() if uses_gpus or any(placement.device) else []
    # ranks whose builds differ find that out themselves
    alike = [
        replace(host, offloads=offloads, gpus_given=" ".join([host.gpus_given, *each.servers]).strip())
        for host, each in zip(hosts, by_rank, strict=True)
    ]
    alike[rank] = host = replace(alike[rank], gpu_names=tuple(device.name for device in present))
    devices = plan_devices(placement, alike)
    with named_rank(rank, host.name):
        if names := devices[rank].target.devices:
            check_present(names, present)
        for device in devices[rank]:
            check_number(len(present if device.devices is None else device.devices) * device.uses_gpus)
    repacks = may_repack(options.numerics) and not devices[rank].target.is_torch
    gpu_aware = OFF if options.experiments.pace else options.numerics.gpu_aware
    ranks = range(len(hosts)) if options.may_choose_draft_rank else options.target_ranks(len(hosts))
    proves = options.numerics.numerics == "exact" and rank in ranks
    threads = placement.threads
    n_threads = threads[rank % len(threads)] if threads else min(2, host.n_cores)
    params = LlamaParams(0, n_threads=n_threads, repack=False, cache=options.numerics.cache, devices=())
    by_any = [devices[each].target for each in ranks]
    target = options.models.target
    return replace(
        host,
        gpus=free_gpus(devices[rank], present),
        device_messages=sends_from_device(gpu_aware, devices, host, rank, query_mpi),
        lacks=frozenset(str(path) for path in options.models.files if not all(map(os.path.exists, part_paths(path)))),
        repacked=repacked_types() if repacks else (),
        grouped=grouped_types() if repacks else (),
        exact_rows=_exact_rows(target, params, devices[rank].target, by_any, present) if proves else (),
    )


def _say_waiting(server: str) -> None:
    write_line(f"waiting for the RPC server {server}, for {RPC_BACK_S:g} s at most")


@contextmanager
def named_rank(rank: int, host: str) -> Iterator[None]:
    """A UserError names both."""
    try:
        yield
    except UserError as error:
        raise UserError(f"rank {rank} (host {host}): {error}") from None


def gpus() -> list[Device]:
    """The GPUs of this process's libllama; none with a build for CPUs."""
    return [device for device in llama_devices() if device.kind in GPUS] if has_gpu() else []


def gpu_names() -> list[str]:
    """Their descriptions, as in `NVIDIA H200`."""
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
    others = "`pipeinfer info` lists devices, none leaves layers on the CPU"
    raise UserError(f"--device {missing} is not there; {there}; {others}")


def check_number(n_devices: int) -> None:
    """Raises UserError for more devices than libllama takes."""
    if n_devices > MOST_DEVICES:
        way_out = "name fewer, as in --device RPC0+RPC1, and others for other ranks"
        raise UserError(f"the rank has {n_devices} devices, and llama.cpp takes {MOST_DEVICES} at most; {way_out}")


def _exact_rows(
    model: Path, params: LlamaParams, device: DevicePlan, by_any: Sequence[DevicePlan], present: Sequence[Device]
) -> tuple[tuple[int, str], ...]:
    """`Host.exact_rows` of a rank that computes the target's layers on `device`: empty where no rank uses a GPU, no
    rows where the host lacks the target or torch computes layers. `by_any`: the devices of the target's ranks."""
    if not any(each.uses_gpus for each in by_any):
        return ()
    if any(each.is_torch for each in by_any) or not os.path.exists(model):
        return ((0, ""),)
    info = read_model_info(model)
    names = (device.devices or [each.name for each in present]) if device.uses_gpus else ()
    between = any(place.device != HOST for place in device.places.by_name)  # devices: alone all must have the same bits
    kinds = [TensorPlaces()] if between else _kinds_of_layers(device.places)
    has_host_rows = between or device.n_gpu_layers != ALL_LAYERS
    on_gpus = [
        replace(params, n_gpu_layers=ALL_LAYERS, devices=(name,), places=kind) for name in names for kind in kinds
    ]
    return tuple(_proof(info, place, present) for place in [params] * has_host_rows + on_gpus)


def _kinds_of_layers(places: TensorPlaces) -> list[TensorPlaces]:
    """A rank's layers with and without experts, as the split decides; both must have the same bits."""
    return [places._replace(n_cpu_moe=n) for n in (0, ALL_LAYERS)] if places.n_cpu_moe > 0 else [places]


def _proof(info: ModelInfo, params: LlamaParams, present: Sequence[Device]) -> tuple[int, str]:
    """Cached for this build and host, but for an RPC server's device, which may be another one under the same name."""
    from pipeinfer.models.llama.device_proof import prove  # imports what evaluates

    if not params.devices or params.devices[0].startswith("RPC"):
        return prove(info, params)
    description = next(each.description for each in present if each.name == params.devices[0])
    places = f", {params.places.text}" if params.places.text else ""
    name = cache_key(f"exact rows of {info.fingerprint} with {' '.join(params.cache)} on {description}{places}")
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
    it can; None: it does not report it. Raises UserError where the option is on and MPI reports that it cannot."""
    by_torch = [target.is_torch for target, _ in devices]
    if gpu_aware == OFF or sum(by_torch) < 2 or not by_torch[rank]:
        return False
    is_aware = query_mpi()
    if gpu_aware == AUTO and not is_aware:
        return False
    from pipeinfer.job.loading.stages import gpu_of  # imports all that loads layers

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
