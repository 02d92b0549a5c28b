"""A hosts file of MPICH (`node1:2`) or Open MPI (`node1 slots=2 max_slots=4`), with what is known of each host:

    node3 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325
    node4 slots=1 cores=64 memory=500GiB gpu=H100 gpu_memory=78G

All values are of all ranks of the host together; docs/how-to/measure.md explains them.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text
from pipeinfer.virtual.nodes import UNKNOWN_CORES, Node, described_host, estimated_machine
from pipeinfer.virtual.profile import Machine

KEYS = ("slots", "cores", "memory", "gb_per_s", "gflop_per_s", "gpu", "gpu_memory", "max_slots")
MAX_SLOTS, MAX_CORES, MAX_BYTES = 4096, 65536, 1 << 62
LEAST_BYTES = 10**6  # less is meant to have a unit
LEAST_SPEED, MOST_SPEED = 1e-6, 1e9
NUMBER = re.compile(r"([0-9]{1,18}\.?[0-9]{0,18})([kKMGT]i?)?B?")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def read_hosts(path: Path) -> list[Node]:
    """A node a slot. Raises UserError, with the line, for what is no hosts file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--hosts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--hosts {path} is not UTF-8 text (byte {error.start})") from None
    nodes: list[Node] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            nodes += _Line(f"--hosts {path}, line {number}", path).nodes(words)
    if not nodes:
        raise UserError(f"--hosts {path} names no host; write one a line, as in: node1 slots=1 cores=32 memory=128G")
    _check_once(path, nodes)
    return nodes


def _check_once(path: Path, nodes: list[Node]) -> None:
    """Lines of one host must say the same of it: they are one machine."""
    known: dict[str, Node] = {}
    for node in nodes:
        if known.setdefault(node.host.name, node) != node:
            raise UserError(f"--hosts {path} says different things of {node.host.name}; give each host one line")


class _Line:
    def __init__(self, where: str, path: Path) -> None:
        self.where, self.path = where, path

    def nodes(self, words: list[str]) -> Iterator[Node]:
        name, _, slots = words[0].partition(":")
        if not HOST.fullmatch(name):
            raise UserError(f"{self.where}: {words[0]!r} is no host; write its name, then KEY=VALUE")
        values = self._values(words[1:])
        if slots and "slots" in values:
            raise UserError(f"{self.where}: {words[0]} and slots={values['slots']} both give slots; leave one out")
        n_slots = self._whole("slots", slots or values.get("slots", "1"), MAX_SLOTS)
        n_cores = self._whole("cores", values["cores"], MAX_CORES) if "cores" in values else UNKNOWN_CORES
        memory = self._bytes(values["memory"]) if "memory" in values else math.inf
        machine = self._machine(name, n_cores, values, memory)
        source = "hosts file" if machine else ""
        host = described_host(name, n_cores, memory)
        if "gpu_memory" in values:
            free = self._bytes(values["gpu_memory"], "gpu_memory")
            host = replace(host, gpus=((values.get("gpu", "its GPUs"), free),))
        node = Node(host, machine, source, values.get("gpu", ""))
        yield from [node] * n_slots

    def _values(self, words: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            key = key.lower().replace("-", "_")
            if not equals or not value or key not in KEYS:
                raise UserError(
                    f"{self.where}: {word!r} is not KEY=VALUE with a known key; the keys are {', '.join(KEYS)}"
                )
            if key in found:
                raise UserError(f"{self.where}: {key} is given twice; leave one out")
            found[key] = value
        return found

    def _machine(self, name: str, n_cores: int, values: Mapping[str, str], memory: float) -> Machine | None:
        given = [key for key in ("gb_per_s", "gflop_per_s") if key in values]
        if len(given) == 1:
            raise UserError(f"{self.where}: {given[0]} alone tells no speed; give gb_per_s and gflop_per_s, or neither")
        if not given:
            return None
        read, compute = (self._speed(key, values[key]) for key in given)
        return estimated_machine(name, n_cores, 1e9 * read, 1e9 * compute, memory)

    def _whole(self, key: str, text: str, most: int) -> int:
        if not (re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= most):
            raise UserError(f"{self.where}: {key}={text}; give a whole number from 1 to {most}")
        return int(text)

    def _bytes(self, text: str, key: str = "memory") -> int:
        match = NUMBER.fullmatch(text)
        n_bytes = float(match[1]) * UNITS[(match[2] or "").replace("K", "k")] if match else 0
        if not 1 <= n_bytes <= MAX_BYTES:
            raise UserError(f"{self.where}: {key}={text}; give bytes with a unit, as in 64G, 500GiB")
        if n_bytes < LEAST_BYTES:
            raise UserError(f"{self.where}: {key}={text} is {size_text(n_bytes)}, in which nothing fits; give a unit, "
                            "as in 64G, 500GiB")  # fmt: skip
        return int(n_bytes)

    def _speed(self, key: str, text: str) -> float:
        match = NUMBER.fullmatch(text)
        value = float(text) if match and not match[2] and not text.endswith("B") else 0.0
        if not LEAST_SPEED <= value <= MOST_SPEED:
            raise UserError(f"{self.where}: {key}={text}; give a number from {LEAST_SPEED:g} to {MOST_SPEED:g}")
        return value
