"""The hosts that `doctor` looks at, and the launcher's command lines for jobs on them. Connects to nothing."""

import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.child import is_open_mpi, own_program
from pipeinfer.cluster.hosts.launcher import expand_nodes
from pipeinfer.errors import UserError
from pipeinfer.virtual.nodes import HOST, MAX_SLOTS, UNKNOWN_CORES, Node, described_host, read_hosts

LAUNCHERS = ("mpich", "openmpi", "srun")
NODES = "SLURM_JOB_NODELIST"


@dataclass(frozen=True, slots=True)
class HostList:
    """`nodes`: one a rank, as described. `here`: hosts that are this machine. `open_mpi`: srun starts its ranks."""

    nodes: Sequence[Node]
    launcher: str
    here: frozenset[str] = frozenset()
    open_mpi: bool = False

    @property
    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(node.host.name for node in self.nodes))

    def slots(self, host: str) -> int:
        return sum(node.host.name == host for node in self.nodes)

    def words(self, hosts: Sequence[str], n_ranks: Mapping[str, int], interface: str = "") -> list[str]:
        """The launcher's words for so many ranks on each of `hosts`. `interface`: MPI's network, of several."""
        total = str(sum(n_ranks[host] for host in hosts))
        listed = ",".join(f"{host}:{n_ranks[host]}" for host in hosts)
        is_alone = self.here.issuperset(self.names)
        if self.launcher == "srun":
            mpi = "pmix" if self.open_mpi else "pmi2"
            return ["srun", "-X", f"--mpi={mpi}", "-N", str(len(hosts)), "-n", total, "-w", ",".join(hosts)]
        if self.launcher == "openmpi":
            network = ["--mca", "btl_tcp_if_include", interface] if interface else []
            return ["mpirun", *([] if is_alone else ["--host", listed]), "--bind-to", "none", *network, "-np", total]
        network = ["-iface", interface, "-genv", "UCX_NET_DEVICES", interface] if interface else []
        return ["mpirun", *([] if is_alone else ["-hosts", listed]), *network, "-np", total]


def read_host_list(text: str | None, launcher: str | None, environ: Mapping[str, str] = os.environ) -> HostList:
    """`text`: a hosts file or names; None: the nodes of a Slurm allocation, or this machine. Raises UserError."""
    in_slurm = NODES in environ and text is None
    launcher = launcher or ("srun" if in_slurm else "openmpi" if is_open_mpi() else "mpich")
    if launcher == "srun" and not (NODES in environ and shutil.which("srun")):
        raise UserError("--launcher srun works within an allocation: salloc -N 2 pipeinfer doctor")
    if text is None:
        names = expand_nodes(environ[NODES]) if in_slurm else [socket.gethostname()]
        nodes = [host_named(name) for name in names]
    else:
        nodes = read_hosts(Path(text)) if os.path.isfile(text) else _listed(text)
    here = frozenset({node.host.name for node in nodes if launcher != "srun" and is_this_machine(node.host.name)})
    return HostList(nodes, launcher, here, launcher == "openmpi" or (launcher == "srun" and is_open_mpi()))


def full_words(words: Sequence[str]) -> list[str]:
    """With the path of this program's mpirun, unless the shell finds that one."""
    in_path, ours = shutil.which("mpirun"), own_program("mpirun")
    is_other = words[0] == "mpirun" and not (in_path and os.path.exists(ours) and os.path.samefile(in_path, ours))
    return [ours if is_other else words[0], *words[1:]]


def program_words() -> str:
    """How the program is named for a launcher, which may search other folders than this shell."""
    installed = Path(sys.executable).with_name("pipeinfer")
    return str(installed) if installed.exists() else f"{sys.executable} -m pipeinfer"


def is_this_machine(name: str) -> bool:
    """Whether an address of that name belongs to this machine."""
    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    try:
        address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0]) as probe:
            probe.bind(address[4])
            return True
    except OSError:
        return False


def _listed(text: str) -> list[Node]:
    nodes = []
    for item in text.split(","):
        match = re.fullmatch(rf"({HOST.pattern})(?::([1-9][0-9]{{0,3}}))?", item.strip())
        if not match or int(match[2] or 1) > MAX_SLOTS:
            raise UserError(
                f"--hosts {text}: {item!r} is neither a file nor a host; give a hosts file, or names as in "
                "node1,node2:2"
            )
        nodes += [host_named(match[1])] * int(match[2] or 1)
    return nodes


def host_named(name: str) -> Node:
    """A rank on a host of which the name alone is known."""
    return Node(described_host(name, UNKNOWN_CORES, math.inf))
