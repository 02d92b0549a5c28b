"""What hosts can do, for people: lines of a name and what there is. Knows plain data."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeinfer.sizes import size_text

WIDTH = 12
Facts = Mapping[str, Any]


def info_lines(hosts: Sequence[Facts]) -> Iterator[str]:
    """Of each host what `host_facts` found."""
    for index, facts in enumerate(hosts):
        if index:
            yield ""
        for name, value in _pairs(facts):
            yield f"{name:<{WIDTH}}{value}"


def _pairs(facts: Facts) -> Iterator[tuple[str, str]]:
    ranks = f", ranks {', '.join(map(str, facts['ranks']))}" if facts["ranks"] else ""
    yield "pipeinfer", facts["pipeinfer"]
    yield "host", f"{facts['host']}{ranks}"
    yield "system", facts["system"]
    yield "python", facts["python"]
    yield "packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    yield "processor", f"{facts['processor']}, {facts['n_cores']} of {facts['n_cores_of_host']} cores"
    memory = facts["memory_bytes"]
    yield "memory", f"{size_text(memory)} free" if memory is not None else "unknown"
    yield from _mpi(facts["mpi"])
    yield from _llama(facts["llama"])
    yield from _torch(facts["torch"])
    for name, value in facts["environment"].items():
        yield "set", f"{name}={value}"


def _mpi(mpi: Facts) -> Iterator[tuple[str, str]]:
    if mpi["error"]:
        yield "MPI", f"cannot be loaded: {mpi['error']}"
    else:
        yield "MPI", f"{mpi['library']}, MPI {mpi['standard']}, mpi4py {mpi['mpi4py']}"
    aware = {True: "takes GPU memory", False: "takes host memory only", None: "not known without mpirun"}
    yield "GPU memory", f"{aware[mpi['gpu_aware']]}; see --gpu-aware"
    yield (
        "launchers",
        ", ".join(path for path in (mpi["mpirun"], mpi["srun"]) if path) or "neither mpirun nor srun is there",
    )


def _llama(llama: Facts) -> Iterator[tuple[str, str]]:
    yield "llama", llama["build"] + (f": {llama['error']}" if llama["error"] else "")
    for device in llama["devices"]:
        yield "", _device(device)
    if llama["devices"] and not llama["gpu_offload"]:
        yield "", "this build has no GPU support: -ngl needs one with it"
    if llama.get("amx_works") is False:
        yield "", "its AMX kernels crash and are not used"
    if rows := llama.get("repacked_rows"):
        yield "", "repacked, rows at once with exact numerics: " + ", ".join(f"{name} {n}" for name, n in rows.items())
    if llama.get("callback_compiled") is False:
        yield "", "its evaluation callback runs in Python, which is slower; install pipeinfer again with a C compiler"
    if llama.get("features"):
        yield "", llama["features"]


def _torch(torch: Facts | None) -> Iterator[tuple[str, str]]:
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
