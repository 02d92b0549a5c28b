"""`pipeinfer info`: what this host, or under mpirun every rank's host, can do."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.cluster.hosts.cores import this_host
from pipeinfer.cluster.hosts.free_memory import UNLIMITED
from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.hosts.mpi_library import describe_mpi
from pipeinfer.cluster.hosts.roster import version_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import DEFAULT
from pipeinfer.models.llama.build import describe_build
from pipeinfer.models.torch.library import load_torch, torch_version
from pipeinfer.observe.texts.info_text import info_lines
from pipeinfer.observe.texts.json_text import json_text

if TYPE_CHECKING:
    from pipeinfer.job.launch.start import Crew


PACKAGES = ("numpy", "gguf", "mpi4py", "mpich", "openmpi", "llama-cpp-python", "torch")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GGML_", "GOMP_", "HIP_VISIBLE_DEVICES", "KMP_", "LLAMA_ARG_", "MKL_", "MPICH_",
    "OMPI_MCA_", "OMP_", "PIPEINFER_", "PYTORCH_", "SLURM_JOB_ID", "SLURM_NTASKS", "UCX_",
)  # fmt: skip
"""What the names of the environment variables that are told begin with: such as steer threads, devices and MPI."""

ON_CPU, ON_GPU = "exact", "not exact: its kernels depend on the batch"
BY_TORCH = "exact by the way it computes, proved on no GPU yet"


@dataclass(frozen=True, slots=True)
class InfoQuestion:
    json: bool = False
    rank_timeout_s: float | None = None


def info(question: InfoQuestion) -> int:
    """Returns the exit code. MPI is started only where a launcher has started ranks."""
    if not is_launched():
        tell(question, [host_facts()])
        return 0
    from pipeinfer.job.launch.start import start_job  # initialises MPI

    options = replace(DEFAULT, rank_timeout_s=question.rank_timeout_s)
    return start_job(lambda crew: _info_of_ranks(crew, question), question, options)


def _info_of_ranks(crew: "Crew", question: InfoQuestion) -> int:
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI

    own = host_facts()
    own["mpi"]["gpu_aware"] = is_gpu_aware()
    found = crew.link.all_gather(own)
    if crew.link.rank == 0:
        tell(question, by_host(found))
    return 0


def by_host(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each host what its first rank found, with the ranks that are there. `facts`: of every rank."""
    names = [each["host"] for each in facts]
    return [
        facts[names.index(name)] | {"ranks": [rank for rank, other in enumerate(names) if other == name]}
        for name in dict.fromkeys(names)
    ]


def tell(question: InfoQuestion, found: Sequence[dict[str, Any]]) -> None:
    print(json_text({"hosts": found}) if question.json else "\n".join(info_lines(found)), flush=True)


def host_facts() -> dict[str, Any]:
    """Plain data; null where nobody knows."""
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    host = this_host(socket.gethostname())
    return {
        "host": host.name,
        "ranks": [],
        "pipeinfer": version_text(),
        "python": f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        "system": f"{platform.platform()}",
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "processor": _processor(),
        "n_cores": host.n_cores,
        "n_cores_of_host": os.cpu_count(),
        "memory_bytes": host.memory.host if host.memory.host < UNLIMITED else None,
        "mpi": describe_mpi() | {"gpu_aware": None, "mpirun": _launcher("mpirun"), "srun": _launcher("srun")},
        "llama": _llama(),
        "torch": _torch(),
        "environment": environment,
    }


def _launcher(name: str) -> str | None:
    """Beside this interpreter, as packages of an MPI have it, or in PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _llama() -> dict[str, Any]:
    found: dict[str, Any] = {"build": describe_build(), "error": None, "gpu_offload": None, "devices": []}
    try:
        from pipeinfer.models.llama.devices import llama_devices
        from pipeinfer.models.llama.eval_callback import compiled
        from pipeinfer.models.llama.ggml import amx_works, load_library
        from pipeinfer.models.llama.repacking import repacked_rows

        library = load_library()
        features = str(library.llama_print_system_info().decode("utf-8", "replace")).strip(" |")
        devices = [asdict(each) | {"exact": ON_CPU if each.kind == "CPU" else ON_GPU} for each in llama_devices()]
        offload = bool(library.llama_supports_gpu_offload())
        found |= {"gpu_offload": offload, "devices": devices, "features": features, "amx_works": amx_works()}
        return found | {"callback_compiled": compiled() is not None, "repacked_rows": repacked_rows()}
    except (UserError, OSError, AttributeError) as error:
        return found | {"error": str(error)}


def _torch() -> dict[str, Any] | None:
    """None where it is not installed."""
    if not torch_version():
        return None
    found: dict[str, Any] = {"version": torch_version(), "error": None, "devices": []}
    try:
        torch = load_torch()
        devices = [{"name": "cpu", "description": torch.backends.cpu.get_cpu_capability(), "exact": ON_CPU}]
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append({"name": f"cuda:{index}", "description": name, "exact": BY_TORCH, "free_bytes": free,
                            "total_bytes": total})  # fmt: skip
        return found | {"devices": devices, "cuda": torch.version.cuda, "hip": torch.version.hip}
    except (UserError, OSError, RuntimeError) as error:  # a build that does not fit the host's driver
        return found | {"error": str(error)}
