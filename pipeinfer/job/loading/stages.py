"""Load a slice of layers with its backend. The only file that knows both backends."""

from collections.abc import Callable, Sequence

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, ranks_there
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.heads.llama_head import LlamaHead
from pipeinfer.models.llama.build import describe_build
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.torch.library import load_torch, torch_version
from pipeinfer.models.torch.params import CPU, TorchParams


def load_layers(open_layers: Callable[[], SliceFile], params: LlamaParams, device: DevicePlan) -> LoadedModel:
    """`params`: those of libllama; torch takes the ones that it has.

    Raises UserError when the backend is not there, or it is no model for it.
    """
    if not device.is_torch:
        layers = open_layers()
        return LlamaHead(layers, params) if layers.info.head else LlamaStage(layers, params)
    load_torch()
    from pipeinfer.models.torch.stage import TorchStage  # takes seconds, and room that others have no use for

    own = TorchParams(
        params.n_cells, params.n_seq_max, params.n_batch, params.n_outputs_max, params.n_threads,
        device.backend.device, device.backend.dtype, device.turn, params.exact,
    )  # fmt: skip
    return TorchStage(open_layers(), own)


def experiment_key(what: str, device: DevicePlan, hosts: Sequence[Host], threads: Sequence[int], rank: int) -> str:
    """The name under which the times of `what` on a rank are kept: everything that they depend on. `threads`: of each
    rank."""
    host, there = hosts[rank], " ".join(str(threads[other]) for other in ranks_there(hosts, rank))
    where = f"-ngl {device.n_gpu_layers} {device.name}".rstrip()
    by = f"{device.backend} {torch_version()}" if device.is_torch else where
    return (
        f"{what}, {host.processor}, {host.name}, {host.n_cores} cores, {threads[rank]} threads, {by}, "
        f"threads there {there}, pipeinfer {__version__}, {describe_build()}"
    )


def gpu_of(device: DevicePlan) -> str:
    """The GPU that this rank's layers are on, by its name if torch computes them; empty: a CPU."""
    if not device.is_torch:
        return "a GPU" if device.uses_gpus else ""
    torch = load_torch()
    from pipeinfer.models.torch.stage import find_device

    found = find_device(device.backend.device, device.turn)
    return "" if found.type == CPU else str(torch.cuda.get_device_name(found))
