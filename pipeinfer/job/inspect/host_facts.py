"""What the program says of itself, its build, its host and the models there: run on each host by `doctor`, by the
functions with which `run` checks its ranks. Each fact is a JSON line, so that a crash costs only those behind it."""

import json
import os
import platform
import socket
import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pickle import loads
from typing import TYPE_CHECKING, Any

from pipeinfer.child import package_version
from pipeinfer.cluster.hosts.host import FreeMemory, Host, this_host
from pipeinfer.cluster.hosts.roster import describe_mpi, version_text
from pipeinfer.cluster.watch.rendezvous import own_location
from pipeinfer.errors import UserError
from pipeinfer.models.llama.ggml import describe_build

if TYPE_CHECKING:
    from pipeinfer.job.options.options import JobModels, RunOptions

PACKAGES = ("numpy", "mpi4py")
Fact = tuple[str, Any]


def main() -> None:
    for name, value in _facts(*sys.argv[1:]):
        print(json.dumps([name, value]), flush=True)


def tell_library() -> None:
    print(json.dumps(["mpi", describe_mpi()]), flush=True)


def _facts(our_version: str, job_text: str, rank: str) -> Iterator[Fact]:
    location = own_location()
    yield "version", version_text()
    yield "place", [location.host, location.where]
    yield "python", platform.python_version()
    yield "packages", {name: package_version(name) for name in PACKAGES}
    yield "build", describe_build()
    from pipeinfer.models.llama.ggml import amx_works, load_library  # what follows may end this process

    yield "features", load_library().llama_print_system_info().decode("utf-8", "replace")
    yield "amx_works", amx_works()
    if version_text() == our_version:
        options, names = loads(b64decode(job_text))
        yield from _facts_of_job(options, names, int(rank))


def _facts_of_job(options: "RunOptions", names: Sequence[str], rank: int) -> Iterator[Fact]:
    """`names`: of each rank's host. With RPC servers a rank's devices are its own; else its host's."""
    from pipeinfer.job.profiling.describe import describe_host, gpu_names

    hosts, servers = [this_host(socket.gethostname())], dict[str, dict[str, Any]]()
    if not any(options.placement.rpc):
        rank = 0
    else:
        hosts = [replace(hosts[0], name=name) for name in names]
        servers = {server: _server(server) for server in options.placement.servers_of(rank, len(hosts))}
        yield "servers", servers
    yield "gpus", gpu_names()
    if not any(each["error"] for each in servers.values()):
        try:
            host = describe_host(options, hosts, rank)
            yield "host", asdict(host) | {"cores": sorted(host.cores), "lacks": sorted(host.lacks)}
        except UserError as error:
            yield "host_error", str(error)
    yield "models", model_facts(options.models)


def _server(server: str) -> dict[str, Any]:
    """`devices`: their names and free bytes."""
    from pipeinfer.models.llama.ggml import llama_devices
    from pipeinfer.models.llama.rpc import connect

    try:
        connect([server])
    except UserError as error:
        return {"error": str(error), "devices": []}
    devices = [each for each in llama_devices() if each.description == server]
    return {"error": "", "devices": [[each.name, each.free_bytes] for each in devices]}


def host_of(fact: Mapping[str, Any], name: str) -> Host:
    """The host that the fact `host` describes, under the name that the launcher has for it."""
    lists = {key: tuple(map(tuple, fact[key])) for key in ("gpus", "repacked", "grouped", "exact_rows")}
    sets = {key: frozenset(fact[key]) for key in ("cores", "lacks")}
    memory, gpu_names = FreeMemory(**fact["memory"]), tuple(fact["gpu_names"])
    return Host(**{**fact, **lists, **sets, "memory": memory, "gpu_names": gpu_names, "speed": None, "name": name})


def model_facts(models: "JobModels") -> dict[str, dict[str, Any]]:
    """Path -> facts of the model's file on this host."""
    return {str(path): _model(path, models.target) for path in models.files}


def _model(path: Path, target: Path) -> dict[str, Any]:
    """`n_bytes`: of all parts; None: a part is missing. `fingerprint`: of samples of every tensor."""
    from pipeinfer.models.drafts.head_files import draft_of
    from pipeinfer.models.gguf.model_info import part_paths, read_model_info

    parts = part_paths(path)
    if not all(map(os.path.exists, parts)):
        return {"n_bytes": None, "fingerprint": "", "error": ""}
    n_bytes = sum(part.stat().st_size for part in parts)
    try:
        is_draft = path != target and os.path.exists(target)
        info = draft_of(path, read_model_info(target)) if is_draft else read_model_info(path)
        return {"n_bytes": n_bytes, "fingerprint": info.fingerprint, "error": ""}
    except UserError as error:
        return {"n_bytes": n_bytes, "fingerprint": "", "error": str(error)}
