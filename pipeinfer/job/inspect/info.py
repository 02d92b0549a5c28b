"""`pipeinfer info`: versions, devices, memory and MPI of this host, or under mpirun of every rank's host."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.child import package_version
from pipeinfer.cluster.hosts.host import UNLIMITED, this_host
from pipeinfer.cluster.hosts.launch import is_launched
from pipeinfer.cluster.hosts.roster import describe_mpi, version_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.sections import PlacementOptions, Servers
from pipeinfer.job.placement.devices import check_servers
from pipeinfer.models.llama.ggml import describe_build
from pipeinfer.models.llama.rpc import connect
from pipeinfer.models.torch.params import load_torch, torch_version
from pipeinfer.text import json_text, labelled, printed, size_text

if TYPE_CHECKING:
    from pipeinfer.job.launch import Crew


PACKAGES = ("numpy", "gguf", "mpi4py", "mpich", "openmpi", "llama-cpp-python", "torch")
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_", "GOMP_", "KMP_", "MKL_", "OMP_", "PYTORCH_")
JOB_VARIABLES = ("LLAMA_ARG_", "MPICH_", "OMPI_MCA_", "PIPEINFER_", "SLURM_JOB_ID", "SLURM_NTASKS", "UCX_")
VARIABLES = DEVICE_VARIABLES + JOB_VARIABLES  # prefixes of the environment variables that are reported
WIDTH = 12  # of a label
ON_CPU, ON_GPU = "exact", "exact where a job finds that rows have the same bits beside others"
BY_TORCH = "exact by the way it computes, proved on no GPU yet"
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InfoQuestion:
    json: bool = False
    servers: Servers = field(default_factory=Servers)


def info(question: InfoQuestion) -> int:
    """Returns the exit code. MPI is started only if a launcher has started ranks."""
    if not is_launched():
        connect(question.servers.servers_of(0, 1))
        print_report(question, [info_facts()])
        return 0
    from pipeinfer.job.launch import start_job  # initialises MPI

    placement = PlacementOptions(rank_timeout_s=question.servers.rank_timeout_s)
    return start_job(lambda crew: _info_of_ranks(crew, question), question, placement)


def _info_of_ranks(crew: "Crew", question: InfoQuestion) -> int:
    from pipeinfer.cluster.transport import is_gpu_aware  # initialises MPI

    link = crew.link
    hosts = link.all_gather(socket.gethostname())

    def use_servers() -> None:
        servers = [question.servers.servers_of(rank, link.size) for rank in range(link.size)]
        check_servers(servers, hosts)
        connect(servers[link.rank])

    link.agree_all(use_servers)
    facts = info_facts()
    facts["mpi"]["gpu_aware"] = is_gpu_aware()
    facts_of_ranks = link.all_gather(facts)
    if link.rank == 0:
        print_report(question, by_host(facts_of_ranks))
    return 0


def by_host(facts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The facts of the first rank of each host, with all its ranks. `facts`: those of every rank."""
    names = [host["host"] for host in facts]
    return [
        facts[names.index(name)] | {"ranks": [rank for rank, other in enumerate(names) if other == name]}
        for name in dict.fromkeys(names)
    ]


def print_report(question: InfoQuestion, hosts: Sequence[dict[str, Any]]) -> None:
    print(json_text({"hosts": hosts}) if question.json else printed(info_lines(hosts)), flush=True)


# -- facts


def info_facts() -> dict[str, Any]:
    """Plain data about this host; None for what is unknown."""
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    host = this_host(socket.gethostname())
    return {
        "host": host.name,
        "ranks": [],
        "pipeinfer": version_text(),
        "python": f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        "system": platform.platform(),
        "packages": {name: text for name in PACKAGES if (text := package_version(name))},
        "processor": host.processor or platform.processor() or platform.machine(),
        "n_cores": host.n_cores,
        "n_cores_of_host": os.cpu_count(),
        "memory_bytes": host.memory.host if host.memory.host < UNLIMITED else None,
        "mpi": describe_mpi() | {"gpu_aware": None, "mpirun": _launcher("mpirun"), "srun": _launcher("srun")},
        "llama": _llama(),
        "torch": _torch(),
        "environment": environment,
    }


def _launcher(name: str) -> str | None:
    """Its path: beside this interpreter, where the packages of MPI install it, or in PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def _llama() -> dict[str, Any]:
    facts: dict[str, Any] = {"build": describe_build(), "error": None, "gpu_offload": None, "devices": []}
    try:
        from pipeinfer.models.llama.eval_callback import compiled
        from pipeinfer.models.llama.ggml import amx_works, has_gpu, llama_devices, load_library
        from pipeinfer.models.llama.repacking import repacked_rows

        library = load_library()
        features = str(library.llama_print_system_info().decode("utf-8", "replace")).strip(" |")
        devices = [asdict(each) | {"exact": ON_CPU if each.kind == "CPU" else ON_GPU} for each in llama_devices()]
        facts |= {"gpu_offload": has_gpu(), "devices": devices, "features": features, "amx_works": amx_works()}
        return facts | {"callback_compiled": compiled() is not None, "repacked_rows": repacked_rows()}
    except (UserError, OSError, AttributeError) as error:
        return facts | {"error": str(error)}


def _torch() -> dict[str, Any] | None:
    """None if it is not installed."""
    if not torch_version():
        return None
    facts: dict[str, Any] = {"version": torch_version(), "error": None, "devices": []}
    try:
        torch = load_torch()
        devices = [{"name": "cpu", "description": torch.backends.cpu.get_cpu_capability(), "exact": ON_CPU}]
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            device = {"name": f"cuda:{index}", "description": name, "exact": BY_TORCH}
            devices.append(device | {"free_bytes": free, "total_bytes": total})
        return facts | {"devices": devices, "cuda": torch.version.cuda, "hip": torch.version.hip}
    except (UserError, OSError, RuntimeError) as error:  # a build that does not fit the host's driver
        return facts | {"error": str(error)}


# -- text


def info_lines(hosts: Sequence[Facts]) -> Iterator[str]:
    """Labelled lines of the facts of each host."""
    for index, facts in enumerate(hosts):
        if index:
            yield ""
        yield from labelled(_rows(facts), WIDTH)


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    ranks = f", ranks {', '.join(map(str, facts['ranks']))}" if facts["ranks"] else ""
    yield "pipeinfer", facts["pipeinfer"]
    yield "host", f"{facts['host']}{ranks}"
    yield "system", facts["system"]
    yield "python", facts["python"]
    yield "packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    yield "processor", f"{facts['processor']}, {facts['n_cores']} of {facts['n_cores_of_host']} cores"
    memory = facts["memory_bytes"]
    yield "memory", f"{size_text(memory)} free" if memory is not None else "unknown"
    yield from _mpi_rows(facts["mpi"])
    yield from _llama_rows(facts["llama"])
    yield from _torch_rows(facts["torch"])
    for name, value in facts["environment"].items():
        yield "set", f"{name}={value}"


def _mpi_rows(mpi: Facts) -> Iterator[tuple[str, str]]:
    if mpi["error"]:
        yield "MPI", f"cannot be loaded: {mpi['error']}"
    else:
        yield "MPI", f"{mpi['library']}, MPI {mpi['standard']}, mpi4py {mpi['mpi4py']}"
    aware = {True: "takes GPU memory", False: "takes host memory only", None: "not known without mpirun"}
    yield "GPU memory", f"{aware[mpi['gpu_aware']]}; see --gpu-aware"
    launchers = ", ".join(filter(None, (mpi["mpirun"], mpi["srun"])))
    yield "launchers", launchers or "neither mpirun nor srun is there"


def _llama_rows(llama: Facts) -> Iterator[tuple[str, str]]:
    yield "llama", llama["build"] + (f": {llama['error']}" if llama["error"] else "")
    for device in llama["devices"]:
        yield "", _device(device)
    if llama["devices"] and not llama["gpu_offload"]:
        yield "", "no GPU here: -ngl needs one and a build for it, or --rpc"
    if llama.get("amx_works") is False:
        yield "", "its AMX kernels crash and are not used"
    if rows := llama.get("repacked_rows"):
        yield "", "repacked, rows at once with exact numerics: " + ", ".join(f"{name} {n}" for name, n in rows.items())
    if llama.get("callback_compiled") is False:
        yield "", "its evaluation callback runs in Python, which is slower; install pipeinfer again with a C compiler"
    if llama.get("features"):
        yield "", llama["features"]


def _torch_rows(torch: Facts | None) -> Iterator[tuple[str, str]]:
    if torch is None:
        yield "torch", "not installed: pip install 'pipeinfer[torch]' for --backend torch"
        return
    made_for = "".join(f", {name} {torch[key]}" for key, name in (("cuda", "CUDA"), ("hip", "ROCm")) if torch.get(key))
    yield "torch", torch["version"] + made_for + (f": {torch['error']}" if torch["error"] else "")
    for device in torch["devices"]:
        yield "", _device(device)


def _device(device: Facts) -> str:
    total = device.get("total_bytes")
    room = f", {size_text(device['free_bytes'])} of {size_text(total)} free" if total else ""
    return f"{device['name']}: {device['description']}{room}; {device['exact']}"
