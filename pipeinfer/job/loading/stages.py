"""A slice of layers loaded into what shall compute it. The only file that knows both backends."""

from collections.abc import Callable, Sequence

from pipeinfer import __version__
from pipeinfer.cluster.hosts.cores import Host, ranks_there
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.options import RunOptions, backend_of, device_of, gpu_layers_asked
from pipeinfer.job.placement.memory import gpu_layers
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.heads.llama_head import LlamaHead
from pipeinfer.models.llama.build import describe_build
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.torch.library import load_torch, torch_version
from pipeinfer.models.torch.params import AUTO, CPU, CUDA, TorchParams


def load_layers(
    open_layers: Callable[[], SliceFile], params: LlamaParams, backend: Backend, local_rank: int
) -> LoadedModel:
    """`params`: what libllama would be loaded with; of torch, which computes the same, as far as it has such options.

    Raises UserError when the backend is not there, or it is no model for it.
    """
    if not backend.is_torch:
        layers = open_layers()
        return LlamaHead(layers, params) if layers.info.head else LlamaStage(layers, params)
    load_torch()
    from pipeinfer.models.torch.stage import TorchStage  # takes seconds, and room that others have no use for

    own = TorchParams(
        params.n_cells, params.n_seq_max, params.n_batch, params.n_outputs_max, params.n_threads, backend.device,
        backend.dtype, local_rank, params.exact,
    )  # fmt: skip
    return TorchStage(open_layers(), own)


def experiment_key(what: str, options: RunOptions, hosts: Sequence[Host], threads: Sequence[int], rank: int) -> str:
    """All that the times of `what` depend on, on a rank: the name under which they are kept. Ranks of which it is the
    same are alike. `threads`: of each rank."""
    host, backend = hosts[rank], backend_of(options, rank)
    there = " ".join(str(threads[other]) for other in ranks_there(hosts, rank))
    where = f"-ngl {gpu_layers_asked(options, rank)} {' '.join(device_of(options, rank))}".rstrip()
    by = f"{backend} {torch_version()}" if backend.is_torch else where
    return (
        f"{what}, {host.processor}, {host.name}, {host.n_cores} cores, {threads[rank]} threads, {by}, "
        f"threads there {there}, pipeinfer {__version__}, {describe_build()}"
    )


def local_rank(options: RunOptions, hosts: Sequence[Host], rank: int) -> int:
    """Which of the ranks this is, from 0 on, that torch gives the GPUs of its host in turns."""
    return sum(takes_turns(backend_of(options, other)) for other in ranks_there(hosts, rank) if other < rank)


def takes_turns(backend: Backend) -> bool:
    """Whether no device is said that it shall have."""
    return backend.is_torch and backend.device in (AUTO, CUDA)


def gpu_of(options: RunOptions, hosts: Sequence[Host], rank: int) -> str:
    """What a rank has loaded layers onto, to be asked on that rank: of torch's devices the name; empty on a CPU."""
    backend = backend_of(options, rank)
    if not backend.is_torch:
        return "a GPU" if gpu_layers(options, rank) else ""
    torch = load_torch()
    from pipeinfer.models.torch.stage import find_device

    device = find_device(backend.device, local_rank(options, hosts, rank))
    return "" if device.type == CPU else str(torch.cuda.get_device_name(device))
