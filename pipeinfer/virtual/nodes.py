"""Ranks that need not exist: their hosts and speeds, from a profile or a hosts file. Knows no model and no MPI.

A hosts file is one of MPICH (`node1:2`) or Open MPI (`node1 slots=2 max_slots=4`), with more about each host:

    node3 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325
    node4 slots=1 cores=64 memory=500GiB gpu=H100 gpu_memory=78G
    node5 cores=16 memory=120G gb_per_s=40 gflop_per_s=400 gpu_memory=15G gpu_gb_per_s=270 gpu_gflop_per_s=20000

Values are those of all ranks of the host together; docs/how-to/measure.md explains them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.cluster.hosts.host import UNLIMITED, FreeMemory, Host
from pipeinfer.errors import UserError
from pipeinfer.text import size_text
from pipeinfer.virtual.profile import Machine, ProfileFile

UNKNOWN_CORES = 0
LAYER_S_A_CORE, LAYER_S, RUN_S = 2e-6, 60e-6, 200e-6

SPEEDS, GPU = ("gb_per_s", "gflop_per_s"), "gpu_"
KEYS = ("slots", "cores", "memory", *SPEEDS, "gpu", "gpu_memory", *(GPU + key for key in SPEEDS), "max_slots")
MAX_SLOTS, MAX_CORES, MAX_BYTES = 4096, 65536, 1 << 62
LEAST_BYTES = 10**6  # a smaller number lacks its unit
LEAST_SPEED, MOST_SPEED = 1e-6, 1e9
NUMBER = re.compile(r"([0-9]{1,18}\.?[0-9]{0,18})([kKMGT]i?)?B?")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True, slots=True)
class Node:
    """What one rank runs on. `machine`: the speed of the whole host, which its ranks share; None: unknown. `source`: of
    that speed. `gpu`: its name; empty: none. `gpu_machine`: the speed of the host's GPUs; None: unknown, and `machine`
    is that of layers wherever they are."""

    host: Host
    machine: Machine | None = None
    source: str = ""
    gpu: str = ""
    gpu_machine: Machine | None = None

    def twin(self, name: str) -> "Node":
        """Another host like this one."""
        return replace(self, host=replace(self.host, name=name))

    def with_layers_on_gpus(self, part: float) -> Machine | None:
        """The host's speed where this part of what a layer reads, and of its arithmetic, is on GPUs."""
        host, gpu = self.machine, self.gpu_machine
        if not (host and gpu):
            return host
        off = 1 - part
        return replace(
            host,
            bytes_per_s=1 / (off / host.bytes_per_s + part / gpu.bytes_per_s),
            flop_per_s=1 / (off / host.flop_per_s + part / gpu.flop_per_s),
            layer_s=off * host.layer_s + part * gpu.layer_s,
        )


def described_host(name: str, n_cores: int, memory_bytes: float) -> Host:
    """A host by its description. `memory_bytes`: the part that models may take."""
    cores = frozenset(range(max(1, n_cores)))
    return Host(name, cores, n_cores, FreeMemory(host=int(min(memory_bytes, UNLIMITED))))


def estimated_machine(name: str, n_cores: int, bytes_per_s: float, flop_per_s: float, memory_bytes: float) -> Machine:
    """A host of known speed. The costs of a layer and a run are estimated as in the shipped profiles."""
    layer_s = LAYER_S_A_CORE * n_cores if n_cores != UNKNOWN_CORES else LAYER_S
    return Machine(name, bytes_per_s, flop_per_s, layer_s, RUN_S, memory_bytes)


def profiled_nodes(file: ProfileFile) -> list[Node]:
    """A rank on each machine of a profile, in pipeline order. Raises UserError for a profile of measured times."""
    if not file.by_hardware:
        measured = "has measured times of its own models and says nothing of machines"
        raise UserError(f"{file.name} {measured}; ask simulate about it, or give --hosts")
    source = f"profile {file.name}"
    return [
        Node(described_host(f"{machine.name}-{number}", UNKNOWN_CORES, machine.memory_bytes), machine, source)
        for number, machine in enumerate(file.machines())
    ]


def first_ranks(nodes: Sequence[Node], n_ranks: int | None, where: str) -> list[Node]:
    """The first `n_ranks` of them, or all. Raises UserError if there are fewer."""
    if n_ranks and n_ranks > len(nodes):
        raise UserError(f"-np {n_ranks}: {where} has {len(nodes)} slots; give at most so many, or name more hosts")
    return list(nodes[: n_ranks or len(nodes)])


# -- hosts files


def read_hosts(path: Path) -> list[Node]:
    """A node for each slot. Raises UserError, with the line, for what is no hosts file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors on Windows begin it with a mark
    except OSError as error:
        raise UserError(f"--hosts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--hosts {path} is not UTF-8 text (byte {error.start})") from None
    nodes: list[Node] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            nodes += _read_line(f"--hosts {path}, line {number}", words)
    if not nodes:
        raise UserError(f"--hosts {path} names no host; write one a line, as in: node1 slots=1 cores=32 memory=128G")
    by_name: dict[str, Node] = {}
    for node in nodes:  # lines of one host are one machine
        if by_name.setdefault(node.host.name, node) != node:
            raise UserError(f"--hosts {path} says different things of {node.host.name}; give each host one line")
    return nodes


def _read_line(where: str, words: Sequence[str]) -> list[Node]:
    name, _, slots = words[0].partition(":")
    if not HOST.fullmatch(name):
        user = "; a user is set in ~/.ssh/config" if "@" in name else ""
        raise UserError(f"{where}: {words[0]!r} is no host; write its name, then KEY=VALUE{user}")
    values = _read_values(where, words[1:])
    if slots and "slots" in values:
        raise UserError(f"{where}: {words[0]} and slots={values['slots']} both give slots; leave one out")
    n_slots = _whole(where, "slots", slots or values.get("slots", "1"), MAX_SLOTS)
    n_cores = _whole(where, "cores", values["cores"], MAX_CORES) if "cores" in values else UNKNOWN_CORES
    memory = _bytes(where, "memory", values["memory"]) if "memory" in values else math.inf
    machine = _machine(where, name, n_cores, values, memory, "")
    gpu_machine = _machine(where, values.get("gpu", name), UNKNOWN_CORES, values, math.inf, GPU)
    if gpu_machine and not machine:
        raise UserError(f"{where}: {GPU}{SPEEDS[0]} is the speed of GPUs; give {' and '.join(SPEEDS)} of the host too")
    host = described_host(name, n_cores, memory)
    if "gpu_memory" in values:
        gpu_bytes = _bytes(where, "gpu_memory", values["gpu_memory"])
        host = replace(host, gpus=((values.get("gpu", "its GPUs"), gpu_bytes),))
    return [Node(host, machine, "hosts file" if machine else "", values.get("gpu", ""), gpu_machine)] * n_slots


def _read_values(where: str, words: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lower().replace("-", "_")
        if not equals or not value or key not in KEYS:
            raise UserError(f"{where}: {word!r} is not KEY=VALUE with a known key; the keys are {', '.join(KEYS)}")
        if key in values:
            raise UserError(f"{where}: {key} is given twice; leave one out")
        values[key] = value
    return values


def _machine(
    where: str, name: str, n_cores: int, values: Mapping[str, str], memory: float, prefix: str
) -> Machine | None:
    both = [prefix + key for key in SPEEDS]
    keys = [key for key in both if key in values]
    if len(keys) == 1:
        raise UserError(f"{where}: {keys[0]} alone tells no speed; give {' and '.join(both)}, or neither")
    if not keys:
        return None
    read, compute = (_speed(where, key, values[key]) for key in keys)
    return estimated_machine(name, n_cores, 1e9 * read, 1e9 * compute, memory)


def _whole(where: str, key: str, text: str, most: int) -> int:
    if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
        raise UserError(f"{where}: {key}={text}; give a whole number from 1 to {most}")
    return int(text)


def _bytes(where: str, key: str, text: str) -> int:
    match = NUMBER.fullmatch(text)
    n_bytes = float(match[1]) * UNITS[(match[2] or "").replace("K", "k")] if match else 0
    if not 1 <= n_bytes <= MAX_BYTES:
        raise UserError(f"{where}: {key}={text}; give bytes with a unit, as in 64G, 500GiB")
    if n_bytes < LEAST_BYTES:
        size = f"{size_text(n_bytes)}, in which nothing fits"
        raise UserError(f"{where}: {key}={text} is {size}; give a unit, as in 64G, 500GiB")
    return int(n_bytes)


def _speed(where: str, key: str, text: str) -> float:
    match = NUMBER.fullmatch(text)
    value = float(text) if match and not match[2] and not text.endswith("B") else 0.0
    if not LEAST_SPEED <= value <= MOST_SPEED:
        raise UserError(f"{where}: {key}={text}; give a number from {LEAST_SPEED:g} to {MOST_SPEED:g}")
    return value
