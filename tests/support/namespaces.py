"""Hosts of their own on this machine: network namespaces with names, addresses and links of a bandwidth, for MPICH.

    node1 ── eth0 ──┐
    node2 ── eth0 ──┼── a bridge, in a namespace of its own
    node3 ── eth0 ──┘

Nothing leads out of them. Needs root, iproute2 and a kernel with veth, bridge and tbf.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.jobs import COMMAND, MPIRUN, environment

NETWORK = "10.77.0"
COUNT = itertools.count()
LAUNCHER = """#!/bin/sh
# what hydra takes for ssh: [-x] HOST COMMAND…
[ "$1" = -x ] && shift
host=$1; shift
exec {ip} netns exec {prefix}$host {unshare} --uts sh -c "hostname $host; exec $*"
"""


def missing(needs_hydra: bool = True) -> str:
    """Why there can be no such hosts here; empty where there can. `needs_hydra`: jobs are started by `Hosts`."""
    if os.geteuid() != 0:
        return "namespaces with links need root"
    for tool in ("ip", "tc", "unshare"):
        if _tool(tool) is None:
            return f"there is no {tool}"
    version = subprocess.run([str(MPIRUN), "--version"], capture_output=True, text=True).stdout if MPIRUN else ""
    if needs_hydra and "HYDRA" not in version:
        return "the launcher is not MPICH's"
    try:
        with hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"the kernel or its keeper does not allow it: {error.stderr.strip()}"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _ip(*words: str) -> None:
    subprocess.run([_tool("ip") or "ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Hosts:
    """`node1` to `nodeN`, as they are called inside."""

    names: Sequence[str]
    prefix: str
    folder: Path

    def inside(self, name: str, script: str) -> list[str]:
        """The command line that runs a script of the shell on one of them; words behind it are the script's."""
        setup = f"hostname {name}; {script}"
        return ["ip", "netns", "exec", self.prefix + name, "unshare", "--uts", "sh", "-c", setup]

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def limit(self, mbit: float, names: Sequence[str] = (), device: str = "eth0") -> None:
        """What each of them can send, from now on; `names`: these alone."""
        for name in names or self.names:
            rate = ["rate", f"{mbit:g}mbit", "burst", f"{max(1600, 125 * mbit):.0f}b", "latency", "200ms"]
            where = ["-n", self.prefix + name, "qdisc", "replace", "dev", device, "root", "tbf"]
            subprocess.run([_tool("tc") or "tc", *where, *rate], check=True, capture_output=True, text=True)

    def cut(self, name: str) -> None:
        """Nothing gets to this host any more, nor from it; nobody is told."""
        _ip("-n", f"{self.prefix}bridge", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """What `cut` did."""
        _ip("-n", f"{self.prefix}bridge", "link", "set", name, "up")

    @contextmanager
    def joined(self, name: str, other: str, network: str) -> Iterator[None]:
        """A cable between the `eth1` of these two, with addresses NETWORK.1 and NETWORK.2."""
        ends = [self.prefix + name, self.prefix + other]
        peer = ["type", "veth", "peer", "name", "eth1", "netns", ends[1]]
        _ip("-n", ends[0], "link", "add", "eth1", *peer)
        try:
            for number, end in enumerate(ends, 1):
                _ip("-n", end, "addr", "add", f"{network}.{number}/24", "dev", "eth1")
                _ip("-n", end, "link", "set", "eth1", "up")
            yield
        finally:
            _ip("-n", ends[0], "link", "del", "eth1")

    @contextmanager
    def parted(self, name: str, other: str) -> Iterator[None]:
        """Nothing gets from one of these to the other any more, and all else does; nobody is told."""
        ways = [(name, other), (other, name)]
        for here, there in ways:
            self._neighbour(here, "replace", there, "lladdr", "02:00:00:00:00:01", "nud", "permanent")
        try:
            yield
        finally:
            for here, there in ways:
                self._neighbour(here, "del", there)

    def _neighbour(self, here: str, what: str, there: str, *words: str) -> None:
        _ip("-n", self.prefix + here, "neigh", what, self.address(there), "dev", "eth0", *words)

    def start(
        self, arguments: Sequence[str], supervised: bool = False, stderr: Any = subprocess.PIPE, **options: Any
    ) -> subprocess.Popen[str]:
        """A job with a rank on each, launched from the first one, where a supervisor may be above it."""
        hydra = [
            str(MPIRUN),
            "-f",
            str(self.folder / "hosts"),
            "-iface",
            "eth0",
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(self.folder / "launcher"),
            "-np",
            str(len(self.names)),
        ]
        words = [*(["supervise"] if supervised else []), *hydra, *COMMAND, *arguments]
        return subprocess.Popen(
            [str(self.folder / "launcher"), self.names[0], shlex.join([*(COMMAND if supervised else []), *words])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment() | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"},
            **options,
        )

    def run(self, arguments: Sequence[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        with self.start(arguments) as job:
            try:
                out, errors = job.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.end_all()
                raise
        return subprocess.CompletedProcess(job.args, job.returncode, out, errors)

    def end_all(self) -> None:
        """Kill what still runs on them."""
        for name in self.names:
            found = subprocess.run([_tool("ip") or "ip", "netns", "pids", self.prefix + name], capture_output=True)
            for pid in found.stdout.split():
                with open(os.devnull) as quiet:
                    subprocess.run(["kill", "-9", pid.decode()], stderr=quiet)


@contextmanager
def hosts(n: int, folder: Path | None = None) -> Iterator[Hosts]:
    """`folder`: for the launcher's files. Raises CalledProcessError where the kernel does not allow it."""
    prefix, names = f"pi{os.getpid()}.{next(COUNT)}-", [f"node{index + 1}" for index in range(n)]
    made = Hosts(names, prefix, folder or Path("/nonexistent"))
    try:
        _ip("netns", "add", f"{prefix}bridge")
        _ip("-n", f"{prefix}bridge", "link", "add", "bridge", "type", "bridge")
        _ip("-n", f"{prefix}bridge", "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            _add(prefix, name, f"{NETWORK}.{index + 1}", names)
        made.limit(1000)
        if folder:
            (folder / "hosts").write_text("".join(f"{name}:1\n" for name in names))
            launcher = LAUNCHER.format(ip=_tool("ip"), prefix=prefix, unshare=_tool("unshare"))
            (folder / "launcher").write_text(launcher)
            (folder / "launcher").chmod(0o755)
        yield made
    finally:
        if folder:
            made.end_all()
        for name in ("bridge", *names):
            subprocess.run([_tool("ip") or "ip", "netns", "del", prefix + name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / f"{prefix}{name}", ignore_errors=True)


def _add(prefix: str, name: str, address: str, names: Sequence[str]) -> None:
    space, bridge = prefix + name, f"{prefix}bridge"
    known = Path("/etc/netns") / space  # `ip netns exec` puts what is there over /etc
    known.mkdir(parents=True)
    lines = [f"{NETWORK}.{index + 1} {other}" for index, other in enumerate(names)]
    (known / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    _ip("netns", "add", space)
    _ip("-n", bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
    _ip("-n", bridge, "link", "set", name, "master", "bridge", "up")
    _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", space, "link", "set", "eth0", "up")
    _ip("-n", space, "link", "set", "lo", "up")
