"""Hosts of their own on this machine that take ssh connections: the namespaces of `namespaces`, with an sshd in each.

node1 has the key, and knows the host keys; `shell` of a host is what its sshd begins with, in a mount namespace.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import namespaces
from tests.support.jobs import COMMAND, MPIRUN, environment
from tests.support.namespaces import NETWORK, Hosts

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
PORT_S = 10.0
SSHD_CONFIG = """
HostKey {folder}/key-{name}
AuthorizedKeysFile {folder}/authorized-{name}
PermitRootLogin yes
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
{extra}
"""
PLAIN_LOGIN = "[ -e ~/.bashrc ] && mount --bind /dev/null ~/.bashrc"
"""Sixteen hosts have sixteen processors for what a login runs; here it may take longer than all else."""

SSH_CONFIG = """
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile /dev/null
"""


def missing() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        return "there is no sshd (openssh-server)"
    return namespaces.missing(needs_hydra=False)


class SshHosts:
    """`node1` to `nodeN`. A test may change the files in `folder`, and start a host's sshd anew."""

    def __init__(self, made: Hosts, folder: Path) -> None:
        self.made, self.folder, self.names = made, folder, list(made.names)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def inside(self, name: str, script: str) -> list[str]:
        return self.made.inside(name, script)

    def start(self, name: str, shell: str = "", extra: str = "") -> None:
        """Its sshd. `shell`: commands before, such as mounts; `extra`: lines of its configuration."""
        self.stop(name)
        config = self.folder / f"sshd-{name}"
        config.write_text(SSHD_CONFIG.format(folder=self.folder, name=name, extra=extra))
        script = f"{PLAIN_LOGIN}; {shell or 'true'} && exec {SSHD} -D -e -f {config}"
        with (self.folder / f"log-{name}").open("wb") as log:
            words = ["setpriv", "--pdeathsig", "KILL", *self.inside(name, script)]
            self._daemons[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self, name: str) -> None:
        if daemon := self._daemons.pop(name, None):
            daemon.kill()
            daemon.wait()

    def await_all(self) -> None:
        end_s = time.monotonic() + PORT_S
        for name in self._daemons:
            log = self.folder / f"log-{name}"
            while b"Server listening" not in log.read_bytes():
                assert time.monotonic() < end_s, log.read_text()
                time.sleep(0.02)

    def run(
        self, words: Sequence[str], timeout_s: float = 90, variables: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command of pipeinfer on node1."""
        script = f"exec {shlex.join([*COMMAND, *words])}"
        extra = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}  # between hosts, not by memory of this machine
        environ, inside = environment() | extra | (variables or {}), self.inside("node1", script)
        none = subprocess.DEVNULL
        return subprocess.run(inside, stdin=none, capture_output=True, text=True, env=environ, timeout=timeout_s)


@contextmanager
def ssh_hosts(n: int, folder: Path) -> Iterator[SshHosts]:
    Path("/run/sshd").mkdir(exist_ok=True)
    with namespaces.hosts(n, folder) as made:
        hosts = SshHosts(made, folder)
        for name in ["", *hosts.names]:
            key = folder / f"key-{name}".rstrip("-")
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        lines = []
        for index, name in enumerate(hosts.names):
            shutil.copy(folder / "key.pub", folder / f"authorized-{name}")
            lines.append(f"{name},{NETWORK}.{index + 1} {(folder / f'key-{name}.pub').read_text()}")
            configs = Path("/etc/netns") / f"{made.prefix}{name}" / "ssh"  # lies over /etc/ssh
            configs.mkdir()
            (configs / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
            hosts.start(name)
        (folder / "known_hosts").write_text("".join(lines))
        try:
            hosts.await_all()
            yield hosts
        finally:
            for name in hosts.names:
                hosts.stop(name)


__all__ = ["COMMAND", "MPIRUN", "SshHosts", "missing", "ssh_hosts"]
