"""A Slurm for the tests, its daemons in a folder of their own: of one node or several on this host, which listen on
loopback only, or with a node on each of the hosts of `namespaces`."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import namespaces
from tests.support.jobs import BY_MPICH, ROOT
from tests.support.namespaces import Hosts

N_CPUS = 8
"""Tasks that fit on a node; the host need not have as many cores."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
START_TIMEOUT_S = 20.0
NOT_OPEN_MPI = "Open MPI needs Slurm's PMIx, which Debian's does not load"

CONFIG = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
FirstJobId={first_job}
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={n_cpus}"
LOOPBACK = "127.0.0.1"


def missing_programs() -> list[str]:
    """What of Slurm is not installed here."""
    return [name for name in PROGRAMS if not shutil.which(name, path=SEARCH_PATH)]


class Slurm:
    """The daemons, and the environment in which Slurm's commands find them. Started and stopped by `private_slurm`.

    `hosts`: those of the nodes, of which the first one has the commands; `setups`: commands of the shell before a
    node's daemon, such as mounts."""

    def __init__(self, folder: Path, hosts: Hosts | None = None, setups: Mapping[str, str] | None = None) -> None:
        self.folder, self.hosts, self.ports = folder, hosts, dict[str, int]()
        self._setups = setups or {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCH_PATH}
        for name in [name for name in self.environ if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))]:
            if name != "SLURM_CONF":  # where the tests themselves are a job
                del self.environ[name]

    def start(self, n_nodes: int = 1) -> None:
        """Returns when the nodes take jobs. RuntimeError, with what the daemons wrote, when it never does."""
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        here, user = socket.gethostname().split(".")[0], pwd.getpwuid(os.geteuid()).pw_name
        # MPICH names a job's shared memory after the job's id, and what a killed job left there would stop its namesake
        first_job = 1 + secrets.randbelow(1 << 25)
        names = [here] if n_nodes == 1 else [f"node{number}" for number in range(n_nodes)]
        names = list(self.hosts.names) if self.hosts else names
        port, *ports = _free_ports(1 + len(names))
        self.ports = dict(zip(names, ports, strict=True))
        addresses = {name: self.hosts.address(name) if self.hosts else LOOPBACK for name in names}
        for name in names:
            (folder / f"spool-{name}").mkdir()
        config = CONFIG.format(
            folder=folder,
            host=names[0] if self.hosts else here,
            address=addresses[names[0]],
            user=user,
            port=port,
            first_job=first_job,
            nodes="\n".join(
                NODE.format(name=name, host=name if self.hosts else here, address=address, port=own, n_cpus=N_CPUS)
                for (name, address), own in zip(addresses.items(), ports, strict=True)
            ),
        )
        (folder / "slurm.conf").write_text(config)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not looked for: a host has no such folders
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "pid", "seed-file": "seed"}
        places = [f"--{name}={folder / file}" for name, file in (files | {"log-file": "munged.log"}).items()]
        # --force: the folder is closed to other users, which munged would have open
        self._daemon("munged", "--foreground", "--force", *places)
        self._await(lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D")
        for name in names:
            self._daemon("slurmd", "-D", "-N", name, node=name)
        self._await(lambda: self.output("sinfo", "--noheader", "--format=%T").strip() == "idle")

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._inside(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ | options.pop("environ", {}),
            **options,
        )

    def finish(self, *command: str, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end; a command that hangs is killed and fails the test."""
        with self.popen(*command, **options) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def output(self, *command: str) -> str:
        return self.finish(*command).stdout

    def processes(self, *settings: str) -> list[int]:
        """Daemons, commands and tasks of this Slurm that have all these `NAME=VALUE` in their environment."""
        wanted = {f"SLURM_CONF={self.folder / 'slurm.conf'}", *settings}
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended, or another user's
                if wanted <= set((place / "environ").read_bytes().decode(errors="replace").split("\0")):
                    found.append(int(place.name))
        return found

    def stop(self) -> None:
        """Kill whatever belongs to this Slurm. RuntimeError when something cannot be killed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while pids := self.processes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {pids} of the Slurm in {self.folder} cannot be killed")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for daemon in self._daemons:
            daemon.wait()

    def _inside(self, node: str = "") -> list[str]:
        """The words before a command on the host of a node; by default of the first one."""
        setup = self._setups.get(node, "true")
        if self.hosts is None:
            return []
        return [*self.hosts.inside(node or self.hosts.names[0], f'{setup} && exec "$@"'), "sh"]

    def _daemon(self, name: str, *arguments: str, node: str = "") -> None:
        # dies with the tests, even if nobody is left to stop it
        command = ["setpriv", "--pdeathsig", "KILL", *self._inside(node), name, *arguments]
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ)
            )

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                written = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))
                raise RuntimeError(f"Slurm does not start:\n{written}")
            time.sleep(0.05)


@contextlib.contextmanager
def private_slurm(
    n_nodes: int = 1, hosts: Hosts | None = None, setups: Mapping[str, str] | None = None
) -> Iterator[Slurm]:
    """A running Slurm; at the end of the block, however it ends, nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        slurm = Slurm(Path(folder), hosts, setups)
        try:
            slurm.start(n_nodes)
            yield slurm
        finally:
            slurm.stop()


ON_HOSTS = {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
"""The environment of commands on hosts of their own."""


@contextlib.contextmanager
def slurm_on_hosts(n: int, folder: Path, setups: Mapping[str, str] | None = None) -> Iterator[Slurm]:
    """With a node on each of `n` hosts; the test is skipped where these cannot be made."""
    if why := ", ".join(missing_programs()) or namespaces.missing(needs_hydra=False):
        pytest.skip(f"no hosts with Slurm can be made here: {why}")
    if not BY_MPICH:
        pytest.skip(NOT_OPEN_MPI)
    with namespaces.hosts(n, folder) as made, private_slurm(hosts=made, setups=setups) as running:
        yield running


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Of two nodes. A module that imports it names it in `__all__`."""
    if missing_programs():
        pytest.skip(f"not installed: {', '.join(missing_programs())}")
    if not BY_MPICH:
        pytest.skip(NOT_OPEN_MPI)
    with private_slurm(2) as running:
        yield running
    assert running.processes() == []


def _free_ports(n: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [one.getsockname()[1] for one in sockets]
